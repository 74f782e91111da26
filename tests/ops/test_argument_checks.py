"""Every tensor argument of every operator, called directly: rank, device, dtype and each of its sizes are checked."""

import itertools

import pytest
import torch

import moe_ops  # noqa: F401  (registers torch.ops.moe)
from tests.ops.samples import samples
from tests.ops.samples_in_float8 import samples_in_float8

# What may be anything: sizes that nothing else has, and dtypes that need not be those of another argument.
FREE_SIZES = {
    ("topk_routing", "router_logits", 0),
    ("batch_invariant_routing", "router_logits", 0),
    ("topk_routing_backward", "router_logits", 1),
    ("build_dispatch", "topk_ids", 0),
    ("build_dispatch", "topk_ids", 1),
    ("build_dispatch", "expert_map", 0),
    *itertools.product(("map_replicas", "map_and_record"), ("topk_ids",), (0, 1)),
    *itertools.product(("map_replicas", "map_and_record"), ("logical_to_physical",), (1,)),
    ("map_and_record", "load", 0),
    *itertools.product(("route_and_record",), ("router_logits",), (0, 1)),
    ("route_and_record", "logical_to_physical", 1),
    ("route_and_record", "load", 0),
    ("permute", "hidden_states", 1),
    ("permute_backward", "grad", 1),
    ("grouped_gemm", "x", 0),
    ("batch_invariant_gemm", "x", 0),
    ("grouped_gemm_weight_backward", "grad", 1),
    ("grouped_gemm_weight_backward", "x", 1),
    ("grouped_gemm_weight_backward", "expert_offsets", 0),
    ("batched_gemm", "x", 1),
    ("dense_gemm", "x", 0),
    *itertools.product(("quantise_rows",), ("x",), (0, 1)),
    ("quantise_rows", "input_scale", 0),
    *itertools.product(("scaled_fused_experts",), ("w13_input_scale", "w2_input_scale"), (0,)),
    *itertools.product(("dequantise_weight",), ("weight",), (1, 2)),  # with as many blocks
    *((name, f"{weight}global_scale", 1) for name in samples_in_float8() for weight in ("", "w13_", "w2_")),
    *itertools.product(("plan_exchange",), ("topk_ids",), (0, 1)),
    ("plan_exchange", "owners", 0),
    *itertools.product(("push_rows",), ("hidden_states", "tokens", "extra"), (1,)),
    ("gated_activation", "gate_up", 0),
    ("combine", "expert_out", 0),
    ("combine_backward", "expert_out", 0),
    ("routing_dispatch", "router_logits", 0),
    ("fused_experts", "expert_map", 0),
    ("scaled_fused_experts", "expert_map", 0),
    ("batch_invariant_experts", "expert_map", 0),
    ("fused_experts_with_shared", "expert_map", 0),
    ("fused_experts_formula", "expert_map", 0),
}
FREE_DTYPES = {"router_logits", "correction_bias", "topk_weights", "grad_weights", "topk_ids"}
FREE_DTYPES |= {"seed", "load", "num_real_tokens", "shared_weights", "scale", "x_scale"}
FREE_DTYPES |= {"w13_scale", "w2_scale", "input_scale", "w13_input_scale", "w2_input_scale"}
FREE_DTYPES |= {"global_scale", "w13_global_scale", "w2_global_scale"}
FREE_DTYPES |= {f"operand{index}" for index in range(4)}
FREE_FLOATS = {("scaled_fused_experts", "w13_bias"), ("scaled_fused_experts", "w2_bias")}
ANY_DTYPE = {("push_rows", "hidden_states")}  # rows are moved, quantised ones too
OF_FORMATS = ("zero", "global_scale")
NO_OTHER_FLOATS = {"permute", "permute_backward", "gated_activation", "quantise_rows", "scaled_grouped_gemm"}


def complete(name, argument=""):
    """Arguments of which none is left out, but for what other weights than `argument` wants have not."""
    arguments = getattr(torch.ops.moe, name).default._schema.arguments
    names = [each.name for each in arguments]
    if argument.endswith("global_scale"):
        return names, list(samples_in_float8()[name])
    if argument.endswith("zero"):
        return names, list(next(args for args in samples()[name] if args[names.index(argument)] is not None))
    args = list(samples()[name][-1 if name == "build_dispatch" else 0])
    for position, argument in enumerate(arguments):
        if argument.name.endswith(OF_FORMATS):
            continue
        if args[position] is None and argument.name == "seed":
            args[position] = torch.tensor(7)
        elif args[position] is None:
            num_experts = 8 if "routing" in name else 3
            made = torch.arange(num_experts, dtype=torch.int32)
            args[position] = made if argument.name == "expert_map" else made.float()
    return names, args


def call(name, args):
    with torch.no_grad():
        getattr(torch.ops.moe, name).default(*args)


ARGUMENTS = [
    (name, argument.name)
    for name in samples()
    for argument in getattr(torch.ops.moe, name).default._schema.arguments
    if "Tensor" in str(argument.type)
]
arguments = pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda value: value)


@arguments
def test_rank_device_and_dtype(name, argument):
    names, args = complete(name, argument)
    call(name, args)
    position = names.index(argument)
    good = args[position]
    wrong = [good.unsqueeze(0)]
    if (name, argument) not in ANY_DTYPE:
        wrong.append(good.int() if good.is_floating_point() else good.float())
        wrong.append(good.int() if good.dtype == torch.bool else good.bool())
    if sum(isinstance(arg, torch.Tensor) for arg in args) > 1:
        wrong.append(good.to("meta"))
    for bad in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b"):
            call(name, [*args[:position], bad, *args[position + 1 :]])


@arguments
def test_dtypes_that_differ(name, argument):
    names, args = complete(name, argument)
    position = names.index(argument)
    good = args[position]
    if (
        argument in FREE_DTYPES
        or (name, argument) in ANY_DTYPE | FREE_FLOATS
        or (good.is_floating_point() and name in NO_OTHER_FLOATS)
    ):
        return
    others = (torch.float16, torch.float64) if good.is_floating_point() else (torch.int64,)
    for dtype in others:
        with pytest.raises(TypeError, match="has dtype"):
            call(name, [*args[:position], good.to(dtype), *args[position + 1 :]])


@arguments
def test_every_size(name, argument):
    names, args = complete(name, argument)
    position = names.index(argument)
    good = args[position]
    for dim in range(good.dim()):
        if (name, argument, dim) not in FREE_SIZES:
            longer = torch.cat([good, good.narrow(dim, 0, 1)], dim)
            with pytest.raises(ValueError, match=r": expected"):
                call(name, [*args[:position], longer, *args[position + 1 :]])
