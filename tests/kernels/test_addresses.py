"""Addresses are 64 bit: in the code of every kernel, and in what kernels compute for strides near 2**31."""

import mmap
import re

import pytest
import torch
import triton

from moe_ops import routing as definition
from moe_ops.arguments import Router
from moe_ops.types import Activation, RoutingConfig
from tests.kernels import aot, catalogue, catalogue_pairs, oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.oracles import assert_close

_VALUE = r"%[\w#:.]+"
_DEFINITION = re.compile(rf"^\s*({_VALUE}) = (\S+) (.*)$")
_KEEPS_ITS_SIZE = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi", "arith.addi")


def narrow_products(ttir: str) -> list[str]:
    """Lines of a kernel that multiply a stride in 32 bits, or that address by such a product of two variables."""
    strides = set(re.findall(r"(%\w*stride\w*): i32", ttir))
    constants, products, found = set(), set(), []
    for line in ttir.splitlines():
        if not (match := _DEFINITION.match(line)):
            continue
        name, operation, operands = match[1], match[2], set(re.findall(_VALUE, match[3]))
        if operation == "arith.constant":
            constants.add(name)
        if operation == "tt.get_num_programs":  # what programs go on by
            strides.add(name)
        if operation in _KEEPS_ITS_SIZE:
            for kind in (strides, products):
                kind |= {name} if operands & kind else set()
            constants |= {name} if operands <= constants else set()
        if operation == "arith.muli" and re.search(r"\bi32\b|xi32>", match[3]):
            products |= set() if operands & constants else {name}
            found += [line.strip()] if operands & strides else []
        if operation == "tt.addptr":
            found += [line.strip()] if operands & products else []
    return found


def test_the_search_finds_narrow_products() -> None:
    ttir = """
  tt.func public @k(%x_ptr: !tt.ptr<bf16>, %stride_h: i32 loc("stride_h"), %row: i32) {
    %four = arith.constant 4 : i32
    %a = tt.splat %stride_h : i32 -> tensor<8xi32>
    %b = tt.expand_dims %a {axis = 0 : i32} : tensor<8xi32> -> tensor<1x8xi32>
    %c = arith.extsi %a : tensor<8xi32> to tensor<8xi64>
    %d = arith.muli %c, %c : tensor<8xi64>
    %e = arith.muli %b, %other : tensor<1x8xi32>
    %f = arith.muli %row, %four : i32
    %g = arith.muli %row, %num_columns : i32
    %h = arith.extsi %g : i32 to i64
    %i = tt.addptr %x_ptr, %h : !tt.ptr<bf16>, i64
    %j = tt.addptr %x_ptr, %f : !tt.ptr<bf16>, i32"""
    assert [line[:2] for line in narrow_products(ttir)] == ["%e", "%i"]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_no_kernel_addresses_by_a_32_bit_product() -> None:
    planned = [(catalogue.programs(), catalogue.TENSORS)]
    planned += [
        catalogue_pairs.in_pairs(*form)
        for form in (
            (torch.uint8, False),
            (torch.float8_e4m3fn, False),
            (torch.float32, False),
            (torch.float32, True),
        )
    ]
    dtypes = catalogue.exchange_dtypes(torch.bfloat16)
    planned.append((catalogue.exchanges(torch.bfloat16, (2, 64, 7168)), dtypes))
    written = [
        (launch.kernel.__name__, aot.ttir_of(launch, aot.known(program, dtypes)))
        for programs, dtypes in planned
        for program in programs
        for launch in program.launches
    ]
    assert {name for name, _ in written} == catalogue.all_kernels()
    narrow = [(name, line) for name, ttir in written for line in narrow_products(ttir)]
    assert not narrow


FAR = 1 << 31  # elements from the first to the last column: 32 bits are too few
_NO_RESERVE = 0x4000  # Linux: pages that nobody touches take no memory


