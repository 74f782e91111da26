"""Which experts tokens choose, as device functions: scores, group limits, and "largest remaining, lowest id first".

The definition is `moe_ops.routing.reference`.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import offset

_NO_EXPERT = tl.constexpr(1 << 30)
_LOWEST = tl.constexpr(-36.0)  # below it log(1 + e^x) is e^x, to the last bit of float64


@triton.jit
def is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _keys(values):
    """Integers in the order of floating values, 0 and -0 alike: a warp finds its largest in one instruction."""
    values = tl.where(values == 0, 0.0, values)
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True)
        keys = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys


@triton.jit
def _taken(keys, gone):
    """Keys, below all others where they are `gone`."""
    lowest = -(1 << 63) if keys.dtype == tl.int64 else -(1 << 31)
    return tl.where(gone, tl.full(keys.shape, lowest, keys.dtype), keys)


@triton.jit
def _first_best(keys, numbers):
    """(key, number) per row of the largest; the lowest number among equals."""
    best = tl.max(keys, 1)
    return best, tl.min(tl.where(keys == best[:, None], numbers, _NO_EXPERT), 1)


@triton.jit
def _group_scores(
    selection,
    experts,
    NUM_GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):
    """[rows, groups] of selections [rows, experts], a group at a time.

    As [rows, groups, members] it would be one reduction, but Triton 3.6 reduces a reshaped block over the wrong lanes:
    on an H200 tokens got each other's experts.
    """
    groups = tl.arange(0, BLOCK_G)[None, :]
    scores = tl.full((selection.shape[0], BLOCK_G), -float("inf"), selection.dtype)
    for group in range(NUM_GROUPS):
        inside = experts // MEMBERS == group
        values = tl.where(inside, selection, -float("inf"))
        best = tl.max(values, 1)
        if TOP2_SUM:
            first = tl.min(tl.where(inside & (values == best[:, None]), experts, _NO_EXPERT), 1)
            best += tl.max(tl.where(experts == first[:, None], -float("inf"), values), 1)
        scores = tl.where(groups == group, best[:, None], scores)
    return scores


@triton.jit
def _root_and_decay(logits):
    """sqrt(log(1 + e^x)) as two factors, the root down to x = -36 and e^(x/2) from there on; see the definition."""
    near = tl.where(logits < _LOWEST, _LOWEST, logits)
    small = tl.exp(-tl.abs(near))
    one_more = 1.0 + small
    # log1p: the quotient makes good for what the sum has rounded away.
    divisor = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    log1p = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / divisor))
    root = tl.sqrt(tl.where(near > 0, near, 0.0) + log1p)
    return root, tl.exp(0.5 * tl.where(logits < _LOWEST, logits - _LOWEST, 0.0))


@triton.jit
def score_of(logits, there, SCORE: tl.constexpr):
    """Scores of rows of logits, among those that are there; 0 elsewhere."""
    if SCORE == "softmax":
        logits = tl.where(there, logits, -float("inf"))
        exps = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = exps / tl.sum(exps, 1)[:, None]
    elif SCORE == "sigmoid":
        score = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        root, decay = _root_and_decay(logits)
        score = root * decay
    return tl.where(there, score, 0.0)


@triton.jit
def slope_of(logits, score, SCORE: tl.constexpr):
    """The derivative of an elementwise score."""
    if SCORE == "sigmoid":
        slope = score * (1.0 - score)
    else:
        root, decay = _root_and_decay(logits)
        slope = tl.sigmoid(tl.where(logits < _LOWEST, _LOWEST, logits)) * decay / (2.0 * root)
    return slope


@triton.jit
def _ranked(
    logits_ptr, bias_ptr, tokens, present, stride_t, stride_e, stride_b, ACC: tl.constexpr,
    SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """(keys in the order of choice, scores) [tokens, BLOCK_E] of every expert."""
    experts = tl.arange(0, BLOCK_E)[None, :]
    there = experts < NUM_EXPERTS
    logits_ptrs = logits_ptr + offset(tokens, stride_t)[:, None] + offset(experts, stride_e)
    logits = tl.load(logits_ptrs, mask=present[:, None] & there, other=0.0).to(ACC)
    score = score_of(logits, there, SCORE) if SCORE_FIRST else logits
    selection = score
    if bias_ptr is not None:
        selection += tl.load(bias_ptr + offset(experts, stride_b), mask=there, other=0.0).to(ACC)
    selection = tl.where(there & is_finite(selection), selection, -float("inf"))
    if NUM_GROUPS > 1:
        groups = tl.arange(0, BLOCK_G)
        group_score = _group_scores(selection, experts, NUM_GROUPS, MEMBERS, BLOCK_G, TOP2_SUM)
        group_keys = _taken(_keys(group_score), groups[None, :] >= NUM_GROUPS)
        kept = tl.full(selection.shape, False, tl.int1)
        for _ in range(TOPK_GROUPS):
            _, group = _first_best(group_keys, groups[None, :])
            kept = kept | (experts // MEMBERS == group[:, None])
            group_keys = _taken(group_keys, groups[None, :] == group[:, None])
        # A finite GROUP_FILL must not make an unusable score usable.
        fill = -float("inf") if GROUP_FILL is None else GROUP_FILL
        selection = tl.where(kept | (selection == -float("inf")), selection, fill)
    score = tl.where(there & is_finite(score), score, 0.0)
    return _taken(_keys(selection), tl.broadcast_to(experts >= NUM_EXPERTS, selection.shape)), score


@triton.jit
def nth_choice(
    logits_ptr, bias_ptr, token, n, stride_t, stride_e, stride_b, ACC: tl.constexpr,
    SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The expert that `route_tokens` gives slot `n` of a token."""
    tokens = token + tl.arange(0, 1)
    keys, _ = _ranked(
        logits_ptr, bias_ptr, tokens, tokens >= 0, stride_t, stride_e, stride_b, ACC,
        SCORE, SCORE_FIRST, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL, NUM_EXPERTS, MEMBERS, BLOCK_E, BLOCK_G,
    )  # fmt: skip
    experts = tl.arange(0, BLOCK_E)[None, :]
    pick = tl.zeros((1,), tl.int32)
    for _ in range(n + 1):
        _, pick = _first_best(keys, experts)
        keys = _taken(keys, experts == pick[:, None])
    return tl.sum(pick, 0)


