"""Operators whose rows do not depend on the batch: the same token gives the same bits in any company.

Elsewhere sizes of tiles, the kernel itself and on a CPU a library's blocking follow the number of tokens, and with them
the order of sums. Here nothing does:

- on CUDA, products have one configuration (`kernels/gemm_config.py`) for any number of tokens: no kernels for few of
  them, no rows by TMA, no copy of many into expert order, and no sum cut along the depth. Routing, dispatch and the sum
  over experts work row by row anyway.
- on a CPU each token runs alone, in memory of its own: a library's products, and elementwise loops that treat the rest
  of a vector otherwise than whole ones, never see a second one.

`batch_invariant_experts` is `fused_experts`, `batch_invariant_routing` is `topk_routing`, `batch_invariant_gemm` is
`grouped_gemm`, in what they take, return, check and compute; no pass touches them. Public functions emit them where
`emit` is "batch_invariant". Gradients are those of the operators they are named after: they sum over tokens, or are
products of as many rows as there are, and depend on the batch.

The same GPU model, versions, weights, layout of the weights and, on a CPU, number of threads are taken for granted.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _library, records
from moe_ops._cpu_products import paired_product, read_offsets
from moe_ops.arguments import FusedExperts, GroupedGemm, TopkRouting
from moe_ops.fused_experts import check as check_experts, fake as fake_output, reference as experts_reference
from moe_ops.grouped_gemm import check as check_product
from moe_ops.invariant_arguments import BatchInvariantExperts, BatchInvariantGemm, BatchInvariantRouting
from moe_ops.records import Role
from moe_ops.routing import check_router, fake as fake_routing, reference as routing_reference

_ALIGNMENT = 16  # bytes; rows elsewhere are loaded in other pieces, by another configuration


def _tokens_apart(args: Any) -> list[Any]:
    """`args` of each token alone, in memory of its own: a library may treat rows by their alignment, too."""
    leaves, values = records.leaves(type(args)), records.flatten(args)
    is_token = [
        Role.PER_TOKEN in leaf.roles and value is not None for leaf, value in zip(leaves, values, strict=True)
    ]
    num_tokens = next(value.shape[0] for value, is_one in zip(values, is_token, strict=True) if is_one)
    build = records.builder(type(args))
    return [
        build(
            *(
                _alone(value, token) if is_one else value
                for value, is_one in zip(values, is_token, strict=True)
            )
        )
        for token in range(num_tokens)
    ]


def _alone(rows: Tensor, row: int) -> Tensor:
    return rows[row : row + 1].clone(memory_format=torch.contiguous_format)


def _route(args: BatchInvariantRouting) -> tuple[Tensor, Tensor]:
    outputs = [routing_reference(each.router) for each in _tokens_apart(args)]
    if not outputs:
        return routing_reference(args.router)
    weights, ids = zip(*outputs, strict=True)
    return torch.cat(weights), torch.cat(ids)


def _run_experts(args: BatchInvariantExperts) -> Tensor:
    outputs = [experts_reference(each) for each in _tokens_apart(args)]
    return torch.cat(outputs) if outputs else fake_output(args)


def _multiply(args: BatchInvariantGemm) -> Tensor:
    x, linear, expert_offsets = args
    out = x.new_zeros((x.shape[0], linear.columns))
    for expert, (start, end) in enumerate(pairwise(read_offsets(expert_offsets, x.shape[0]))):
        for row in range(start, end):
            out[row] = paired_product(_alone(x, row), linear, expert)[0]
    return out


def _check_routing(args: BatchInvariantRouting) -> None:
    check_router(args.router)


def _fake_routing(args: BatchInvariantRouting) -> tuple[Tensor, Tensor]:
    return fake_routing(args.router)


def _route_on_cuda(args: BatchInvariantRouting) -> tuple[Tensor, Tensor]:
    is_empty = args.router.router_logits.shape[0] == 0
    return fake_routing(args.router) if is_empty else _library.launch(args)


def _run_experts_on_cuda(args: BatchInvariantExperts) -> Tensor:
    if args.hidden_states.shape[0] == 0:
        return fake_output(args)
    return _library.launch(args._replace(hidden_states=_rows_of_one_layout(args.hidden_states)))


def _multiply_on_cuda(args: BatchInvariantGemm) -> Tensor:
    return (
        _empty(args)
        if args.x.shape[0] == 0
        else _library.launch(args._replace(x=_rows_of_one_layout(args.x)))
    )


def _rows_of_one_layout(x: Tensor) -> Tensor:
    """`x`, or a copy of it where the configuration would be another: it follows strides and alignment."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _empty(args: BatchInvariantGemm) -> Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.columns))


_library.define(
    BatchInvariantRouting,
    "(Tensor topk_weights, Tensor topk_ids)",
    check=_check_routing,
    cpu=_route,
    cuda=_route_on_cuda,
    fake=_fake_routing,
)
_library.define(
    BatchInvariantGemm,
    "Tensor",
    check=check_product,
    cpu=_multiply,
    cuda=_multiply_on_cuda,
    fake=_empty,
)
_library.define(
    BatchInvariantExperts,
    "Tensor",
    check=check_experts,
    cpu=_run_experts,
    cuda=_run_experts_on_cuda,
    fake=fake_output,
)
_autograd.define_gradient_as(BatchInvariantRouting, TopkRouting)
_autograd.define_gradient_as(BatchInvariantGemm, GroupedGemm)
_autograd.define_gradient_as(BatchInvariantExperts, FusedExperts)
_library.define_flops_as(BatchInvariantGemm, GroupedGemm)
_library.define_flops_as(BatchInvariantExperts, FusedExperts)
_library.define_vmap_over_tokens(BatchInvariantRouting)
_library.define_vmap(BatchInvariantGemm)
_library.define_vmap_over_tokens(BatchInvariantExperts)
