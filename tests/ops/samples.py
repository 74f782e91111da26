"""Argument tuples for every operator, and the layouts they may come in."""

import torch

OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
SLOTS = torch.tensor([3, 0, 1, 2, 4, 5], dtype=torch.int32)
COUNTS = torch.tensor([2, 0, 1], dtype=torch.int32)
INVERSE = torch.tensor([1, 2, 3, 0, 4, -1], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [2, 0], [2, -1]], dtype=torch.int32)
REPLICAS = torch.tensor([[0, 3], [1, -1], [2, 4]], dtype=torch.int32)
OWNERS = torch.tensor([0, 0, 1], dtype=torch.int32)
ROW_SLOTS = torch.tensor([[0], [-1], [1]], dtype=torch.int32)
ROW_TOKENS = torch.tensor([[0, 2, -1, -1]], dtype=torch.int32)
NO_TOKENS = torch.full((1, 4), -1, dtype=torch.int32)
SENT = torch.tensor([2], dtype=torch.int32)
PAIRS = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
ZEROS = torch.randint(0, 16, (3, 5, 1), dtype=torch.uint8)
EXPONENTS = torch.randint(120, 130, (3, 5, 1), dtype=torch.uint8)
REPLICA_COUNT = torch.tensor([2, 1, 2], dtype=torch.int32)


# Numbers of each expert, by column and for all columns.
FORMULA = "a0=expert*4+0+column*1|a1=expert*1+0+column*0|a2=expert*8+4+column*1|a3=expert*1+0+column*0"
FORMULA += "|t0=tanh(gate)|t1=mul(t0,a0)|t2=add(t1,a1)|t3=mul(t2,a2)|t4=sub(t3,a3)|"
ONE_FOR_ALL = "ungated|a0=expert*0+2+column*1|a1=expert*0+0+column*0|t0=mul(gate,a0)|t1=sub(t0,a1)|t1"


