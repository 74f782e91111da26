"""fingerprint(): what changes it, what does not, and what has none."""

import importlib
import sys

import pytest

from inductor_passes.fingerprint import NoFingerprint, fingerprint
from inductor_passes.pipeline import PIPELINE

SOURCE = """
import dataclasses, enum, functools
import {top}_helper
from {top}_package import tools as used


class Kind(enum.Enum):
    A = 1


@dataclasses.dataclass(frozen=True)
class Sized:
    name = "sized"
    size: int = 1
    kind: Kind = Kind.A
    then: object = None

    def run(self, graph, log):
        return _work(self.size)


class Plain:
    limit = 3

    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def run(self, graph, log):
        from {top}_lazy import late

        return late


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def run(self, graph, log): ...


def _work(size):
    return size + 1


def closing_over(value):
    class Closing:
        def run(self, graph, log):
            return value

    return Closing()


def partly(value):
    return functools.partial(_work, value)
"""
FILES = ("helper", "package/__init__", "package/tools", "lazy")


@pytest.fixture
def user(tmp_path, monkeypatch, request):
    """A module of a user's, imported, with a way to edit it or what it imports and to import all of it anew."""
    top = f"user_{request.node.name.partition('[')[0]}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{top}_package").mkdir()
    for name in FILES:
        (tmp_path / f"{top}_{name}.py").write_text("late = 1\n")
    (tmp_path / f"{top}.py").write_text(SOURCE.format(top=top))

    def load(file="", old="", new=""):
        path = tmp_path / f"{top}{file}.py"
        path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        for name in [name for name in sys.modules if name.startswith(top)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True  # a file rewritten within a second would be taken for its old bytecode
        return importlib.import_module(top)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield load
    for name in [name for name in sys.modules if name.startswith(top)]:
        del sys.modules[name]


def test_equal_in_a_fresh_import(user):
    first, again = user(), user()
    assert first.Sized is not again.Sized
    for make in (
        lambda m: m.Sized(2),
        lambda m: m.Plain({"a": [1.5, None]}),
        lambda m: m.closing_over((1, "x")),
    ):
        assert fingerprint(make(first)) == fingerprint(make(again))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("", "return _work(self.size)", "return _work(self.size) + 1"),
        ("", "return size + 1", "return size + 2"),
        ("_helper", "late = 1", "late = 2"),
        ("_package/__init__", "late = 1", "late = 2"),
        ("_package/tools", "late = 1", "late = 2"),
        ("_lazy", "late = 1", "late = 2"),
    ],
    ids=["body", "function it calls", "imported", "package", "from a package", "imported in a function"],
)
def test_a_changed_source_changes_it(user, file, old, new):
    before = fingerprint(user().Sized())
    assert fingerprint(user(file, old, new).Sized()) != before


def test_state_changes_it(user):
    module = user()
    made = [
        *(module.Sized(size) for size in (1, 1.0, True, 2)),
        *(module.Plain(held) for held in (None, "None", {"a": 1}, {"a": 2}, [1, 2], (1, 2), {1, 2}, {1, 3})),
        *(module.Slotted(held) for held in (1, 2)),
        *(module.closing_over(value) for value in (1, 2)),
        *(module.Plain(module.partly(value)) for value in (1, 2)),
        *(module.Plain(function) for function in (module.closing_over, module.partly, module.Plain.run)),
        *(module.Plain(each) for each in (module.Sized(3), module.Sized(4), module.Kind.A)),
    ]
    assert len({fingerprint(each) for each in made}) == len(made)


def test_a_class_attribute_set_later_changes_it(user):
    module = user()
    before = fingerprint(module.Plain())
    module.Plain.limit = 4
    assert fingerprint(module.Plain()) != before


def test_the_order_of_a_set_does_not_matter(user):
    module = user()
    one, other = {f"name{i}" for i in range(50)}, {f"name{i}" for i in reversed(range(50))}
    assert fingerprint(module.Plain(one)) == fingerprint(module.Plain(other))


def test_ours_have_one_each():
    assert len({fingerprint(each) for each in PIPELINE}) == len(PIPELINE)


def test_typed_classes_have_none(user):
    module = user()
    for where in ({"__name__": "__main__"}, {"__name__": module.__name__}, {}):
        exec("class Typed:\n    def run(self, graph, log): ...", where)
        with pytest.raises(NoFingerprint, match=r"Typed"):
            fingerprint(where["Typed"]())


def test_a_patched_method_counts_by_its_own_source(user):
    module = user()
    before = fingerprint(module.Plain())
    module.Plain.run = _patched_run
    assert fingerprint(module.Plain()) != before
    exec("def typed(self, graph, log): ...", vars(module))
    module.Plain.run = module.typed
    with pytest.raises(NoFingerprint, match="typed is not what its source file says"):
        fingerprint(module.Plain())


def _patched_run(self, graph, log): ...


@pytest.mark.parametrize("edit", ["return _work(self.size) * 2", "return 0"])
def test_a_file_edited_after_its_import_has_none(user, edit):
    module = user()
    path = module.__file__
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("return _work(self.size)", edit))
    with pytest.raises(NoFingerprint, match=r"Sized\.run is not what its source file says"):
        fingerprint(module.Sized())


def test_a_called_function_edited_after_its_import_has_none(user):
    module = user()
    with open(module.__file__) as file:
        text = file.read()
    with open(module.__file__, "w") as file:
        file.write(text.replace("return size + 1", "return size + 3"))
    with pytest.raises(NoFingerprint, match="_work is not what"):
        fingerprint(module.Sized())


def test_what_has_no_stable_text_has_none(user):
    import re
    import threading

    import torch

    module = user()
    for held in (torch.ones(2), threading.Lock(), re.compile("x"), iter([]), torch.nn.Linear(1, 1)):
        with pytest.raises(NoFingerprint):
            fingerprint(module.Plain(held))


def test_a_loop_has_none(user):
    held = user().Plain([])
    held.held.append(held)
    with pytest.raises(NoFingerprint, match="refers to itself"):
        fingerprint(held)
