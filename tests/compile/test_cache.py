"""Compiled code is never stale: processes share a compile cache while a copy of the packages changes between them."""

import compileall
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tests.forked import run_python

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ops", "inductor_passes")
ANOTHER = "7"
"""A hash seed that the first process did not have: no key may be made of it."""

# Prints the value of a gate, its gradient, and what the caches did. The gate stands behind other arithmetic, so that
# our lowering writes it out; the gradient goes through a plain torch.compile.
PROBE = """
import json, sys, torch
if "passes" in sys.argv:
    import inductor_passes
import moe_ops
from torch._dynamo.utils import counters
if "tuned" in sys.argv:
    moe_ops.use_tuning(moe_ops.Tuning("NVIDIA H200", ()))

def gate(x):
    return moe_ops.gated_activation(x, "silu")

def caches():
    found = {**counters["inductor"], **counters["aot_autograd"]}
    counters.clear()
    return {name: count for name, count in found.items() if "cache" in name}

result = {}
x = torch.ones(2, 4)
if "passes" in sys.argv:
    with torch.no_grad():
        result["lowered"] = torch.compile(gate, fullgraph=True, options=inductor_passes.options())(x)[0, 0].item()
    result["lowered_caches"] = caches()
torch._dynamo.reset()
x.requires_grad_()
torch.compile(gate, fullgraph=True)(x).sum().backward()
result["gradient"] = x.grad[0, 0].item()
result["plain_caches"] = caches()
print(json.dumps(result))
"""


# A user's pass in a module of its own, with a helper in another: it multiplies what a gate gives.
USER_PASS = """
from torch.ops import aten
from user_helpers import factor
from inductor_passes.graph_tools import find


class Scale:
    name = "scale"
    requires = ("gated_activation",)
    inference_only = False

    def run(self, graph, log):
        for gate in find(graph, "gated_activation"):
            with graph.inserting_after(gate):
                scaled = graph.call_function(aten.mul.Tensor, (gate, factor() * 1))
            scaled.meta["val"] = gate.meta["val"]
            gate.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
"""
USER_HELPERS = "def factor():\n    return 2\n"
IMPORT_SCALE = "from user_pass import Scale"

# Prints the compiled value with the user's pass, the eager one, and what the caches did. The class is imported, or
# typed in as at a prompt.
USER_PROBE = """
import json, sys, torch, moe_ops
from inductor_passes.pipeline import PIPELINE, MoEPasses
from torch._dynamo.utils import counters
exec(sys.argv[1])
x = torch.ones(2, 4)
options = {"post_grad_custom_pre_pass": MoEPasses(passes=(Scale(), *PIPELINE))}
with torch.no_grad():
    value = torch.compile(lambda x: moe_ops.gated_activation(x, "silu"), options=options)(x)[0, 0].item()
found = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({
    "factor": value / moe_ops.gated_activation(x, "silu")[0, 0].item(),
    "caches": {name: count for name, count in found.items() if "cache" in name},
}))
"""


