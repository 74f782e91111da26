"""Which machine code a launch runs: what Triton looked up once, and again where something else may be needed."""

from types import SimpleNamespace

import pytest
import torch

from moe_ops.kernels import _compat, packed
from moe_ops.kernels._compat import Code
from moe_ops.kernels.program import Buffer, Known, Launch, Program, Ref


class Kernel:
    """Stands for a kernel of Triton: notes what is looked up and what is called directly."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "rows_ptr", "out_ptr", "BLOCK")

    def __init__(self, compiles=True):
        self.compiles, self.looked_up, self.direct = compiles, [], []

    def __getitem__(self, grid):
        def look_up(*args, num_warps, num_stages):
            self.looked_up.append(args)
            return _Compiled(self.direct) if self.compiles else None

        return look_up


class _Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        assert grid == (2, 1, 1)
        return lambda *args: self.calls.append(args)


def program_of(kernel) -> Program:
    args = {"x_ptr": Ref("x"), "rows_ptr": Ref("rows"), "out_ptr": Ref("out"), "BLOCK": 4}
    return Program((Buffer("out", (4,), torch.float32),), (Launch(kernel, (2,), args),), ("out",))


def aligned(size: int) -> torch.Tensor:
    tensor = torch.empty(size + 16)
    return tensor[(-tensor.data_ptr() // 4) % 4 :][:size]


def test_the_second_run_looks_nothing_up():
    kernel = Kernel()
    program = program_of(kernel)
    for turn in range(3):
        x, rows = aligned(4), aligned(8)
        (out,) = program.filled.run({"x": x, "rows": rows})
        assert (len(kernel.looked_up), len(kernel.direct)) == (1, turn)
        args = (*kernel.looked_up, *kernel.direct)[-1]
        assert args[0] is x and args[1] is rows and args[2] is out and args[3] == 4


@pytest.mark.parametrize("name", ["x", "rows"])
def test_a_tensor_elsewhere_is_looked_up(name):
    kernel = Kernel()
    program = program_of(kernel)
    for given in ({}, {name: aligned(12)[1:]}, {}, {name: aligned(12)[2:]}):
        program.filled.run({"x": aligned(4), "rows": aligned(8), **given})
    assert (len(kernel.looked_up), len(kernel.direct)) == (3, 1)


def test_what_was_looked_up_for_a_tensor_elsewhere_is_not_kept():
    kernel = Kernel()
    program = program_of(kernel)
    program.filled.run({"x": aligned(12)[1:], "rows": aligned(8)})
    program.filled.run({"x": aligned(4), "rows": aligned(8)})
    assert (len(kernel.looked_up), len(kernel.direct)) == (2, 0)


def test_each_device_has_its_own():
    """Devices are told apart by what a tensor says: two stand-ins for tensors of two GPUs."""
    kernel = Kernel()
    program = program_of(kernel)

    def on(device, size):
        tensor = aligned(size)
        return SimpleNamespace(data_ptr=tensor.data_ptr, get_device=lambda: device, tensor=tensor)

    step = program.filled.steps[0]._replace(refs=((0, "x"), (1, "rows"), (2, "out")))
    for device in (0, 1, 0, 1):
        step.run({name: on(device, 8) for name in ("x", "rows", "out")})
    assert (len(kernel.looked_up), len(kernel.direct)) == (2, 2)


def test_the_interpreter_compiles_nothing():
    kernel = Kernel(compiles=False)
    program = program_of(kernel)
    for _ in range(2):
        program.filled.run({"x": aligned(4), "rows": aligned(8)})
    assert len(kernel.looked_up) == 2


def test_machine_code_gets_addresses(monkeypatch):
    """On a stand-in for machine code; buffers that are returned are tensors of their own."""
    monkeypatch.setattr(packed, "stream_of", lambda device: 7)
    monkeypatch.setattr(packed, "has_hooks", lambda: False)
    launched = []
    program = program_of(Kernel())
    code = Code(lambda *given: launched.append(given), (1, 1, 1, 1), lambda *_: None)
    program.filled.steps[0].codes[-1, ()] = Known(None, code)
    runs = []
    for x, rows in ((aligned(4), aligned(8)), (aligned(4), aligned(8))):
        (out,) = program.filled.run({"x": x, "rows": rows})
        runs.append((x, rows, out))
    assert launched == [
        ((2, 1, 1), 7, [x.data_ptr(), rows.data_ptr(), out.data_ptr(), 4]) for x, rows, out in runs
    ]
    assert program.filled.steps[0].template == [None, None, None, 4]


def compiled(**changed):
    """Stands for what Triton compiled for a GPU: a pointer, a descriptor of two dimensions, a constant."""
    launcher = type("CudaLauncher", (), {"global_scratch_size": 0, "profile_scratch_size": 0})()
    for name, value in changed.items():
        setattr(launcher, name, value)
    signature = {"x_ptr": "*bf16", "weight": "tensordesc<bf16[64,64]>", "BLOCK": "constexpr"}
    maps = changed.get("maps", [{"swizzle": 3}])
    return SimpleNamespace(
        run=launcher, src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(tensordesc_meta=maps)
    )


def test_what_triton_must_launch_itself(monkeypatch):
    """Where memory of its own is needed, descriptors are no tensor maps, or the version or backend is another."""
    monkeypatch.setattr(_compat, "_LAUNCHES", {_compat._VERSION: lambda *_: "launch"})
    code = _compat.code_of(compiled())
    assert (code.launch, code.parameters) == ("launch", (1, 5, 1))
    for changed in (
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"gsan_enabled": True},
        {"maps": []},
        {"maps": [None]},
    ):
        assert _compat.code_of(compiled(**changed)) is None
    assert _compat.code_of(SimpleNamespace(run=object())) is None
    assert _compat.code_of(SimpleNamespace()) is None
    monkeypatch.setattr(_compat, "_LAUNCHES", {})
    assert _compat.code_of(compiled()) is None
