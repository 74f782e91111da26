"""What a user can hand to an operator by mistake: the call, and the error that must name it.

Each error names the argument, its value and what was expected. `bad_modules` has the rest of the table.
"""

import torch

import moe_ops
from moe_ops import Activation, RoutingConfig

T, E, K, H, I = 4, 6, 2, 8, 5


def good():
    """Arguments of `fused_moe` with nothing wrong."""
    return {
        "hidden_states": torch.randn(T, H),
        "router_logits": torch.randn(T, E),
        "w13": torch.randn(E, 2 * I, H),
        "w2": torch.randn(E, H, I),
        "routing": RoutingConfig(top_k=K),
    }


BAD_LAYERS = {  # what is changed in `good`
    "rank": (
        {"hidden_states": torch.randn(2, T, H)},
        ValueError,
        r"hidden_states has shape \[2, 4, 8\]: expected",
    ),
    "w13 hidden": (
        {"w13": torch.randn(E, 2 * I, H + 1)},
        ValueError,
        r"w13 has shape \[6, 10, 9\]: expected .*8",
    ),
    "w2 intermediate": (
        {"w2": torch.randn(E, H, I + 1)},
        ValueError,
        r"w2 has shape \[6, 8, 6\]: expected \[6, 8, 5",
    ),
    "w2 experts": ({"w2": torch.randn(E + 1, H, I)}, ValueError, r"w2 has shape \[7, 8, 5\]: expected \[6"),
    "logits experts": (
        {"router_logits": torch.randn(T, E + 1)},
        ValueError,
        r"router_logits has shape \[4, 7\]",
    ),
    "logits tokens": ({"router_logits": torch.randn(T + 1, E)}, ValueError, r"\[5, "),
    "top_k": (
        {"routing": RoutingConfig(top_k=E + 1)},
        ValueError,
        r"top_k=7: expected at most num_experts=6",
    ),
    "groups": (
        {"routing": RoutingConfig(num_groups=4)},
        ValueError,
        r"num_groups=4: expected a divisor of .*=6",
    ),
    "mixed dtypes": (
        {"w2": torch.randn(E, H, I).double()},
        TypeError,
        r"w2 has dtype torch.float64: expected .*32",
    ),
    "integer hidden": (
        {"hidden_states": torch.ones(T, H, dtype=torch.int32)},
        TypeError,
        r"torch.int32: expected",
    ),
    "device": ({"w13": torch.randn(E, 2 * I, H, device="meta")}, ValueError, r"w13 is on meta: expected cpu"),
    "strides": (
        {"w13": torch.randn(E, 4 * I, 2 * H)[:, ::2, ::2]},
        ValueError,
        r"(w13|weight) has strides \[320, 32, 2\]: expected stride 1 in one of the last two",
    ),
    "bias shape": (
        {"w13_bias": torch.randn(E, I)},
        ValueError,
        r"w13_bias has shape \[6, 5\]: expected \[6, 10\]",
    ),
    "bias dtype": (
        {"w2_bias": torch.randn(E, H).half()},
        TypeError,
        r"bias has dtype torch.float16: expected",
    ),
    "correction bias": (
        {"correction_bias": torch.randn(E + 1)},
        ValueError,
        r"correction_bias has shape \[7\]",
    ),
    "activation": (
        {"activation": "swish"},
        ValueError,
        r"activation='swish': expected one of 'silu', 'gelu'",
    ),
    "activation option": ({"activation": "silu;gamma=1"}, ValueError, r"'gamma=1': expected name=value"),
    "odd gate": (
        {"w13": torch.randn(E, 2 * I - 1, H)},
        ValueError,
        r"w13 has 9 gate and up features: expected an even",
    ),
    "map dtype": (
        {"expert_map": torch.zeros(E)},
        TypeError,
        r"expert_map has dtype torch.float32: expected .*int32",
    ),
}
OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
BAD_CALLS = {
    "ids dtype": (lambda: moe_ops.build_dispatch(torch.zeros(2, 2), 4), TypeError, "topk_ids has dtype torch.float32"),
    "ids rank": (lambda: moe_ops.build_dispatch(torch.zeros(2).int(), 4), ValueError, r"topk_ids has shape \[2\]"),
    "no slots": (
        lambda: moe_ops.build_dispatch(torch.zeros(2, 0).int(), 4),
        ValueError,
        r"topk_ids has shape \[2, 0\]: expected at least one expert per token",
    ),
    "no experts": (lambda: moe_ops.build_dispatch(torch.zeros(2, 2).int(), 0), ValueError, "num_experts=0: expected"),
    "slots": (lambda: moe_ops.permute(torch.randn(2, 3), torch.arange(5).int()), ValueError, "5 rows: expected a mult"),
    "slots dtype": (lambda: moe_ops.permute(torch.randn(2, 3), torch.arange(4)), TypeError, "int64: expected .*int32"),
    "offsets": (
        lambda: moe_ops.grouped_gemm(torch.randn(4, 3), torch.randn(3, 5, 3), OFFSETS),
        ValueError,
        r"expert_offsets has shape \[3\]: expected \[4\]",
    ),
    "combine weights": (
        lambda: moe_ops.combine(torch.randn(4, 3), torch.randn(2, 3), torch.arange(4).int()),
        ValueError,
        r"inverse has shape \[4\]: expected \[6\]",
    ),
    "shared": (
        lambda: moe_ops.combine(torch.randn(4, 3), torch.randn(2, 2), torch.arange(4).int(), torch.randn(2, 4)),
        ValueError,
        r"shared has shape \[2, 4\]: expected \[2, 3\]",
    ),
    "gate without shared": (
        lambda: moe_ops.combine(
            torch.randn(4, 3), torch.randn(2, 2), torch.arange(4).int(), shared_gate=torch.randn(2, 1)
        ),
        ValueError,
        r"shared_gate of shape \[2, 1\] without shared: expected both or neither",
    ),
    "weight on input": (
        lambda: moe_ops.fused_experts(
            torch.randn(2, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 3), torch.ones(2, 2), torch.zeros(2, 2).int(),
            apply_router_weight_on_input=True,
        ),
        ValueError,
        r"apply_router_weight_on_input=True with topk_weights of shape \[2, 2\]: expected \[T, 1\]",
    ),
    "no expert weights": (
        lambda: moe_ops.fused_experts(
            torch.randn(2, 4), torch.randn(0, 6, 4), torch.randn(0, 4, 3), torch.ones(2, 2), torch.zeros(2, 2).int(),
            emit="fused",
        ),
        ValueError,
        r"w13 has shape \[0, 6, 4\]: expected at least one expert",
    ),
    "w2 strides": (
        lambda: moe_ops.fused_moe(**{**good(), "w2": torch.randn(E, 2 * H, 2 * I)[:, ::2, ::2]}, emit="fused"),
        ValueError,
        r"w2 has strides \[160, 20, 2\]: expected stride 1 in one of the last two",
    ),
    "plan": (
        lambda: moe_ops.gather_gemm_act(
            torch.randn(2, 4), torch.randn(1, 6, 4), (torch.arange(2).int(), torch.arange(2).int(), OFFSETS[:2])
        ),
        TypeError,
        "plan=<tuple>: expected a DispatchPlan",
    ),
    "routing type": (lambda: moe_ops.topk_routing(torch.randn(2, 4), "top_k=2"), TypeError, "expected a RoutingConfig"),
    "activation type": (lambda: moe_ops.gated_activation(torch.randn(2, 4), 3), TypeError, "activation=3: expected"),
    "emit": (lambda: moe_ops.fused_moe(**good(), emit="both"), ValueError, "emit='both': expected 'auto', 'stages'"),
    "raw operator": (
        lambda: torch.ops.moe.permute(torch.randn(2, 3), torch.arange(5).int()), ValueError, "expected a multiple",
    ),
}  # fmt: skip


