# mypy: ignore-errors
# A kernel is no Python: its arguments become pointers and registers, and triton has no types for them.
"""Triton kernels of paged attention: any page size, because the page of every key is looked up by itself.

Online softmax in base 2 (arXiv:1805.02867, arXiv:2205.14135); decoding splits a long context over several programs and
merges their parts (Flash-Decoding). It must not know batches or models: pointers and strides in, rows out.
"""

import triton
import triton.language as tl


@triton.jit
def _scores(
    q,
    k,
    token,
    key,
    context_len,
    scale,
    softcap: tl.constexpr,
    window: tl.constexpr,
    causal: tl.constexpr,
):
    """Scores [M, N] of queries at positions `token` [M] for keys at positions `key` [N], -inf where none is seen."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if softcap > 0:
        # tanh, by a function that every target has.
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    seen = key[None, :] < context_len
    if causal:
        seen = seen & (key[None, :] <= token[:, None])
    if window > 0:
        seen = seen & (key[None, :] > token[:, None] - window)
        if not causal:
            seen = seen & (key[None, :] < token[:, None] + window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _absorb(scores, v, best, total, acc):
    """One more block of keys into the running maximum, sum and weighted values of every row."""
    log2e: tl.constexpr = 1.4426950408889634
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no maximum to subtract.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2((scores - shift[:, None]) * log2e)
    keep = tl.exp2((best - shift) * log2e)
    total = total * keep + tl.sum(weights, axis=1)
    acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def attend_ragged(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    scale,
    q_token,
    q_head,
    out_token,
    out_head,
    kv_token,
    kv_head,
    kv_page,
    table_row,
    block_size: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    paged: tl.constexpr,
    causal: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
):
    """Queries of any length. Program (sequence, tile, KV head): `tile_rows` rows of tokens x heads of one KV head."""
    seq, tile, kv_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - first
    context_len = tl.load(context_lens_ptr + seq)
    if tile * tile_rows < query_len * group:
        row = tile * tile_rows + tl.arange(0, tile_rows)
        place, head = row // group, kv_idx * group + row % group
        is_row = place < query_len
        token = context_len - query_len + place
        dim = tl.arange(0, padded_dim)
        is_dim = dim < head_dim
        q_at = (first + place).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dim[None, :]
        q = tl.load(q_ptr + q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

        best = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        acc = tl.zeros([tile_rows, padded_dim], tl.float32)
        low = 0
        high = context_len
        first_token = context_len - query_len + tile * tile_rows // group
        last_token = context_len - query_len + tl.minimum(query_len - 1, (tile * tile_rows + tile_rows - 1) // group)
        if causal:
            high = last_token + 1
        if window > 0:
            low = tl.maximum(0, first_token - window + 1) // tile_keys * tile_keys
            if not causal:
                high = tl.minimum(context_len, last_token + window)
        for start in range(low, high, tile_keys):
            key = start + tl.arange(0, tile_keys)
            is_key = key < high
            if paged:
                page = tl.load(tables_ptr + seq * table_row + key // block_size, mask=is_key, other=0)
                kv_at = page.to(tl.int64) * kv_page + (key % block_size) * kv_token + kv_idx * kv_head
            else:
                kv_at = (first + key).to(tl.int64) * kv_token + kv_idx * kv_head
            k = tl.load(k_ptr + kv_at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0).to(
                q.dtype
            )
            v = tl.load(v_ptr + kv_at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0).to(
                q.dtype
            )
            scores = _scores(q, k, token, key, context_len, scale, softcap, window, causal)
            best, total, acc = _absorb(scores, v, best, total, acc)
        # A dummy may see nothing; its row is zero.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = (first + place).to(tl.int64)[:, None] * out_token + head[:, None] * out_head + dim[None, :]
        tl.store(out_ptr + out_at, acc.to(q.dtype), mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def attend_decode(
    part_ptr,
    norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    context_lens_ptr,
    scale,
    q_token,
    q_head,
    kv_token,
    kv_head,
    kv_page,
    table_row,
    num_heads,
    block_size: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    num_splits: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
):
    """One query a sequence. Program (sequence, KV head, split): that split's part of the context.

    Parts are normalised; their log2 of the sum goes to `norm` [S, H, num_splits], -inf for a part without keys.
    """
    log2e: tl.constexpr = 1.4426950408889634
    seq, kv_idx, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + seq)
    row = tl.arange(0, tile_rows)
    is_row = row < group
    head = kv_idx * group + row
    dim = tl.arange(0, padded_dim)
    is_dim = dim < head_dim
    q_at = seq.to(tl.int64) * q_token + head[:, None] * q_head + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    low = 0
    if window > 0:
        low = tl.maximum(0, context_len - window) // tile_keys * tile_keys
    tiles = (context_len - low + tile_keys - 1) // tile_keys
    share = (tiles + num_splits - 1) // num_splits * tile_keys
    start_key = low + split * share
    end_key = tl.minimum(context_len, start_key + share)
    best = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    acc = tl.zeros([tile_rows, padded_dim], tl.float32)
    token = tl.zeros([tile_rows], tl.int32) + context_len - 1
    for start in range(start_key, end_key, tile_keys):
        key = start + tl.arange(0, tile_keys)
        is_key = key < end_key
        page = tl.load(tables_ptr + seq * table_row + key // block_size, mask=is_key, other=0)
        kv_at = page.to(tl.int64) * kv_page + (key % block_size) * kv_token + kv_idx * kv_head
        k = tl.load(k_ptr + kv_at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(v_ptr + kv_at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        scores = _scores(q, k.to(q.dtype), token, key, context_len, scale, softcap, window, True)
        best, total, acc = _absorb(scores, v.to(q.dtype), best, total, acc)
    has_keys = total > 0.0
    acc = acc / tl.where(has_keys, total, 1.0)[:, None]
    at = (seq * num_heads + head).to(tl.int64) * num_splits + split
    tl.store(part_ptr + at[:, None] * head_dim + dim[None, :], acc, mask=is_row[:, None] & is_dim[None, :])
    norm = tl.where(has_keys, best * log2e + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
    tl.store(norm_ptr + at, norm, mask=is_row)


@triton.jit
def merge_parts(
    out_ptr,
    part_ptr,
    norm_ptr,
    out_token,
    out_head,
    num_heads,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    num_splits: tl.constexpr,
    padded_splits: tl.constexpr,
):
    """Program (sequence, head): the parts of all splits, weighted by their sums."""
    seq, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, padded_splits)
    dim = tl.arange(0, padded_dim)
    is_split = split < num_splits
    at = (seq * num_heads + head).to(tl.int64) * num_splits + split
    norm = tl.load(norm_ptr + at, mask=is_split, other=float("-inf"))
    best = tl.max(norm, axis=0)
    weight = tl.exp2(norm - tl.where(best == float("-inf"), 0.0, best))
    mask = is_split[:, None] & (dim < head_dim)[None, :]
    part = tl.load(part_ptr + at[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, axis=0)
    row = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out_at = seq.to(tl.int64) * out_token + head * out_head + dim
    tl.store(out_ptr + out_at, row.to(out_ptr.dtype.element_ty), mask=dim < head_dim)
