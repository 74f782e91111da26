"""Decode: the whole expert layer in two GEMV launches, for the few tokens whose slots hit distinct experts.

No sort: a program reads its route from `topk_ids`. Weights are read once, in one shot per row where the registers
allow it, so that all of a CTA's bytes are in flight together. No atomics: deterministic.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import activate, joined, local_expert, offset


@triton.jit
def slot_and_column(program, programs, features, BLOCK_N: tl.constexpr, TAKE_TURNS: tl.constexpr):
    """(slot or token, first output column) of a program, of so many.

    Where slots take turns at each block of columns, those that share an expert find its rows in the cache.
    """
    blocks = tl.cdiv(features, BLOCK_N)
    if TAKE_TURNS:
        num_slots = programs // blocks
        slot, block = program % num_slots, program // num_slots
    else:
        slot, block = program // blocks, program % blocks
    return slot, block * BLOCK_N


@triton.jit
def weight_rows(
    first, features, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    """(output column, row of the weight) of all rows that BLOCK_N output columns take: gate and up rows together.

    Where they are APART, in two weights, the first half of these are rows of one, the second half of the other.
    """
    rows = tl.arange(0, 2 * BLOCK_N if GATED else BLOCK_N)
    if not GATED:
        column = first + rows
        weight_row = column
    elif INTERLEAVED:
        column = first + rows // 2
        weight_row = first * 2 + rows
    else:
        column = first + rows % BLOCK_N
        weight_row = column if APART else column + offset(rows // BLOCK_N, features)
    return column, weight_row


@triton.jit
def of_either(gate_ptr, up_ptr, SIZE: tl.constexpr):
    """SIZE pointers: to the gate tensor, then to the up tensor, if there is one."""
    ptrs = gate_ptr + tl.zeros((SIZE,), tl.int64)
    if up_ptr is not None:
        ptrs = tl.where(tl.arange(0, SIZE) < SIZE // 2, ptrs, up_ptr + tl.zeros((SIZE,), tl.int64))
    return ptrs


@triton.jit
def gate_and_up(value, BLOCK_N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both [BLOCK_N], of products with the rows of `weight_rows`; the same for an ungated activation."""
    gate, up = value, value
    if GATED and INTERLEAVED:
        gate, up = tl.reshape(value, (BLOCK_N, 2)).split()
    elif GATED:
        gate, up = tl.reshape(value, (2, BLOCK_N)).permute(1, 0).split()
    return gate, up