@dataclass(frozen=True)
class Workspace:
    """A copy of the packages and an empty compile cache."""

    root: Path

    def edit(self, path, old, new):
        """Changes one source file; returns self with the others untouched."""
        file = self.root / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
        file.write_text(text.replace(old, new))
        return self

    def fill(self):
        """Copies the packages once: sources edited while the tests run must not look like a change of ours."""
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            pristine = self.root / "pristine" / package
            shutil.copytree(ROOT / package, pristine, ignore=ignored)
            # Bytecode that is read where a source has the hash, not the time and size, that it was compiled from.
            compileall.compile_dir(pristine, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self.restore()

    def restore(self):
        for package in PACKAGES:
            shutil.rmtree(self.root / package, ignore_errors=True)
            shutil.copytree(self.root / "pristine" / package, self.root / package)
        (self.root / "user_pass.py").write_text(USER_PASS)
        (self.root / "user_helpers.py").write_text(USER_HELPERS)

    def run(self, *flags, probe=PROBE, hash_seed="random"):
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "cache"),
        }
        done = run_python(probe, *flags, cwd=self.root, env=environment, hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A workspace whose cache one process has filled, and what that process saw."""
    workspace = Workspace(tmp_path_factory.mktemp("cache"))
    workspace.fill()
    return workspace, workspace.run("passes")


@pytest.fixture
def workspace(filled):
    yield filled[0]
    filled[0].restore()


def _missed(caches):
    return caches.get("fxgraph_cache_miss", 0) >= 1 and not caches.get("fxgraph_cache_hit")


def test_first_process_misses(filled):
    _, first = filled
    assert _missed(first["lowered_caches"]) and _missed(first["plain_caches"])


def test_unchanged_sources_hit(filled, workspace):
    again = workspace.run("passes", hash_seed=ANOTHER)
    for kind in ("lowered_caches", "plain_caches"):
        assert again[kind]["fxgraph_cache_hit"] >= 1 and not again[kind].get("fxgraph_cache_miss")
        assert not any("bypass" in name and count for name, count in again[kind].items() if "fxgraph" in name)
    assert (again["lowered"], again["gradient"]) == (filled[1]["lowered"], filled[1]["gradient"])


def test_a_changed_lowering_gives_the_new_result(filled, workspace):
    old = '"gated_activation": gated_activation,'
    new = '"gated_activation": lambda args: 3 * gated_activation(args),'
    changed = workspace.edit("inductor_passes/lowerings/pointwise.py", old, new).run("passes")
    assert changed["lowered"] == pytest.approx(3 * filled[1]["lowered"])
    assert _missed(changed["lowered_caches"])
    # A plain compile runs no lowering of ours, and keeps its cache.
    assert changed["plain_caches"]["fxgraph_cache_hit"] >= 1


def test_a_changed_backward_gives_the_new_gradient_in_a_plain_compile(filled, workspace):
    old = "gate_up=activation_gradient(grad, *args)"
    new = "gate_up=activation_gradient(grad, *args) * 5"
    changed = workspace.edit("moe_ops/activation.py", old, new).run("passes")
    assert changed["gradient"] == pytest.approx(5 * filled[1]["gradient"])
    assert _missed(changed["plain_caches"]) and _missed(changed["lowered_caches"])


@pytest.mark.exhaustive  # what a cache reads of a file is the same for a backward, above, and for these
def test_a_changed_fake_misses_everywhere(workspace):
    path = workspace.root / "moe_ops/activation.py"
    path.write_text(path.read_text().replace("def _fake(", "def _fake(  # changed\n"))
    changed = workspace.run("passes")
    assert _missed(changed["plain_caches"]) and _missed(changed["lowered_caches"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("activation", marks=pytest.mark.exhaustive, id="a kernel"),
        pytest.param("gemm_tables", id="a tuning table"),
    ],
)
def test_a_changed_kernel_or_table_misses_everywhere(workspace, name):
    with (workspace.root / f"moe_ops/kernels/{name}.py").open("a") as file:
        file.write("\n# changed\n")
    changed = workspace.run("passes")
    assert _missed(changed["plain_caches"]) and _missed(changed["lowered_caches"])


def test_another_tuning_table_misses_where_launches_are_compiled_in(filled, workspace):
    """A plain compile calls operators, which choose when they run: it keeps its cache."""
    tuned = workspace.run("passes", "tuned")
    assert _missed(tuned["lowered_caches"]) and tuned["plain_caches"]["fxgraph_cache_hit"] >= 1
    again = workspace.run("passes", "tuned", hash_seed=ANOTHER)
    assert again["lowered_caches"]["fxgraph_cache_hit"] >= 1 and again["lowered"] == filled[1]["lowered"]


def test_a_process_without_the_passes_gets_its_own_right_code(filled, workspace):
    """The plain compile is the same whether or not inductor_passes is imported: same entry, same result."""
    without = workspace.run()
    assert without["gradient"] == filled[1]["gradient"]
    assert without["plain_caches"]["fxgraph_cache_hit"] >= 1


@pytest.mark.parametrize(
    "others", [pytest.param("PIPELINE[:-1]", marks=pytest.mark.exhaustive), "PIPELINE[1:] + PIPELINE[:1]"]
)
def test_other_passes_miss(scaled, workspace, others):
    changed = workspace.run(f"{IMPORT_SCALE}\nPIPELINE = {others}", probe=USER_PROBE)
    assert changed["factor"] == 2 and _missed(changed["caches"])


@pytest.fixture(scope="module")
def scaled(filled):
    """What the first process with the user's pass saw."""
    return filled[0].run(IMPORT_SCALE, probe=USER_PROBE)


def test_a_users_pass_is_cached(scaled, workspace):
    again = workspace.run(IMPORT_SCALE, probe=USER_PROBE, hash_seed=ANOTHER)
    assert _missed(scaled["caches"]) and again["caches"]["fxgraph_cache_hit"] >= 1
    assert scaled["factor"] == again["factor"] == 2


@pytest.mark.parametrize(
    ("path", "old", "new", "factor"),
    [
        ("user_pass.py", "factor() * 1", "factor() * 5", 10),
        ("user_helpers.py", "return 2", "return 7", 7),
    ],
    ids=["the pass", "what it calls in another module"],
)
def test_a_changed_users_pass_misses_and_gives_the_new_result(scaled, workspace, path, old, new, factor):
    changed = workspace.edit(path, old, new).run(IMPORT_SCALE, probe=USER_PROBE)
    assert changed["factor"] == factor
    assert _missed(changed["caches"])


def test_a_users_pass_without_a_source_file_is_not_cached(scaled, workspace):
    typed = workspace.run(USER_PASS.replace("factor() *", "9 *"), probe=USER_PROBE)
    assert typed["factor"] == 9
    assert typed["caches"]["fxgraph_cache_bypass"] >= 1
    assert not typed["caches"].get("fxgraph_cache_hit") and not typed["caches"].get("fxgraph_cache_miss")