@triton.jit
def route_tokens(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr,
    num_tokens, stride_t, stride_e, stride_b,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Routes ROWS tokens; returns their slots [ROWS, BLOCK_K], their experts, and which of these exist."""
    ACC: tl.constexpr = weights_ptr.dtype.element_ty
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = tokens < num_tokens
    keys, score = _ranked(
        logits_ptr, bias_ptr, tokens, present, stride_t, stride_e, stride_b, ACC,
        SCORE, SCORE_FIRST, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL, NUM_EXPERTS, MEMBERS, BLOCK_E, BLOCK_G,
    )  # fmt: skip
    experts = tl.arange(0, BLOCK_E)[None, :]
    bits = score.to(keys.dtype, bitcast=True)
    columns = tl.arange(0, BLOCK_K)[None, :]
    chosen_keys = _keys(tl.full((ROWS, BLOCK_K), -float("inf"), ACC))
    unusable = chosen_keys
    chosen_bits = tl.zeros((ROWS, BLOCK_K), keys.dtype)
    ids = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for k in range(TOP_K):
        best, pick = _first_best(keys, experts)
        hit = experts == pick[:, None]
        keys = _taken(keys, hit)
        chosen_bits = tl.where(columns == k, tl.sum(tl.where(hit, bits, 0), 1)[:, None], chosen_bits)
        chosen_keys = tl.where(columns == k, best[:, None], chosen_keys)
        ids = tl.where(columns == k, pick[:, None], ids)
    valid = chosen_keys > unusable
    chosen = chosen_bits.to(ACC, bitcast=True)
    chosen = tl.where(valid, chosen, 0.0) if SCORE_FIRST else score_of(chosen, valid, SCORE)
    if RENORMALIZE:
        total = tl.sum(chosen, 1) + RENORM_EPS
        chosen = chosen / tl.where(total == 0, 1.0, total)[:, None]
    slots = tokens.to(tl.int64)[:, None] * TOP_K + columns
    inside = present[:, None] & (columns < TOP_K)
    tl.store(weights_ptr + slots, chosen * SCALE, mask=inside)
    tl.store(ids_ptr + slots, ids, mask=inside)
    return slots, ids, inside
