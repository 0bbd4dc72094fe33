"""One block on one batch, chunk by chunk: what its forward leaves for its backward, and what both need to know.

All arithmetic of the block is its own `pre` and `post`, differentiated range by range; attention is a row of the
stream's at a time. Nothing here is an autograd graph: that is one node around it. The two passes are in
`block_forward.py` and `block_backward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from freight.errors import ConfigError
from freight.memory.gradient_sums import AutocastState
from freight.memory.key_values import KeyValues, ResidentKeyValues, StoredKeyValues
from freight.memory.stream import Stream, chunk_ranges
from freight.ops.attention import LocalAttention
from freight.ops.attention_plan import Range
from freight.ops.attention_rows import Row, RowAttention
from freight.ops.batch import BlockRecord, TokenBatch, TokenRange
from freight.ops.protocols import HeadTransport, Key, RunnableBlock, TensorStore


@dataclass(frozen=True)
class StreamSetting:
    """What all blocks of a runner share.

    Args:
        stream: Chunk sizes, and what is kept where.
        store: Keeps what backward needs.
        attention: Chooses kernels.
        transport: Exchanges heads with ranks that share the tokens.
        owners: Numbers that no two runs of blocks share.
    """

    stream: Stream
    store: TensorStore
    attention: LocalAttention
    transport: HeadTransport
    owners: Iterator[int]


class BlockStream:
    """One run of one block on one batch: what its forward leaves for its backward.

    Args:
        setting: Of the runner.
        block: To run.
        batch: Where documents lie.
    """

    def __init__(self, setting: StreamSetting, block: RunnableBlock, batch: TokenBatch) -> None:
        self.stream, self.store, self.transport = setting.stream, setting.store, setting.transport
        self.block, self.batch = block, batch
        self.owner = next(setting.owners)
        self.chunks = chunk_ranges(batch.stream_tokens, self.stream.chunk_tokens)
        spec = block.attention_spec
        if not spec.causal:
            raise ConfigError(
                "`fpdt` needs causal attention; `model.causal` is false. "
                "Remove `fpdt`, or use `parallel.context` with recompute."
            )
        self.record = BlockRecord()
        self.attention = RowAttention(
            setting.attention, batch, spec, self.chunks, self.transport.first_head, self.transport.pieces
        )
        self.overlap = self.stream.overlap and self.transport.size > 1  # one rank waits for nobody
        self.rows: tuple[Row, ...] = ()  # of backward
        self.lent = False  # whether input and output are the store's
        # Where it computes; hidden states may lie on a tier.
        self.autocast = AutocastState(next(block.parameters()).device.type)

    def __del__(self) -> None:
        """What no backward came for is freed with the graph."""
        self.free(*range(len(self.chunks)))

    def trained(self) -> list[nn.Parameter]:
        """The block's parameters that get a gradient, as they are now (gathered, say)."""
        return [parameter for parameter in self.block.parameters() if parameter.requires_grad]

    def keep(self, hidden: Tensor) -> Tensor:
        """Where backward will find the input: where it is, or in a lent tensor that forward fills."""
        if self.store.on_device or self.store.holds(hidden):
            return hidden
        return self.store.lend("hidden", hidden, hidden.shape[0])

    def rows_like(self, like: Tensor, rows: int) -> Tensor:
        """`[rows, hidden]` for hidden states or their gradients, where those of this run are."""
        return self.store.lend("hidden", like, rows) if self.lent else like.new_empty((rows, *like.shape[1:]))

    def key_values(self, rows: Sequence[Row], *, offload: bool, backward: bool) -> KeyValues:
        """A place for the keys and values of rows that go by."""
        if not offload:
            return ResidentKeyValues(rows, backward=backward)
        keep = self.stream.save_attention == "all"
        return StoredKeyValues(rows, self.store, self.owner, backward=backward, keep=keep)

    def local(self, i: int) -> Range:
        """Where a chunk's tokens are on this rank."""
        start, stop = self.chunks[i]
        return start // self.transport.size, stop // self.transport.size

    def ranges(self, tokens: int) -> Sequence[Range]:
        """Parts of a chunk that go through `post` together."""
        size = self.stream.ffn_chunk_tokens
        return chunk_ranges(tokens, tokens if size is None else size // self.transport.size)

    def tokens(self, start: int, stop: int) -> TokenRange:
        """Some of this rank's tokens."""
        return self.batch.range(start, stop, self.record)

    def key(self, name: str, i: int) -> Key:
        """What the store knows a tensor of a chunk by."""
        return Key(name, self.owner, i)

    def fetch(self, rows: Tensor, i: int) -> None:
        """Have a chunk of hidden states or their gradients come; nothing if there is none or it is here."""
        if 0 <= i < len(self.chunks) and self.store.holds(rows):
            a, b = self.local(i)
            self.store.fetch(rows[a:b])

    def free(self, *chunks: int) -> None:
        """Forget what the store has of chunks."""
        for i in chunks:
            for name in ("context", "lse", "k", "v", "dk", "dv"):
                self.store.free(self.key(name, i))
