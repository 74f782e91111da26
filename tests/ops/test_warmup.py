"""moe_ops.warmup without a GPU: its checks, and that it loads what the operators launch, option by option."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig, _library
from moe_ops.arguments import FusedExperts, FusedMoe, TopkRouting
from moe_ops.batch_invariant import _route_on_cuda, _run_experts_on_cuda
from moe_ops.fused_experts import _cuda as fused_experts_cuda
from moe_ops.fused_moe import _cuda as fused_moe_cuda
from moe_ops.invariant_arguments import BatchInvariantExperts, BatchInvariantRouting
from moe_ops.kernels.loading import Loader
from moe_ops.kernels.program import Filled, Launch, Program, Ref
from moe_ops.routing import _cuda as topk_routing_cuda
from tests.kernels.by_name import launches_of

ON_A_GPU = {
    FusedMoe: fused_moe_cuda,
    FusedExperts: fused_experts_cuda,
    TopkRouting: topk_routing_cuda,
    BatchInvariantRouting: _route_on_cuda,
    BatchInvariantExperts: _run_experts_on_cuda,
}
OPTIONS = ("correction_bias", "expert_map", "shared")


def _config(has_bias: bool = True, activation: str = "silu", **more: str) -> SimpleNamespace:
    return SimpleNamespace(
        num_experts=16,
        hidden_size=256,
        intermediate_size=192,
        routing=RoutingConfig(top_k=4),
        activation=Activation(activation),
        has_bias=has_bias,
        **more,
    )


def test_nothing_to_load_on_the_cpu():
    moe_ops.warmup(_config(), [1, 8], device="cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bad_arguments(device):
    with pytest.raises(ValueError, match="sizes has 0: expected token counts of at least 1"):
        moe_ops.warmup(_config(), [0], device=device)
    with pytest.raises(TypeError, match=r"config=RoutingConfig.*: expected the config of a layer"):
        moe_ops.warmup(_config().routing, [1], device=device)
    with pytest.raises(TypeError, match="sizes=8: expected several token counts"):
        moe_ops.warmup(_config(), 8, device=device)
    with pytest.raises(TypeError, match="sizes has True: expected ints"):
        moe_ops.warmup(_config(), [True], device=device)
    with pytest.raises(TypeError, match=r"sizes has 1\.5: expected ints"):
        moe_ops.warmup(_config(), [1.5], device=device)
    for dtype, shown in ((torch.int32, r"torch\.int32"), ("bfloat16", "'bfloat16'")):
        with pytest.raises(TypeError, match=f"dtype={shown}: expected a floating"):
            moe_ops.warmup(_config(), [1], device=device, dtype=dtype)
    with pytest.raises(TypeError, match="expert_map is a list: expected a tensor"):
        moe_ops.warmup(_config(), [1], device=device, expert_map=[0] * 16)
    with pytest.raises(
        ValueError, match=r"expert_map has shape \[3\] and dtype torch.int32: expected \[16\]"
    ):
        moe_ops.warmup(_config(), [1], device=device, expert_map=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expert_map has .* dtype torch.int64: .* torch.int32"):
        moe_ops.warmup(_config(), [1], device=device, expert_map=torch.zeros(16, dtype=torch.int64))
    with pytest.raises(ValueError, match="expert_map has -1 as its largest entry: expected a local expert"):
        moe_ops.warmup(_config(), [1], device=device, expert_map=torch.full((16,), -1, dtype=torch.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_told(device):
    with pytest.raises(ValueError, match=f"device='{device}': PyTorch finds no GPU here"):
        moe_ops.warmup(_config(), [1], device=device)


@pytest.mark.parametrize(("device", "error"), [("toaster", ValueError), (1.5, TypeError)])
def test_devices_that_are_none(device, error):
    with pytest.raises(error, match=f"device={device!r}: expected a torch.device"):
        moe_ops.warmup(_config(), [1], device=device)


def _kernel(launch: Launch, dtypes: dict[str, torch.dtype]) -> tuple:
    """What Triton compiles a launch by, and more: every argument, tensors by their dtype."""
    args = {name: dtypes[a.name] if isinstance(a, Ref) else (type(a), a) for name, a in launch.args.items()}
    return launch.kernel.__name__, launch.num_warps, launch.num_stages, frozenset(args.items())


def _kernels(program: Program, dtypes: dict[str, torch.dtype]) -> set[tuple]:
    known = dtypes | {buffer.name: buffer.dtype for buffer in program.buffers}
    return {_kernel(launch, known) for launch in program.launches}


@pytest.fixture
def loaded(monkeypatch) -> set[tuple]:
    """The kernels that warmup loads."""
    kernels = set()
    monkeypatch.setattr(
        Loader, "load", lambda self, program, dtypes: kernels.update(_kernels(program, dtypes))
    )
    return kernels


@pytest.fixture
def launched(monkeypatch) -> set[tuple]:
    """The kernels that public functions launch, as on a GPU; nothing is computed."""
    kernels = set()

    def run(self, tensors):
        dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
        kernels.update(_kernels(Program(self.buffers, tuple(launches_of(self)), self.outputs), dtypes))
        buffers = {buffer.name: buffer for buffer in self.buffers}
        return tuple(torch.zeros(buffers[name].shape, dtype=buffers[name].dtype) for name in self.outputs)

    monkeypatch.setattr(Filled, "run", run)
    monkeypatch.setattr(_library, "call", lambda arguments: ON_A_GPU[type(arguments)](arguments))
    return kernels


def _call(config, tokens: int, dtype: torch.dtype, logits_dtype: torch.dtype, given: set[str]) -> None:
    """One layer, routed by `fused_moe` and once more by hand."""
    expert_map = _expert_map() if "expert_map" in given else None
    experts = 16 if expert_map is None else int(expert_map.max()) + 1
    rows = 384 if config.activation.is_gated else 192
    hidden, logits = torch.zeros(tokens, 256, dtype=dtype), torch.zeros(tokens, 16, dtype=logits_dtype)
    weights = torch.zeros(experts, rows, 256, dtype=dtype), torch.zeros(experts, 256, 192, dtype=dtype)
    emit = {"emit": config.emit} if hasattr(config, "emit") else {}
    options = {
        **emit,
        "expert_map": expert_map,
        "shared": torch.zeros_like(hidden) if "shared" in given else None,
    }
    if config.has_bias:
        options |= {
            "w13_bias": torch.zeros(experts, rows, dtype=dtype),
            "w2_bias": torch.zeros(experts, 256, dtype=dtype),
        }
    correction = torch.zeros(16) if "correction_bias" in given else None
    moe_ops.fused_moe(
        hidden, logits, *weights, config.routing, config.activation, correction_bias=correction, **options
    )
    routed = moe_ops.topk_routing(logits, config.routing, correction, **emit)
    moe_ops.fused_experts(hidden, *weights, *routed, config.activation, **options)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("mapped", [False, True], ids=["all experts", "expert map"])
def test_loads_what_does_not_depend_on_the_batch(tokens, mapped, loaded, launched):
    config = _config(emit="batch_invariant")
    moe_ops.warmup(config, [tokens], expert_map=_expert_map() if mapped else None)
    for logits_dtype, *given in itertools.product(
        (torch.bfloat16, torch.float32), *[(None, o) for o in OPTIONS]
    ):
        if ("expert_map" in given) is mapped:
            _call(config, tokens, torch.bfloat16, logits_dtype, set(given))
    assert len(launched) > 3
    assert loaded == launched


def _expert_map() -> torch.Tensor:
    return torch.tensor([4, -1, 0, -1, 1, -1, 2, -1, 3, -1, -1, -1, -1, -1, -1, -1], dtype=torch.int32)


@pytest.mark.parametrize("mapped", [False, True], ids=["all experts", "expert map"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 5000])
def test_loads_what_every_option_launches_and_no_more(
    tokens, dtype, has_bias, activation, mapped, loaded, launched
):
    config = _config(has_bias, activation)
    moe_ops.warmup(config, [tokens], dtype=dtype, expert_map=_expert_map() if mapped else None)
    for logits_dtype, *given in itertools.product({dtype, torch.float32}, *[(None, o) for o in OPTIONS]):
        if ("expert_map" in given) is mapped:
            _call(config, tokens, dtype, logits_dtype, set(given))
    assert len(launched) > 3
    assert loaded == launched