@triton.jit
def bias_of(
    bias_ptr, up_bias_ptr, expert, rows, mask, stride_e, stride_n, SIZE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """The bias of each of SIZE rows of `weight_rows`; zeros without one."""
    bias = tl.zeros((SIZE,), ACC)
    if bias_ptr is not None:
        offsets = offset(expert, stride_e) + offset(rows, stride_n)
        bias = tl.load(of_either(bias_ptr, up_bias_ptr, SIZE) + offsets, mask=mask, other=0.0).to(ACC)
    return bias


@triton.jit
def activate_and_store(
    value, out_ptr, slot, expert, first, end, features, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[slot] = activation(value), BLOCK_N output columns from `first` on; operands are read up to `end`."""
    gate, up = gate_and_up(value, BLOCK_N, GATED, INTERLEAVED)
    columns = first + tl.arange(0, BLOCK_N)
    result = activate(
        gate, up, expert, columns, columns < end, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
        NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT,
    )  # fmt: skip
    out_ptrs = out_ptr + offset(slot, features) + columns
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=columns < features)


@triton.jit
def multiply_and_activate(
    x_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr, token, slot, expert, first, features,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[slot] = activation(weight[expert] @ x[token]), BLOCK_N output columns from `first` on.

    A program reads the gate and up rows of these as one block, so that all loads go out together.
    """
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    column, weight_row = weight_rows(first, features, BLOCK_N, GATED, INTERLEAVED, up_ptr is not None)
    inside = column < features
    x_row_ptr = x_ptr + offset(token, x_stride_m)
    row_offsets = offset(expert, weight_stride_e) + offset(weight_row, weight_stride_n)
    row_ptr = of_either(weight_ptr, up_ptr, ROWS) + row_offsets
    inner = tl.arange(0, BLOCK_K)
    bias = bias_of(bias_ptr, up_bias_ptr, expert, weight_row, inside, bias_stride_e, bias_stride_n, ROWS, ACC)
    if BLOCK_K >= DEPTH:
        mask = inside[:, None] & (inner < DEPTH)[None, :]
        weight_ptrs = row_ptr[:, None] + offset(inner, weight_stride_k)[None, :]
        weight = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row_ptr + offset(inner, x_stride_k), mask=inner < DEPTH, other=0.0)
        value = tl.sum(weight.to(ACC) * x.to(ACC)[None, :], 1) + bias
    else:
        sums = tl.zeros((ROWS, BLOCK_K), ACC)
        for k in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            mask = inside[:, None] & (inner < DEPTH - k)[None, :]
            weight_ptrs = row_ptr[:, None] + offset(k + inner, weight_stride_k)[None, :]
            weight = tl.load(weight_ptrs, mask=mask, other=0.0)
            x = tl.load(x_row_ptr + offset(k + inner, x_stride_k), mask=inner < DEPTH - k, other=0.0)
            sums += weight.to(ACC) * x.to(ACC)[None, :]
        value = tl.sum(sums, 1) + bias
    activate_and_store(
        value, out_ptr, slot, expert, first, features, features, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
        NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, BLOCK_N,
    )  # fmt: skip


@triton.jit
def multiply_shared(
    program, programs, x_ptr, weight_ptr, up_ptr, out_ptr, features, x_stride_m, x_stride_k, stride_n, stride_k,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[token] = activation(weight @ x[token]), of one of so many programs, in which tokens take turns."""
    token, first = slot_and_column(program, programs, features, BLOCK_N, True)
    multiply_and_activate(
        x_ptr, weight_ptr, up_ptr, None, None, out_ptr, token, token, 0, first, features,
        x_stride_m, x_stride_k, 0, stride_n, stride_k, 0, 0, None, None, None, None,
        NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, F64, DEPTH, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip


@triton.jit
def gemv_activation_kernel(
    x_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr, ids_ptr, map_ptr, out_ptr,
    shared_w13_ptr, shared_up_ptr, shared_out_ptr,
    top_k, num_tokens, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n, shared_features, shared_stride_n, shared_stride_k,
    operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TAKE_TURNS: tl.constexpr,
):  # fmt: skip
    """out[slot] = activation(weight[expert of slot] @ x[slot // top_k]); a dropped slot writes nothing.

    And the same of a shared expert, if there is one, of every token: its programs are the last ones.
    """
    program, beside = tl.program_id(0), num_tokens * tl.cdiv(shared_features, BLOCK_N)
    programs = tl.num_programs(0) - beside
    slot, first = slot_and_column(program, programs, features, BLOCK_N, TAKE_TURNS)
    is_routed = program < programs
    expert = local_expert(
        ids_ptr, map_ptr, slot, is_routed, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    if shared_w13_ptr is not None:
        if not is_routed:
            multiply_shared(
                program - programs, beside, x_ptr, shared_w13_ptr, shared_up_ptr, shared_out_ptr, shared_features,
                x_stride_m, x_stride_k, shared_stride_n, shared_stride_k,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, F64, DEPTH, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    if expert < num_experts:
        multiply_and_activate(
            x_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr, slot // top_k, slot, expert, first, features,
            x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
            bias_stride_e, bias_stride_n, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, F64, DEPTH, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@triton.jit
def _add_products(
    sums, weight_row_ptr, x_row_ptr, start, weight_stride_k, live, DEPTH: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """sums [rows, BLOCK_K] and the products of a step that begins at `start`, which may be WHOLE."""
    inner = start + tl.arange(0, sums.shape[1])[None, :]
    mask = live[:, None] if WHOLE else live[:, None] & (inner < DEPTH)
    weight_ptrs = weight_row_ptr[:, None] + offset(inner, weight_stride_k)
    weight = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    x = tl.load(x_row_ptr[:, None] + inner, mask=mask, other=0.0)
    return sums + weight.to(sums.dtype) * x.to(sums.dtype)


@triton.jit
def _shared_products(
    x_row_ptr, weight_ptr, columns, inside, stride_n, stride_k,
    ACC: tl.constexpr, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[columns, BLOCK_K], to be added up: the products of the shared expert's weight and one row x."""
    row_ptr = weight_ptr + offset(columns, stride_n)
    x_row_ptrs = x_row_ptr + tl.zeros(columns.shape, tl.int64)
    sums = tl.zeros((columns.shape[0], BLOCK_K), ACC)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        sums = _add_products(
            sums, row_ptr, x_row_ptrs, start, stride_k, inside, DEPTH, start + BLOCK_K <= DEPTH
        )
    return sums


@triton.jit
def _shared_output(
    products, weights_ptr, gate_ptr, token, weights_stride_t, gate_stride_t, DTYPE: tl.constexpr
):
    """What `products` come to, rounded as if it lay in memory, times the token's weight and the sigmoid of its gate."""
    output = tl.sum(products, 1).to(DTYPE).to(products.dtype)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + offset(token, weights_stride_t)).to(products.dtype)
        output = (output * weight).to(DTYPE).to(products.dtype)
    if gate_ptr is not None:
        output *= tl.sigmoid(tl.load(gate_ptr + offset(token, gate_stride_t)).to(products.dtype))
    return output


@triton.jit
def gemv_combine_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, map_ptr, weights_ptr,
    shared_ptr, shared_gate_ptr, residual_ptr, shared_x_ptr, shared_w2_ptr, shared_weights_ptr, out_ptr,
    num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, route_stride_t, route_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n,
    shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h,
    shared_stride_n, shared_stride_k, shared_weights_stride_t,
    TOP_K: tl.constexpr, F64: tl.constexpr, DEPTH: tl.constexpr,
    ROUTES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TAKE_TURNS: tl.constexpr, SHARED_DEPTH: tl.constexpr, SHARED_BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of topk_weights[t, k] * (weight[expert] @ x[t * TOP_K + k] + bias[expert]) + shared[t].

    What is shared lies in memory, or is the product of a shared expert's weight and shared_x[t].

    A program multiplies BLOCK_N output columns of every route of its token: step by step where their weights are too
    many (STAGES of them in flight), else all steps at once.
    """
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    token, first = slot_and_column(tl.program_id(0), tl.num_programs(0), features, BLOCK_N, TAKE_TURNS)
    rows = tl.arange(0, ROUTES * BLOCK_N)
    route, column = rows // BLOCK_N, first + rows % BLOCK_N
    slot = token * TOP_K + route
    live = (route < TOP_K) & (column < features)
    expert = local_expert(
        ids_ptr, map_ptr, slot, live, TOP_K, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    live = live & (expert < num_experts)
    expert = tl.where(live, expert, 0)
    # The small loads go first: behind the reduction they would wait for it.
    route_ptr = weights_ptr + offset(token, route_stride_t) + offset(route, route_stride_k)
    route_weight = tl.load(route_ptr, mask=live, other=0.0).to(ACC)
    bias = tl.zeros((ROUTES * BLOCK_N,), ACC)
    if bias_ptr is not None:
        bias_offsets = offset(expert, bias_stride_e) + offset(column, bias_stride_n)
        bias = tl.load(bias_ptr + bias_offsets, mask=live, other=0.0).to(ACC)
    columns = first + tl.arange(0, BLOCK_N)
    beside = joined(
        shared_ptr, shared_gate_ptr, residual_ptr, token, columns, columns < features,
        shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h, ACC,
    )  # fmt: skip
    if shared_w2_ptr is not None:  # added up below: a sum over lanes would keep the loads of routes waiting
        alone = _shared_products(
            shared_x_ptr + offset(token, SHARED_DEPTH), shared_w2_ptr, columns, columns < features,
            shared_stride_n, shared_stride_k, ACC, SHARED_DEPTH, SHARED_BLOCK_K,
        )  # fmt: skip
    row_ptr = weight_ptr + offset(expert, weight_stride_e) + offset(column, weight_stride_n)
    x_row_ptr = x_ptr + offset(slot, DEPTH)
    sums = tl.zeros((ROUTES * BLOCK_N, BLOCK_K), ACC)
    if STAGES > 1:
        for start in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            sums = _add_products(sums, row_ptr, x_row_ptr, start, weight_stride_k, live, DEPTH, False)
    else:
        for start in tl.static_range(0, DEPTH, BLOCK_K):
            sums = _add_products(
                sums, row_ptr, x_row_ptr, start, weight_stride_k, live, DEPTH, start + BLOCK_K <= DEPTH
            )  # fmt: skip
    value = tl.where(live, (tl.sum(sums, 1) + bias) * route_weight, 0.0)
    if shared_w2_ptr is not None:
        beside += _shared_output(
            alone, shared_weights_ptr, shared_gate_ptr, token, shared_weights_stride_t, gate_stride_t,
            out_ptr.dtype.element_ty,
        )  # fmt: skip
    total = tl.sum(tl.reshape(value, (ROUTES, BLOCK_N)), 0) + beside
    out_row_ptr = out_ptr + token.to(tl.int64) * features
    tl.store(out_row_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < features)
