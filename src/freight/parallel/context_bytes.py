"""Bytes that context parallelism sends for one attention layer, in closed form.

Rows of U ranks exchange heads, keys pass between them. For t tokens of a rank with q query and k key-value heads of
each rank of a row (means over it), h hops of keys (ranks - 1, fewer where nobody needs them), e bytes per element, a of
a sum (float32; float64 for float64):

| | forward | backward |
|---|---|---|
| within a row | `t d e (U - 1) (2 q + 2 k)` | the same |
| between rows | `h U t d 2 k e` | `h U t d 2 k (e + a)` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from freight.ops.attention_math import working_dtype
from freight.parallel.context_method import ContextChoice
from freight.parallel.head_split import HeadSplit


class SentBytes(NamedTuple):
    """What a rank sends, mean over ranks."""

    forward: float
    backward: float


def sent_bytes(
    choice: ContextChoice,
    *,
    local_tokens: int,
    hops: Sequence[int],
    heads: int,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
) -> SentBytes:
    """Bytes of one layer and one microbatch.

    Args:
        choice: Method and ranks in a row.
        local_tokens: Of a rank, padding included.
        hops: Of each row, how many other rows its keys go to.
        heads: Query heads.
        groups: Key-value heads.
        head_dim: Of both.
        dtype: Of q, k and v.
    """
    row, split = choice.ulysses, HeadSplit(heads, groups, choice.ulysses)
    keys = sum(share.num_keys for share in split.shares) / row
    circling = sum(x.num_keys if split.runs(x) is None else x.num_queries for x in split.shares) / row
    element, of_sum = dtype.itemsize, working_dtype(dtype).itemsize
    within = (row - 1) * local_tokens * head_dim * element * 2 * (heads / row + keys)
    block = sum(hops) / len(hops) * row * local_tokens * head_dim * 2 * circling
    return SentBytes(within + block * element, within + block * (element + of_sum))