class Wide:
    """Tensors as long as FAR in one dimension, in one allocation that is hardly touched.

    Interpreted, they start in its middle: an address that wrapped around reads zeros there and kills no process.
    """

    def __init__(self, device: str, itemsize: int = 2) -> None:
        self.taken = 0 if device == "cuda" else FAR
        size = (self.taken + FAR + (1 << 20)) * itemsize
        if device == "cuda":
            self.memory = torch.empty(size, dtype=torch.int8, device=device)
        else:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            self.memory = torch.frombuffer(pages, dtype=torch.int8)

    def place(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """A copy of `values` in which the entries of `dim` lie so far apart that the last one is FAR off."""
        dim = dim % values.dim()
        packed = values.movedim(dim, -1).contiguous().stride()[:-1]
        apart = FAR // (values.shape[dim] - 1) + 8
        strides = [stride // values.shape[dim] for stride in packed]
        strides.insert(dim, apart)
        view = self.memory.view(values.dtype).as_strided(values.shape, strides, self.taken)
        self.taken += 1 << 14  # last columns of tensors with fewer and more columns lie close together
        assert values.numel() // values.shape[dim] < 1 << 13
        return view.copy_(values)


@pytest.fixture
def wide(device: str):
    yield Wide(device)
    if device == "cuda":
        torch.cuda.empty_cache()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _slots(size: int, device: str) -> torch.Tensor:
    return torch.randperm(size).to(torch.int32).to(device)


def test_permute(wide: Wide, device: str) -> None:
    hidden, grad, slots = _random(4, 3), _random(8, 3), _slots(8, device)
    out = launch("permute", wide.place(hidden), slots)
    assert torch.equal(out.cpu(), hidden[slots.cpu().long() // 2])
    expected = torch.zeros(4, 3, dtype=torch.float64).index_add_(0, slots.cpu().long() // 2, grad.double())
    assert_close(launch("permute_backward", wide.place(grad), slots, 4), expected, torch.bfloat16)


def test_combine(wide: Wide, device: str) -> None:
    rows, weights, shared, inverse = _random(12, 4), _random(4, 3), _random(4, 4), _slots(12, device)
    by_slot = rows.double()[inverse.cpu().long()].view(4, 3, 4)
    expected = (by_slot * weights.double().unsqueeze(2)).sum(1) + shared.double()
    placed = wide.place(rows), wide.place(weights), inverse
    assert_close(launch("combine", *placed, wide.place(shared)), expected)
    grad = _random(4, 4)
    _, to_weights = launch("combine_backward", wide.place(grad), *placed)
    assert_close(to_weights, (by_slot * grad.double().unsqueeze(1)).sum(2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_activation(interleaved: bool, wide: Wide) -> None:
    act, gate_up, grad = Activation(interleaved=interleaved), _random(5, 4), _random(5, 2)
    exact = gate_up.double().requires_grad_()
    expected = oracles.activate(exact, act)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    placed = wide.place(gate_up)
    assert_close(launch("gated_activation", placed, act), expected)
    assert_close(launch("gated_activation_backward", wide.place(grad), placed, act), expected_grad)


def test_routing(wide: Wide, device: str) -> None:
    config, bias = RoutingConfig(top_k=3, score_fn="sigmoid"), _random(4)
    exact = _random(5, 4).double().requires_grad_()
    expected, expected_ids = definition.reference(Router(exact, bias, config.spec))
    logits = wide.place(exact.detach().bfloat16())
    weights, ids = launch("topk_routing", logits, wide.place(bias), config)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected)
    grad = _random(5, 3)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    placed = wide.place(grad), logits, wide.place(weights.bfloat16()), ids
    assert_close(launch("topk_routing_backward", *placed, config), expected_grad)


@pytest.mark.parametrize("tokens", [5, 300])
def test_dispatch(tokens: int, device: str) -> None:
    ids = torch.randint(-1, 5, (tokens, 3), dtype=torch.int32)
    slots, inverse, offsets = launch("build_dispatch", Wide(device, ids.itemsize).place(ids), None, 4)
    expected = oracles.dispatch(oracles.local_experts(ids, None, 4), 4)
    assert (slots.tolist(), inverse.tolist(), offsets.tolist()) == expected


@pytest.mark.parametrize("dim", [1, 2])
def test_generic_gemm(dim: int, wide: Wide, device: str) -> None:
    x, weight, bias = _random(7, 20), _random(2, 6, 20), _random(2, 6)
    offsets = torch.tensor([0, 3, 6], dtype=torch.int32)
    placed = wide.place(x), wide.place(weight, dim), offsets.to(device), wide.place(bias)
    assert_close(launch("grouped_gemm", *placed), oracles.grouped_gemm(x, weight, offsets.tolist(), bias))


def test_weight_gradient(wide: Wide, device: str) -> None:
    grad, x, offsets = _random(7, 3), _random(7, 5), torch.tensor([0, 7], dtype=torch.int32)
    actual = launch("grouped_gemm_weight_backward", wide.place(grad), wide.place(x), offsets.to(device))
    assert_close(actual[0], grad.double().T @ x.double())


@pytest.mark.parametrize("act", [Activation(), Activation(interleaved=True)], ids=lambda act: act.spec)
@pytest.mark.parametrize("tokens", [1, 40])
def test_expert_layer(tokens: int, act: Activation, wide: Wide, device: str) -> None:
    """Decode and TMA kernels; the rows are deeper than a tile, so that the loop over the depth counts."""
    tensors = {
        "hidden_states": _random(tokens, 136),
        "w13": _random(4, 32, 136) / 12,
        "w2": _random(4, 136, 16) / 4,
        "topk_weights": torch.rand(tokens, 3).bfloat16(),
        "topk_ids": torch.randint(0, 4, (tokens, 3), dtype=torch.int32),
        "w13_bias": _random(4, 32),
        "w2_bias": _random(4, 136),
        "expert_map": None,
        "shared": _random(tokens, 136),
    }
    near = ("w13", "w2", "topk_ids", "expert_map")
    placed = {
        name: wide.place(tensor) if name not in near else None if tensor is None else tensor.to(device)
        for name, tensor in tensors.items()
    }
    names = {
        launch.kernel.__name__ for launch in program_of("fused_experts", **placed, activation=act).launches
    }
    assert names & {"grouped_gemm_tma_kernel", "gemv_combine_kernel"}
    assert_close(
        launch("fused_experts", **placed, activation=act), oracles.experts(**tensors, activation=act)
    )


@pytest.mark.parametrize("name, dim", [("w13", 1), ("w13", 2), ("w2", 1), ("w2", 2)])
def test_decode_weights(name: str, dim: int, wide: Wide, device: str) -> None:
    tensors = {
        "hidden_states": _random(1, 72),
        "w13": _random(4, 20, 72) / 8,
        "w2": _random(4, 72, 10) / 3,
        "topk_weights": torch.rand(1, 2),
        "topk_ids": torch.tensor([[2, 1]], dtype=torch.int32),
        **dict.fromkeys(("w13_bias", "w2_bias", "expert_map", "shared")),
    }
    placed = {n: t if t is None else t.to(device) for n, t in tensors.items()}
    placed[name] = wide.place(tensors[name], dim)
    out = launch("fused_experts", **placed, activation=Activation())
    assert_close(out, oracles.experts(**tensors, activation=Activation()))