def t(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def matrix(*shape):
    """A weight: one of its dimensions has stride 1."""
    weight = t(*shape)
    weight.is_weight = True
    return weight


def whole(*shape):
    """Rows or weights of 8 bits."""
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def samples():
    """One or more argument tuples for every operator; tensors that may require grad do."""
    w13, (w1, w3), (b1, b3) = t(3, 8, 4), (t(3, 4, 4), t(3, 4, 4)), (t(3, 4), t(3, 4))
    joined = t(3, 4), t(3, 1), t(3, 4)
    moe = (t(3, 4), t(3, 3), w1, t(3, 4, 4), t(3), b1, w3, b3, t(3, 4), None, "top_k=2", "silu")
    weights, ids = torch.rand(3, 8), torch.randint(8, (3, 8)).int()
    load, scalar = torch.zeros(5, dtype=torch.int32), torch.tensor
    operands = t(3, 4), t(3), t(3, 8), t(3)
    return {
        "topk_routing": [
            (t(5, 8), None, "top_k=2"),
            (t(5, 8), torch.randn(8), "top_k=3;score_fn=sqrtsoftplus;scale=2.0"),
        ],
        "topk_routing_backward": [(t(3, 8), t(3, 8), weights, ids, "top_k=8")],
        "build_dispatch": [(IDS, None, 3), (IDS.long(), torch.tensor([1, -1, 0], dtype=torch.int32), 2)],
        "map_replicas": [
            (IDS, REPLICAS, REPLICA_COUNT, None),
            (IDS.long(), REPLICAS, REPLICA_COUNT, scalar(7)),
        ],
        "map_and_record": [
            (IDS, REPLICAS, REPLICA_COUNT, load, scalar(7), scalar(2), scalar(True)),
            (IDS.long(), REPLICAS, REPLICA_COUNT, load.long(), None, None, None),
        ],
        "route_and_record": [
            (
                t(4, 3),
                REPLICAS,
                REPLICA_COUNT,
                load,
                torch.randn(3),
                scalar(2),
                scalar(True),
                scalar(7),
                "top_k=2",
            ),
            (
                t(4, 5),
                REPLICAS,
                REPLICA_COUNT,
                load.long(),
                None,
                None,
                None,
                None,
                "top_k=3;score_fn=sigmoid",
            ),
        ],
        "plan_exchange": [(IDS, OWNERS, 2, 4), (IDS.long(), OWNERS, 1, 3)],
        "push_rows": [
            (t(3, 4), ROW_SLOTS, ROW_TOKENS, SENT, t(3, 2), IDS, torch.ones(3, 5, dtype=torch.uint8), ""),
            (t(3, 4), ROW_SLOTS, ROW_TOKENS, SENT, None, None, None, ""),
        ],
        "pull_sums": [
            (t(4, 4), ROW_SLOTS, ROW_TOKENS, SENT, SENT.clone(), t(3, 4), ""),
            (t(4, 4), ROW_SLOTS, ROW_TOKENS, SENT, SENT.clone(), None, ""),
        ],
        "permute": [(t(3, 4), SLOTS)],
        "permute_backward": [(t(6, 4), SLOTS, 3)],
        "grouped_gemm": [
            (t(6, 4), w1, OFFSETS, b1, w3, b3),
            (t(6, 4), t(3, 5, 4), OFFSETS, t(3, 5), None, None),
            (t(6, 4), t(3, 4, 5).transpose(1, 2), OFFSETS, None, None, None),
        ],
        "grouped_gemm_weight_backward": [(t(6, 5), t(6, 4), OFFSETS)],
        "batched_gemm": [
            (t(3, 2, 4), t(3, 5, 4), COUNTS, t(3, 5)),
            (t(3, 2, 4), t(3, 4, 5).transpose(1, 2), COUNTS, None),
        ],
        "quantise_rows": [(t(3, 4), None, 3, torch.int8), (t(3, 4), torch.rand(2), 4, torch.float8_e4m3fn)],
        "dequantise_weight": [
            (whole(3, 5, 4), torch.rand(3, 3, 2), None, None, 2, 3, torch.float32),
            (PAIRS, EXPONENTS, None, None, 1, 32, torch.bfloat16),
            (PAIRS, torch.rand(3, 5, 1), ZEROS, None, 1, 8, torch.float64),
        ],
        "scaled_grouped_gemm": [
            (whole(3, 4), whole(3, 5, 4), torch.rand(3, 3, 2), OFFSETS, torch.rand(3, 2), t(3, 5))
            + (None, None, SLOTS, 2, 3, torch.float32),
            (t(6, 4), whole(3, 5, 4), torch.rand(3, 3, 2), OFFSETS, None, t(3, 5), *(None,) * 3, 2, 3)
            + (torch.float32,),
            (t(3, 4), whole(3, 5, 4), torch.rand(3, 5, 1), OFFSETS, *(None,) * 4, SLOTS, 1, 4, torch.float32),
            (t(3, 8), PAIRS, EXPONENTS, OFFSETS, None, t(3, 5), None, None, SLOTS, 1, 32, torch.float32),
            (t(6, 8), PAIRS, torch.rand(3, 5, 1), OFFSETS, *(None,) * 5, 1, 8, torch.float32),
            (t(3, 8), PAIRS, torch.rand(3, 5, 1), OFFSETS, None, t(3, 5), ZEROS, None, SLOTS)
            + (1, 8, torch.float32),
        ],
        "scaled_fused_experts": [
            (t(3, 4), whole(3, 8, 4), torch.rand(3, 4, 2), whole(3, 4, 4), torch.rand(3, 1, 2), t(3, 2), IDS)
            + (t(3, 8), None, None, t(3, 4), *(None,) * 3, *joined, None, None)
            + (2, 3, 4, 2, "silu", "quantised"),
            (t(3, 4), whole(3, 4, 4), torch.rand(3, 4, 1), whole(3, 4, 4), torch.rand(3, 4, 1), t(3, 2), IDS)
            + (*(None,) * 10, torch.rand(3), torch.rand(1), 1, 4, 1, 4, "relu2", "quantised"),
            (t(3, 4), whole(3, 4, 4), torch.rand(3, 4, 1), whole(3, 4, 4), torch.rand(3, 4, 1), t(3, 2), IDS)
            + (*(None,) * 12, 1, 4, 1, 4, "relu2", "exact"),
            (
                t(3, 8),
                PAIRS[:, :4],
                torch.rand(3, 4, 1),
                PAIRS.view(3, 10, 2)[:, :8],
                torch.rand(3, 8, 1),
                t(3, 2),
            )
            + (IDS, None, ZEROS[:, :4], None, None, ZEROS.repeat(1, 2, 1)[:, :8], *(None,) * 7)
            + (1, 8, 1, 4, "relu2", "exact"),
        ],
        "dense_gemm": [
            (matrix(3, 4), matrix(5, 4), matrix(5), torch.float32),
            (matrix(3, 4), matrix(4, 5).t(), None, torch.float32),
        ],
        "gated_activation": [(t(6, 8), "silu"), (t(6, 8), "relu2"), (t(6, 8), "swiglu_oai;interleaved=True")]
        + [(t(6, 8), "situ;beta=1.5;linear_beta=2.0"), (t(6, 8), "gelu_no_mul")],
        "gated_activation_backward": [(t(6, 4), t(6, 8), "gelu"), (t(6, 8), t(6, 8), "relu2")],
        "weighted_activation_backward": [
            (t(6, 4), t(6, 8), t(6), "silu"),
            (t(6, 8), t(6, 8), t(6), "relu2"),
            (t(6, 4), t(6, 8), t(6), "swiglu_oai;interleaved=True"),
        ],
        "combine": [
            (t(6, 4), t(3, 2), INVERSE, t(3, 4), t(3, 1), t(3, 4)),
            (t(7, 4), t(3, 2), INVERSE, None, None, None),
            (t(7, 4), t(3, 2), INVERSE, t(3, 4), None, None),
        ],
        "combine_backward": [(t(3, 4), t(6, 4), t(3, 2), INVERSE)],
        "routing_dispatch": [(t(5, 8), torch.randn(8), None, 8, "top_k=2")],
        "gather_gemm": [
            (t(3, 4), w1, SLOTS, OFFSETS, b1, w3, b3),
            (t(3, 4), t(3, 8, 4), SLOTS, OFFSETS, t(3, 8), None, None),
        ],
        "act_gemm_combine": [
            (t(6, 8), t(3, 5, 4), OFFSETS, t(3, 2), SLOTS, INVERSE, t(3, 5), t(3, 5))
            + (t(3, 1), t(3, 5), "silu"),
            (t(6, 4), t(3, 5, 4), OFFSETS, t(3, 2), SLOTS, INVERSE, *(None,) * 4, "relu2"),
        ],
        "gather_gemm_act": [
            (t(3, 4), w1, SLOTS, OFFSETS, b1, w3, b3, "silu"),
            (t(3, 4), t(3, 8, 4), SLOTS, OFFSETS, t(3, 8), None, None, "silu"),
        ],
        "gather_gemm_formula": [
            (t(3, 4), w1, SLOTS, OFFSETS, b1, w3, b3, *operands, f"halves|{FORMULA}t5=mul(t4,up)|t5"),
            (t(3, 4), t(3, 8, 4), SLOTS, OFFSETS, t(3, 8), None, None, *operands)
            + (f"interleaved|{FORMULA}t5=mul(t4,up)|t5",),
            (t(3, 4), t(3, 4, 4), SLOTS, OFFSETS, None, None, None, t(6), t(1), None, None, ONE_FOR_ALL),
        ],
        "gemm_combine": [
            (t(6, 4), t(3, 5, 4), OFFSETS, t(3, 2), INVERSE, t(3, 5), t(3, 5), t(3, 1), t(3, 5))
        ],
        "fused_experts": [
            (t(3, 4), w1, t(3, 4, 4), t(3, 2), IDS, b1, w3, b3, t(3, 4), None, *joined, "silu"),
            (t(3, 4), w13, t(3, 4, 4), t(3, 2), IDS, t(3, 8), None, None, t(3, 4), None, *joined, "silu"),
        ],
        "fused_experts_formula": [
            (t(3, 4), w1, t(3, 4, 4), t(3, 2), IDS, b1, w3, b3, t(3, 4), None, t(3, 4))
            + (*operands, t(3, 1), t(3, 4), f"halves|{FORMULA}t5=mul(t4,up)|t5"),
            (t(3, 4), w13, t(3, 4, 4), t(3, 2), IDS, t(3, 8), None, None, t(3, 4), None, t(3, 4))
            + (*operands, t(3, 1), t(3, 4), f"halves|{FORMULA}t5=mul(t4,up)|t5"),
        ],
        "fused_experts_with_shared": [
            (t(3, 4), w1, t(3, 4, 4), t(3, 2), IDS, matrix(5, 4), matrix(4, 5))
            + (b1, w3, b3, t(3, 4), None, t(3, 1), matrix(5, 4), "gelu", "silu"),
            (t(3, 4), w13, t(3, 4, 4), t(3, 2), IDS, matrix(10, 4), matrix(4, 5))
            + (t(3, 8), None, None, t(3, 4), None, t(3, 1), None, "gelu", "silu"),
            (
                t(3, 4),
                w13,
                t(3, 4, 4),
                t(3, 2),
                IDS,
                matrix(5, 4),
                matrix(4, 5),
                *(None,) * 7,
                "relu2",
                "silu",
            ),
        ],
        "fused_moe": [
            moe,
            (*moe[:2], w13, *moe[3:5], t(3, 8), None, None, *moe[8:]),
            (*moe[:2], w13, moe[3], *(None,) * 6, *moe[10:]),
        ],
        "fused_moe_formula": [(*moe[:10], *operands, "top_k=2", f"halves|{FORMULA}t4")],
        "batch_invariant_routing": [(t(5, 8), torch.randn(8), "top_k=2")],
        "batch_invariant_gemm": [
            (t(6, 4), w1, OFFSETS, b1, w3, b3),
            (t(6, 4), t(3, 5, 4), OFFSETS, t(3, 5), None, None),
        ],
        "batch_invariant_experts": [
            (t(3, 4), w1, t(3, 4, 4), t(3, 2), IDS, b1, w3, b3, t(3, 4), None, *joined, "silu"),
            (t(3, 4), w13, t(3, 4, 4), t(3, 2), IDS, t(3, 8), None, None, t(3, 4), None, *joined, "silu"),
        ],
    }


def empty_samples():
    """The same without a token."""
    none, offsets, slots = t(0, 4), torch.zeros(4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    w13, w2, weights, ids = t(3, 8, 4), t(3, 4, 4), t(0, 2), torch.zeros(0, 2, dtype=torch.int32)
    operands = t(3, 4), t(3), t(3, 8), t(3)
    return {
        "topk_routing": (t(0, 8), None, "top_k=2"),
        "topk_routing_backward": (t(0, 2), t(0, 8), t(0, 2), ids, "top_k=2"),
        "build_dispatch": (ids, None, 3),
        "map_replicas": (ids, REPLICAS, REPLICA_COUNT, None),
        "map_and_record": (ids, REPLICAS, REPLICA_COUNT, torch.zeros(5, dtype=torch.int32), None, None, None),
        "route_and_record": (t(0, 3), REPLICAS, REPLICA_COUNT, torch.zeros(5, dtype=torch.int32), None, None)
        + (None, None, "top_k=2"),
        "plan_exchange": (ids, OWNERS, 2, 4),
        "push_rows": (none, slots.view(0, 1), NO_TOKENS, SENT - 2, weights, ids, None, ""),
        "pull_sums": (t(4, 4), slots.view(0, 1), NO_TOKENS, SENT - 2, SENT - 2, none, ""),
        "permute": (none, slots),
        "permute_backward": (none, slots, 0),
        "grouped_gemm": (none, w13, offsets, t(3, 8), None, None),
        "grouped_gemm_weight_backward": (t(0, 5), none, offsets),
        "batched_gemm": (t(3, 0, 4), w13, torch.zeros(3, dtype=torch.int32), t(3, 8)),
        "quantise_rows": (none, None, 3, torch.int8),
        "dequantise_weight": (whole(0, 5, 4), torch.rand(0, 3, 2), None, None, 2, 3, torch.float32),
        "scaled_grouped_gemm": (none, whole(3, 5, 4), torch.rand(3, 5, 1), offsets, None, t(3, 5))
        + (*(None,) * 3,)
        + (1, 4, torch.float32),
        "scaled_fused_experts": (
            none,
            whole(3, 8, 4),
            torch.rand(3, 8, 1),
            whole(3, 4, 4),
            torch.rand(3, 4, 1),
        )
        + (weights, ids, *(None,) * 12, 1, 4, 1, 4, "silu", "quantised"),
        "dense_gemm": (none, matrix(5, 4), matrix(5), torch.float32),
        "gated_activation": (t(0, 8), "silu"),
        "gated_activation_backward": (none, t(0, 8), "gelu"),
        "weighted_activation_backward": (none, t(0, 8), t(0), "gelu"),
        "combine": (none, weights, slots, t(0, 4), t(0, 1), None),
        "combine_backward": (none, t(5, 4), weights, slots),
        "routing_dispatch": (t(0, 8), None, None, 3, "top_k=2"),
        "gather_gemm": (none, w13, slots, offsets, None, None, None),
        "act_gemm_combine": (t(0, 8), w2, offsets, weights, slots, slots, *(None,) * 4, "silu"),
        "gather_gemm_act": (none, w13, slots, offsets, None, None, None, "silu"),
        "gather_gemm_formula": (none, w13, slots, offsets, None, None, None, *operands)
        + (f"halves|{FORMULA}t4",),
        "gemm_combine": (none, w2, offsets, weights, slots, *(None,) * 4),
        "fused_experts": (none, w13, w2, weights, ids, *(None,) * 8, "silu"),
        "fused_experts_formula": (none, w13, w2, weights, ids, *(None,) * 6)
        + (*operands, None, None, f"halves|{FORMULA}t4"),
        "fused_experts_with_shared": (
            none,
            w13,
            w2,
            weights,
            ids,
            matrix(10, 4),
            matrix(4, 5),
            *(None,) * 7,
        )
        + ("silu", "silu"),
        "fused_moe_formula": (none, t(0, 3), w13, w2, *(None,) * 6)
        + (*operands, "top_k=2", f"halves|{FORMULA}t4"),
        "fused_moe": (none, t(0, 3), w13, w2, *(None,) * 6, "top_k=2", "silu"),
        "batch_invariant_routing": (t(0, 8), None, "top_k=2"),
        "batch_invariant_gemm": (none, w13, offsets, t(3, 8), None, None),
        "batch_invariant_experts": (none, w13, w2, weights, ids, *(None,) * 8, "silu"),
    }


def _column_major(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else _every_other(tensor)


def _expanded(tensor):
    return tensor[:1].expand_as(tensor)


def _every_other(tensor):
    """Stride 2 in the last dimension."""
    return tensor.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]


LAYOUTS = {
    "dense": lambda t: t,
    "column major": _column_major,
    "expanded": _expanded,
    "strided": _every_other,
}


def laid_out(args, layout, dtype, device="cpu"):
    """`args` on `device`, with floating tensors in `dtype` and every tensor in `layout`."""

    def change(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        is_weight = arg.dim() == 3 or hasattr(arg, "is_weight")
        arrange = LAYOUTS["dense" if is_weight and layout == "strided" else layout]
        if arg.is_floating_point() and arg.itemsize > 1:
            cast = arrange(arg.detach().to(device, dtype))
            return cast.detach().requires_grad_(arg.requires_grad)
        return (LAYOUTS["dense"] if layout == "expanded" else arrange)(arg.to(device))

    return tuple(map(change, args))
