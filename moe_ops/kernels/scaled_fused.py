"""The program of `moe.scaled_fused_experts`.

For few tokens it is two products of single rows, without a sort; else its stages' launches, with the gate in that which
quantises its rows.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moe_ops.arguments import GatedActivation
from moe_ops.kernels.activation import NO_GATE, activation_args, gated_activation_program
from moe_ops.kernels.combine import combine_launch
from moe_ops.kernels.dispatch import dispatch_launches
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.pairs_decode_plan import multiplies_pairs, pairs_gemv_launch
from moe_ops.kernels.program import Argument, Buffer, Descriptor, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.quantise_rows import quantise_rows_program, rows_program
from moe_ops.kernels.scaled import copies, expect_converted, scaled_grouped_gemm_program
from moe_ops.kernels.scaled_decode import multiplies_rows, reads_plain_rows, scaled_gemv_launch
from moe_ops.scaled_arguments import QuantiseRows, ScaledGroupedGemm
from moe_ops.slabs import halves_in
from moe_ops.types import Activation


def takes(args: Any, gpu: Gpu) -> bool:
    """Whether the launches are for such arguments: not in float64, see `scaled.takes`, nor of nothing or of copies."""
    sizes = *args.w13.weight.shape, *args.w2.weight.shape, *args.topk_ids.shape
    return args.hidden_states.dtype != torch.float64 and all(sizes) and not _copies(args, gpu)


def _copies(args: Any, gpu: Gpu) -> bool:
    """Whether both weights are copied first, by the rows of an expert if all are chosen alike."""
    rows = math.prod(args.topk_ids.shape) / args.placement.num_ids(args.w13.weight.shape[0])
    both = ((args.w13, halves_in(args.activation)), (args.w2, 1))
    dtype = args.hidden_states.dtype
    return args.rows == "exact" and all(copies(linear, dtype, rows, gpu, halves) for linear, halves in both)


def scaled_fused_experts_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.scaled_fused_experts`."""
    if multiplies_pairs(args, gpu):
        return _of_few_tokens_in_pairs(args, gpu)
    if multiplies_rows(args):
        return _of_few_tokens(args, gpu)
    return _sorted(args, gpu) if args.rows == "quantised" else _exact(args, gpu)


def _of_few_tokens_in_pairs(args: Any, gpu: Gpu) -> Program:
    x, num_slots, (hidden_size, _) = (
        args.hidden_states,
        math.prod(args.topk_ids.shape),
        args.w2.weight.shape[1:],
    )
    activated = Buffer("activated", (num_slots, args.w2.depth), x.dtype)
    expert_out = Buffer("expert_out", (num_slots, hidden_size), x.dtype)
    inverse = Buffer("inverse", (num_slots,), torch.int32)
    gate = activation_args(Activation.from_spec(args.activation))
    up = pairs_gemv_launch(args, ("hidden_states", x), "w13", activated, gate, gpu)
    down = pairs_gemv_launch(args, (activated.name, activated.meta), "w2", expert_out, NO_GATE, gpu)
    combined, combine = combine_launch(expert_out.meta, args)
    return Program((inverse, activated, expert_out, combined), (up, down, combine), (combined.name,))


def _exact(args: Any, gpu: Gpu) -> Program:
    x, w13, w2 = args.hidden_states, args.w13, args.w2
    sorting, sorts = dispatch_launches(args.topk_ids, args.placement, w13.weight.shape[0])
    slots, _, offsets = (buffer.meta for buffer in sorting[:3])
    up = _product(args, ScaledGroupedGemm(x, None, w13, offsets, slots, x.dtype), gpu)
    gate = GatedActivation(up.buffers[-1].meta, args.activation)  # type: ignore[arg-type]  # metadata
    gated = gated_activation_program(gate, gpu, w13.weight.shape[0])
    rows = gated.buffers[0].meta
    down = _product(args, ScaledGroupedGemm(rows, None, w2, offsets, None, x.dtype), gpu)  # type: ignore[arg-type]  # metadata
    parts = (
        _named(up, **_weights("w13"), x="hidden_states", product="gate_up"),
        gated,
        _named(down, **_weights("w2"), x="activated", product="expert_out"),
    )
    return _in_turn(args, sorting, sorts, parts)


def _of_few_tokens(args: Any, gpu: Gpu) -> Program:
    for linear in (args.w13, args.w2):
        expect_converted(linear, gpu)
    x = args.hidden_states
    (hidden_size, features), num_slots = args.w2.weight.shape[1:], math.prod(args.topk_ids.shape)
    activated = Buffer("activated", (num_slots, features), x.dtype)
    expert_out = Buffer("expert_out", (num_slots, hidden_size), x.dtype)
    inverse = Buffer("inverse", (num_slots,), torch.int32)
    gate = activation_args(Activation.from_spec(args.activation))
    tokens, token_rows = _rows_of_few(args, "w13", "hidden_states", x, gpu)
    slots, slot_rows = _rows_of_few(args, "w2", activated.name, activated.meta, gpu)
    up = scaled_gemv_launch(args, token_rows, "w13", activated, gate)
    down = scaled_gemv_launch(args, slot_rows, "w2", expert_out, NO_GATE)
    combined, combine = combine_launch(expert_out.meta, args)
    buffers = (*tokens.buffers, inverse, activated, *slots.buffers, expert_out, combined)
    return Program(buffers, (*tokens.launches, up, *slots.launches, down, combine), (combined.name,))


