"""How a context axis is used: which method, and how many ranks exchange heads. Pure values, known before any rank runs.

Ulysses moves least and keeps every kernel whole, but only as many ranks as there are key-value heads on one node profit
from it; a ring does not care about heads and hides its messages. So heads are exchanged within a node, and a ring runs
between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import gcd
from typing import Literal, NamedTuple

from freight.errors import ConfigError
from freight.ops.layout import LayoutKind, SequenceLayout


class ContextMethod(StrEnum):
    """Methods of `parallel.context_method`, `auto` resolved."""

    RING = "ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"


class ContextChoice(NamedTuple):
    """How the context axis is used.

    Args:
        method: What it is called.
        ulysses: Neighbouring ranks that exchange heads: all of them in `ulysses`, 1 in `ring` and `all_gather`.
        reason: One sentence on why.
        contiguous: Ranks hold one piece each rather than an early and a late one: right where windows make work even.
    """

    method: ContextMethod
    ulysses: int
    reason: str
    contiguous: bool = False

    def layout(self, tokens: int, ranks: int, cu_seqlens: Sequence[int] | None = None) -> SequenceLayout:
        """How a stream that is not streamed in chunks is dealt out.

        Args:
            tokens: Of the stream.
            ranks: Of the context axis.
            cu_seqlens: Start of each segment, then `tokens`; None = one segment.
        """
        # Work is even by heads where all ranks exchange them.
        contiguous = self.contiguous or self.ulysses == ranks
        kind = LayoutKind.CONTIGUOUS if contiguous else LayoutKind.ZIGZAG_DOCUMENT
        return SequenceLayout(kind, tokens, ranks, cu_seqlens, row=self.ulysses)


Requested = Literal["auto", "ring", "all_gather", "ulysses", "hybrid"]


def choose_context_method(
    requested: Requested,
    *,
    ranks: int,
    heads: int,
    groups: int,
    ranks_per_node: int,
    windows: Sequence[int | None],
    local_tokens: int,
    ulysses: int | None = None,
    streamed: bool = False,
    causal: bool = True,
) -> ContextChoice:
    """Method and ranks in a row.

    `auto` takes `ulysses = gcd(groups, ranks per node, ranks)` and `ring = ranks / ulysses`; all-gather where every
    layer's window fits into a rank's tokens. Streamed runs take no ring: Ulysses while there are heads enough, else the
    hybrid with `gcd(heads, ranks)`.

    Args:
        requested: `parallel.context_method`.
        ranks: `parallel.context`.
        heads: Query heads of a tensor-parallel rank.
        groups: Key-value heads of it.
        ranks_per_node: Context ranks that share a node.
        windows: Sliding window of every layer; None = full attention.
        local_tokens: Tokens of a rank.
        ulysses: `parallel.ulysses`; None = decided here.
        streamed: `fpdt` is set.
        causal: Tokens see only what came before.

    Raises:
        ConfigError: What was asked for is impossible or contradicts itself.
    """
    if ulysses is not None:
        _check_degree(requested, ranks, heads, ulysses)
    if requested == "ring" and streamed:
        raise ConfigError(
            "`parallel.context_method: ring` cannot run under `fpdt`: K, V would circle once per chunk. "
            "Use `ulysses`, `all_gather` or `auto`."
        )
    if requested == "ulysses" and ranks > heads:
        fitting = max(n for n in range(1, heads + 1) if ranks % n == 0)
        raise ConfigError(
            f"`parallel.context` {ranks} with `context_method: ulysses` needs at least {ranks} query heads per "
            f"tensor-parallel rank; there are {heads}. Use `context_method: hybrid`, or `parallel.context` {fitting}."
        )
    windowed = bool(windows) and all(window is not None and window <= local_tokens for window in windows)
    contiguous = windowed or not causal
    if requested == "ring":
        return ContextChoice(ContextMethod.RING, 1, "as asked", contiguous)
    if requested == "all_gather":
        return ContextChoice(ContextMethod.ALL_GATHER, 1, "as asked", contiguous)
    if requested == "ulysses":
        return ContextChoice(ContextMethod.ULYSSES, ranks, "as asked")
    if requested == "auto" and ulysses is None and windowed and not streamed:
        widest = max(window for window in windows if window is not None)
        return ContextChoice(
            ContextMethod.ALL_GATHER,
            1,
            f"every layer's window ({widest} at most) fits into a rank's {local_tokens} tokens",
            contiguous=True,
        )
    return _split(requested, ranks, heads, groups, ranks_per_node, ulysses, streamed, contiguous)


def _split(
    requested: Requested,
    ranks: int,
    heads: int,
    groups: int,
    ranks_per_node: int,
    ulysses: int | None,
    streamed: bool,
    contiguous: bool,
) -> ContextChoice:
    """Heads within rows, a ring between rows; either may take all ranks."""
    if ulysses is not None:
        row, reason = ulysses, f"`parallel.ulysses` is {ulysses}"
    elif streamed and requested == "auto" and ranks <= heads:
        row, reason = ranks, f"a streamed run exchanges heads: {heads} are enough for {ranks} ranks"
    elif streamed:
        row = gcd(heads, ranks)
        reason = f"a streamed run exchanges heads: the common divisor of {heads} heads and {ranks} ranks is {row}"
    else:
        row = gcd(groups, ranks_per_node, ranks)
        shared = f"{groups} key-value heads, {ranks_per_node} ranks per node and {ranks} ranks"
        reason = f"{row} is the common divisor of {shared}"
    if row == ranks:
        return ContextChoice(ContextMethod.ULYSSES, ranks, reason)
    if row == 1 and not streamed:
        return ContextChoice(ContextMethod.RING, 1, reason, contiguous)
    if row == 1:
        return ContextChoice(ContextMethod.ALL_GATHER, 1, reason, contiguous)
    return ContextChoice(ContextMethod.HYBRID, row, reason, contiguous)


def _check_degree(requested: Requested, ranks: int, heads: int, ulysses: int) -> None:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if requested not in ("auto", "hybrid"):
        raise ConfigError(
            f"`parallel.ulysses` is {ulysses} but `parallel.context_method` is {requested}, so it has no effect. "
            "Remove it or use `hybrid`."
        )
    if ulysses not in divisors:
        raise ConfigError(
            f"`parallel.ulysses` must divide `parallel.context`; {ulysses} and {ranks}. Use {_either(divisors)}."
        )
    if ulysses > heads:
        fitting = [n for n in divisors if n <= heads]
        raise ConfigError(
            f"`parallel.ulysses` {ulysses} needs at least {ulysses} query heads per tensor-parallel rank; there are "
            f"{heads}. Use {_either(fitting)}."
        )


def _either(numbers: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
