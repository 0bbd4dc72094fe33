"""What a streamed run is told, and what one rank alone is: chunk sizes, and a transport that moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from freight.ops.attention_plan import Range
from freight.ops.protocols import Pending


@dataclass(frozen=True)
class Stream:
    """How a block is streamed.

    Args:
        chunk_tokens: Tokens of a chunk, over all ranks that share them.
        ffn_chunk_tokens: Tokens that go through `post` at one time, likewise; None = a whole chunk.
        kv: Where keys and values of the layer being run are: `device`, or `offload` to the store.
        save_attention: What backward finds beside the block's input: nothing (attention runs again), its `context` and
            log-sum-exp, or `all`: keys and values as well.
        overlap: Whether heads travel between ranks while neighbouring chunks compute, which has up to three chunks
            under way at one time; False waits for each exchange, and gives the same bits.
    """

    chunk_tokens: int
    ffn_chunk_tokens: int | None = None
    kv: Literal["device", "offload"] = "device"
    save_attention: Literal["none", "context", "all"] = "context"
    overlap: bool = True


class LocalTransport:
    """The transport of a rank that has all heads of all tokens; a `HeadTransport`."""

    size = 1
    first_head = 0

    def pieces(self, chunk: Range) -> Sequence[Range]:
        """All of it."""
        return (chunk,)

    def scatter_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """The tensors."""
        return tensors

    def gather_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """The tensors."""
        return tensors

    def start_scatter_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        """The tensors."""
        return _Here(tensors)

    def start_gather_heads(self, *tensors: Tensor, kv: int = 0) -> Pending:
        """The tensors."""
        return _Here(tensors)


@dataclass(frozen=True)
class _Here:
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.tensors


def chunk_ranges(tokens: int, size: int) -> list[Range]:
    """`[0, tokens)` in ranges of `size`, the last one shorter."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