X, IDS, WEIGHTS, LOGITS = torch.randn(T, H), torch.randint(E, (T, K)), torch.rand(T, K), torch.randn(T, E)
W13, W2, ROWS = torch.randn(E, 2 * I, H), torch.randn(E, H, I), torch.randn(T * K, H)
HALF_LAYER = {"hidden_states": X, "w13": W13, "w2": W2}
ROUTING = RoutingConfig(K)
PLAN = moe_ops.build_dispatch(IDS, E)


def experts(**changes):
    """A right call of `fused_experts` but for `changes`."""
    given = {"hidden_states": X, "w13": W13, "w2": W2, "topk_weights": WEIGHTS, "topk_ids": IDS}
    return moe_ops.fused_experts(**{**given, **changes})


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def own_gate(gate, up, *others):
    return gate * up


BAD_VALUES = {
    "warmup tokens": (lambda: moe_ops.warmup_step(print, 0), ValueError, "max_tokens=0: expected at least 1"),
    "half a token": (lambda: moe_ops.warmup_step(print, 1.5), TypeError, "max_tokens=1.5: expected an int"),
    "step on a toaster": (lambda: moe_ops.warmup_step(print, 1, device="toaster"), ValueError,
        "device='toaster': expected a torch.device"),
    "number for a gpu's name": (lambda: moe_ops.Tuning(3, ()), TypeError, "gpu=3: expected the name of a GPU"),
    "table of another gpu": (lambda: moe_ops.use_tuning(moe_ops.Tuning("a toaster", ())), ValueError,
        "its gpu is 'a toaster': expected a table for"),
    "number for a table": (lambda: moe_ops.use_tuning(3), TypeError, "table=3: expected a Tuning, the path of a file"),
    # Ids, weights and placement of experts
    "bool ids": (lambda: experts(topk_ids=IDS.bool()), TypeError,
        "topk_ids has dtype torch.bool: expected torch.int32 or"),
    "short ids": (lambda: experts(topk_ids=IDS.short()), TypeError,
        "topk_ids has dtype torch.int16: expected torch.int32 or"),
    "ids in a list": (lambda: experts(topk_ids=IDS.tolist()), TypeError, "topk_ids=<list>: expected a torch.Tensor"),
    "integer weights": (lambda: experts(topk_weights=WEIGHTS.int()), TypeError,
        "topk_weights has dtype torch.int32: expected a fl"),
    "weights of others": (lambda: experts(topk_weights=WEIGHTS[:3]), ValueError,
        r"topk_weights has shape \[3, 2\]: expected \[4, 2\]"),
    "map in a list": (lambda: experts(expert_map=[0] * E), TypeError, "expert_map=<list>: expected a torch.Tensor"),
    "matrix of a map": (lambda: experts(expert_map=index(*[0] * E)[None]), ValueError,
        r"expert_map has shape \[1, 6\]: expected"),
    "long map": (lambda: experts(expert_map=torch.zeros(E).long()), TypeError,
        "expert_map has dtype torch.int64: expected torch.int32"),
    # Tensors that are no plain ones
    "complex": (lambda: experts(hidden_states=X.to(torch.complex64)), TypeError,
        "hidden_states has dtype torch.complex64: expected a f"),
    "float8": (
        lambda: experts(**{n: t.to(torch.float8_e4m3fn) for n, t in HALF_LAYER.items()}),
        TypeError, "hidden_states has dtype torch.float8_e4m3fn: expected a floating point dtype of 16 bits or more",
    ),
    "sparse": (lambda: experts(w13=W13.to_sparse()), TypeError, "w13 is torch.sparse_coo: expected a dense tensor"),
    "nested": (lambda: experts(hidden_states=torch.nested.nested_tensor([X])), TypeError,
        "hidden_states is nested: expected a de"),
    "of another library": (lambda: experts(hidden_states=X.to_mkldnn()), TypeError,
        "hidden_states is torch._mkldnn: expected a de"),
    "on meta": (lambda: experts(hidden_states=X.to("meta")), ValueError,
        "w13 is on cpu: expected meta, the device of hidden_states"),
    # Activations
    "no activation": (lambda: experts(activation=None), TypeError,
        "activation=None: expected a string or an Activation"),
    "class of activations": (lambda: experts(activation=Activation), TypeError,
        "activation=<type>: expected a name, an Activation or a"),
    "gate of other columns": (lambda: experts(activation=lambda gate, up: gate[:, 1:]), ValueError,
        r"activation returned has shape \[8, 4\]"),
    "gate of nothing": (lambda: experts(activation=lambda gate, up: None), TypeError,
        "activation returned None: expected a torch.Tensor"),
    "tensors for a name": (lambda: experts(per_expert=[X]), ValueError, "per_expert has 1 tensors: expected none"),
    "tensors of others": (
        lambda: experts(activation=own_gate, per_expert=[torch.ones(E + 1)]), ValueError,
        r"per_expert\[0\] has shape \[7\]: expected",
    ),
    "limit of nothing": (lambda: Activation("silu", limit=float("nan")), ValueError, "limit=nan: expected a number"),
    "negative limit": (lambda: Activation("silu", limit=-1.0), ValueError, "limit=-1.0: expected a positive number"),
    "option of another": (lambda: Activation("silu", alpha=2.0), ValueError,
        "alpha=2.0: activation 'silu' has no alpha; expected None"),
    "odd columns": (lambda: moe_ops.gated_activation(torch.randn(4, 7)), ValueError,
        "gate_up has 7 gate and up features: expected an e"),
    # What joins
    "shared of another dtype": (lambda: experts(shared=X.double()), TypeError,
        "shared has dtype torch.float64: expected torch.float32, t"),
    "residual of others": (
        lambda: moe_ops.combine(ROWS, WEIGHTS, PLAN.inverse, residual=X[:2]), ValueError,
        r"residual has shape \[2, 8\]: expected \[4, 8\]",
    ),
    "ids elsewhere": (lambda: moe_ops.routing_weights(LOGITS, IDS.to("meta"), ROUTING), ValueError,
        "topk_ids is on meta: expected cpu, the device of router_logits"),
    "no emit": (lambda: experts(emit=None), ValueError,
        "emit=None: expected 'auto', 'stages', 'halves', 'fused' or 'batch_invariant'"),
    "emit of routing": (lambda: moe_ops.topk_routing(LOGITS, ROUTING, emit="fused"), ValueError,
        "emit='fused': expected 'auto' or 'batch"),
    # Routing
    "dict for a routing": (lambda: moe_ops.topk_routing(LOGITS, {"top_k": 2}), TypeError,
        "routing=<dict>: expected a RoutingConfig"),
    "matrix of a bias": (lambda: moe_ops.topk_routing(LOGITS, ROUTING, X[:1]), ValueError,
        r"correction_bias has shape \[1, 8\]: expected \[6\]"),
    "integer bias": (lambda: moe_ops.topk_routing(LOGITS, ROUTING, index(*[0] * E)), TypeError,
        "correction_bias has dtype torch.int32: exp"),
    "weights of float ids": (lambda: moe_ops.routing_weights(LOGITS, IDS.float(), ROUTING), TypeError,
        "topk_ids has dtype torch.float32"),
    "top_k of zero": (lambda: RoutingConfig(0), ValueError, "top_k=0: expected at least 1"),
    "float top_k": (lambda: RoutingConfig(2.0), TypeError, "top_k=2.0: expected an int, got float"),
    "unknown score": (lambda: RoutingConfig(2, "tanh"), ValueError,
        "score_fn='tanh': expected one of 'softmax', 'sigmoid'"),
    "infinite scale": (lambda: RoutingConfig(2, scale=float("inf")), ValueError,
        "scale=inf: expected a finite number"),
    "infinite eps": (lambda: RoutingConfig(2, renorm_eps=float("inf")), ValueError,
        "renorm_eps=inf: expected a finite number"),
    "negative eps": (lambda: RoutingConfig(2, renorm_eps=-1.0), ValueError,
        "renorm_eps=-1.0: expected a number >= 0"),
    "text for a switch": (lambda: RoutingConfig(2, renormalize="no"), TypeError,
        "renormalize='no': expected True or False, got str"),
    "too many groups": (lambda: RoutingConfig(2, num_groups=2, topk_groups=3), ValueError,
        "topk_groups=3: expected at most num_groups=2"),
    # Stages
    "text for a number": (lambda: moe_ops.build_dispatch(IDS, "6"), TypeError, "num_experts='6': expected an int"),
    "tensor for a number": (lambda: moe_ops.build_dispatch(IDS, torch.tensor(6)), TypeError,
        "num_experts=<Tensor>: expected an int"),
    "bool for a number": (lambda: moe_ops.routing_dispatch(LOGITS, ROUTING, True), TypeError,
        "num_experts=True: expected an int"),
    "logits in a list": (lambda: moe_ops.routing_dispatch([[1.0]], ROUTING), TypeError,
        "router_logits=<list>: expected a torch.Tensor"),
    "slot of nobody": (lambda: moe_ops.permute(X, index(0, 1, 2, 99)), ValueError,
        "sorted_slots holds 99: expected slots of 4 tokens"),
    "negative slot": (lambda: moe_ops.permute(X, index(0, 1, 2, -3)), ValueError,
        "sorted_slots holds -3: expected slots of 4 tokens"),
    "offsets that fall": (lambda: moe_ops.grouped_gemm(ROWS, W13, index(0, 5, 2, 3, 4, 6, 8)), ValueError,
        r"expert_offsets=\[0, 5, 2, .*: expected"),
    "offsets beyond": (lambda: moe_ops.grouped_gemm(ROWS, W13, index(0, 5, 6, 7, 8, 9, 99)), ValueError,
        "9, 99]: expected numbers from 0 up to at most 8"),
    "negative offsets": (lambda: moe_ops.grouped_gemm(ROWS, W13, index(0, -5, 6, 7, 8, 8, 8)), ValueError,
        r"expert_offsets=\[0, -5, 6"),
    "late offsets": (lambda: moe_ops.grouped_gemm(ROWS, W13, index(3, 5, 6, 7, 8, 8, 8)), ValueError,
        r"expert_offsets=\[3, 5, .*: expected numbers fr"),
    "row of nobody": (lambda: moe_ops.combine(ROWS, WEIGHTS, index(*[8] * 8)), ValueError,
        "inverse holds 8: expected at most 7, the last row"),
    "long counts": (lambda: moe_ops.batched_gemm(torch.randn(E, 3, H), W13, IDS[:, 0]), TypeError,
        "counts has dtype torch.int64: expected to"),
    "no plan": (lambda: moe_ops.gemm_combine(ROWS[:, :I], W2, WEIGHTS, "plan"), TypeError,
        "plan='plan': expected a DispatchPlan"),
    "half of a layer": (lambda: moe_ops.gather_gemm(X, W13, None), TypeError, "plan=None: expected a DispatchPlan"),
    "other half": (lambda: moe_ops.act_gemm_combine(ROWS, W2, WEIGHTS, None), TypeError,
        "plan=None: expected a DispatchPlan"),
    "replicas": (lambda: moe_ops.map_replicas(IDS, index(0)[None], index(0, 1)), ValueError,
        r"replica_count has shape \[2\]: expected \[1\]"),
    "shared weights": (
        lambda: moe_ops.fused_experts_with_shared(X, W13, W2, WEIGHTS, IDS, W13[0], W2[0, 1:]), ValueError,
        r"shared_w2 has shape \[7, 5\]: exp",
    ),
    "shared halves": (
        lambda: moe_ops.fused_experts_with_shared(
            X, W13, W2, WEIGHTS, IDS, (W13[0, :5], W13[0, 5:].t().contiguous().t()), W2[0]
        ), ValueError, r"shared_up has strides \[1, 5\]: expected \[8, 1\], those of the gate",
    ),
    "product of others": (lambda: moe_ops.dense_gemm(X, ROWS[:, 1:]), ValueError,
        r"weight has shape \[8, 7\]: expected \['?B'?, 8\]"),
    "name of a dtype": (lambda: moe_ops.dense_gemm(X, ROWS, dtype="float32"), TypeError,
        "dtype='float32': expected a torch.dtype"),
    "smaller dtype": (lambda: moe_ops.dense_gemm(X, ROWS, dtype=torch.float16), TypeError,
        "dtype=torch.float16: expected torch.float32$"),
    "a weight that is not quantised": (
        lambda: moe_ops.dequantise_weight(X), TypeError, "expected a ScaledWeight",
    ),
    "columns of a block": (lambda: moe_ops.quantise_rows(X, 0), ValueError, "columns=0: expected at least 1"),
    "no scales": (lambda: moe_ops.scaled_grouped_gemm(ROWS, W13, index(*range(7))), TypeError,
        "weight=<Tensor>: expected a ScaledWeight"),
    "no scales of a layer": (
        lambda: moe_ops.scaled_fused_experts(X, moe_ops.ScaledWeight(W13, W13[:, :, :1]), W2, WEIGHTS, IDS), TypeError,
        "w2=<Tensor>: expected a ScaledWeight",
    ),
}  # fmt: skip