def _rows_of_few(
    args: Any, name: str, of: str, x: TensorMeta, gpu: Gpu
) -> tuple[Program, tuple[str, TensorMeta]]:
    """What quantises rows x, called `of`, for the weight `name`, nothing where its launch does, and what this reads."""
    linear = getattr(args, name)
    if reads_plain_rows(args, name):
        return Program((), (), ()), (of, x)
    input_scale = getattr(args, f"{name}_input_scale")
    program = quantise_rows_program(
        QuantiseRows(x, linear.block_columns, linear.weight.dtype, input_scale), gpu
    )
    rows = f"{of}_rows"
    scales = {"row_scale": f"{rows}_scale", "input_scale": f"{name}_input_scale"}
    named = _named(program, x=of, rows=rows, **scales)
    return named, (rows, named.buffers[0].meta)


def _sorted(args: Any, gpu: Gpu) -> Program:
    x, w13, w2 = args.hidden_states, args.w13, args.w2
    sorting, sorts = dispatch_launches(args.topk_ids, args.placement, w13.weight.shape[0])
    slots, _, offsets = (buffer.meta for buffer in sorting[:3])
    of_x = QuantiseRows(x, w13.block_columns, w13.weight.dtype, args.w13_input_scale)
    tokens = quantise_rows_program(of_x, gpu)
    up = _product(args, ScaledGroupedGemm(*_metas(tokens), w13, offsets, slots, x.dtype), gpu)
    rows = _gated(up.buffers[-1].meta, args)
    down = _product(args, ScaledGroupedGemm(*_metas(rows), w2, offsets, None, x.dtype), gpu)
    parts = (
        _named(tokens, **_rows_of("w13", "token"), x="hidden_states"),
        _named(up, **_operands("w13", "token"), product="gate_up"),
        _named(rows, **_rows_of("w2", "slot"), x="gate_up"),
        _named(down, **_operands("w2", "slot"), product="expert_out"),
    )
    return _in_turn(args, sorting, sorts, parts)


def _in_turn(
    args: Any, sorting: tuple[Buffer, ...], sorts: tuple[Launch, ...], parts: tuple[Program, ...]
) -> Program:
    """All launches, the last part's to `expert_out`, which is summed up."""
    combined, combine = combine_launch(parts[-1].buffers[-1].meta, args)
    buffers = {
        each.name: each for each in (*sorting, *(each for part in parts for each in part.buffers), combined)
    }
    return Program(tuple(buffers.values()), (*sorts, *_once(parts), combine), (combined.name,))


def _metas(rows: Program) -> Any:
    """Those of quantised rows and their scales."""
    return (buffer.meta for buffer in rows.buffers)


def _product(args: Any, product: ScaledGroupedGemm, gpu: Gpu) -> Program:
    """Of the layer that takes `args`, in which nothing reads rows past the last expert."""
    num_ids = args.placement.num_ids(args.w13.weight.shape[0])
    return scaled_grouped_gemm_program(product, gpu, num_ids, tail=False)


def _gated(gate_up: TensorMeta, args: Any) -> Program:
    """What `w2` is multiplied with: rows of the gate."""
    weight, columns = args.w2.weight, args.w2.block_columns
    rows = QuantiseRows(gate_up, columns, weight.dtype, args.w2_input_scale)  # type: ignore[arg-type]  # metadata
    gate = activation_args(Activation.from_spec(args.activation))
    return rows_program(rows, weight.shape[2], gate, weight.shape[0])


def _rows_of(name: str, rows: str) -> dict[str, str]:
    """What tensors of the rows are called that the weight `name` is multiplied with."""
    return {"rows": f"{rows}_rows", "row_scale": f"{rows}_scale", "input_scale": f"{name}_input_scale"}


def _operands(name: str, rows: str) -> dict[str, str]:
    """What a product's tensors are called in a layer."""
    return _weights(name) | {"x": f"{rows}_rows", "x_scale": f"{rows}_scale"}


def _weights(name: str) -> dict[str, str]:
    beside = ("scale", "zero", "global_scale", "bias")
    return {"weight": name, **{part: f"{name}_{part}" for part in beside}}


def _named(program: Program, **names: str) -> Program:
    """The same with other names of tensors."""
    buffers = tuple(buffer._replace(name=names.get(buffer.name, buffer.name)) for buffer in program.buffers)
    launches = tuple(
        replace(launch, args={key: _renamed(value, names) for key, value in launch.args.items()})
        for launch in program.launches
    )
    return Program(buffers, launches, tuple(names.get(name, name) for name in program.outputs))


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    if isinstance(argument, Descriptor):
        return replace(argument, source=names.get(argument.source, argument.source))
    return argument


def _once(parts: tuple[Program, ...]) -> list[Launch]:
    """The launches of all, of a tile map that two products share only the first."""
    kept: dict[Any, Launch] = {}
    for launch in (launch for part in parts for launch in part.launches):
        tiles = launch.args.get("tiles_ptr") if "offsets_ptr" in launch.args else None
        kept.setdefault(tiles or id(launch), launch)
    return list(kept.values())
