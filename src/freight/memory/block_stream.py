"""One block on one batch, chunk by chunk: what its forward leaves for its backward, and how the two go.

All arithmetic of the block is its own `pre` and `post`, differentiated range by range; attention is a row of the
stream's at a time. Nothing here is an autograd graph: that is one node around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freight.errors import ConfigError
from freight.memory.gradient_sums import AutocastState, GradientSums
from freight.memory.key_values import KeyValues, ResidentKeyValues, StoredKeyValues, zeros_for_gradient
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
        device_type: Where it computes.
    """

    def __init__(self, setting: StreamSetting, block: RunnableBlock, batch: TokenBatch, device_type: str) -> None:
        self.stream, self.store, self.transport = setting.stream, setting.store, setting.transport
        self.block, self.batch = block, batch
        spec = block.attention_spec
        if not spec.causal:
            raise ConfigError(
                "`fpdt` needs causal attention; `model.causal` is false. "
                "Remove `fpdt`, or use `parallel.context` with recompute."
            )
        self.owner = next(setting.owners)
        self.record = BlockRecord()
        self.chunks = chunk_ranges(batch.stream_tokens, self.stream.chunk_tokens)
        self.attention = RowAttention(
            setting.attention, batch, spec, self.chunks, self.transport.first_head, self.transport.pieces
        )
        self.rows: tuple[Row, ...] = ()  # of backward
        self.lent = False  # whether input and output are the store's
        self.autocast = AutocastState(device_type)

    def __del__(self) -> None:
        """What no backward came for is freed with the graph."""
        self._free(*range(len(self.chunks)))

    def trained(self) -> list[nn.Parameter]:
        """The block's parameters that get a gradient, as they are now (gathered, say)."""
        return [parameter for parameter in self.block.parameters() if parameter.requires_grad]

    def keep(self, hidden: Tensor) -> Tensor:
        """Where backward will find the input: where it is, or in a lent tensor that forward fills."""
        if self.store.on_device or self.store.holds(hidden):
            return hidden
        return self.store.lend("hidden", hidden, hidden.shape[0])

    def forward(self, hidden: Tensor, kept: Tensor | None) -> Tensor:
        """The block's output `[tokens, hidden]`; lent if the input was.

        Args:
            hidden: The input.
            kept: Of `keep`; None keeps nothing for a backward.
        """
        self.lent = kept is not None and self.store.holds(hidden)
        output: Tensor | None = None
        keys: KeyValues | None = None
        rows: tuple[Row, ...] = ()
        with self.autocast.again():
            for i in range(len(self.chunks)):
                a, b = self._local(i)
                x = self.store.read(hidden[a:b])
                if i + 1 < len(self.chunks):
                    self._fetch(hidden, i + 1)
                q, k, v = self.transport.scatter_heads(*self.block.pre(x, self._tokens(a, b)), kv=2)
                if keys is None:
                    offload = kept is not None and self.stream.kv == "offload"
                    rows = self.attention.rows(q, k, by_block=offload)
                    # In backward by block even where all keys lie together: a kernel returns dk and dv of all its keys.
                    self.rows = self.attention.rows(q, k, by_block=True) if kept is not None else rows
                    keys = self._key_values(rows, offload=offload, backward=False)
                keys.add(i, k, v)
                out, lse = self.attention.forward(rows[i], q, keys.parts(rows[i]))
                keys.end_row(rows[i])
                (context,) = self.transport.gather_heads(out)
                y = self._post(i, x, context)
                if output is None:
                    output = self._rows_like(y, hidden.shape[0], lent=self.lent)
                self.store.write(output[a:b], y)
                if kept is not None:
                    self._save(i, context, lse, k, v)
                    if kept is not hidden:
                        self.store.write(kept[a:b], x)
        assert output is not None
        if self.lent:
            self.store.settle()
        return output

    def backward(
        self, hidden: Tensor, d_output: Tensor, *, needs_hidden: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input, if asked for, and of `trained()`."""
        if self.record.replay:
            raise RuntimeError("backward ran through a streamed block a second time; what it needs went with the first")
        self.record.replay = True
        sums = GradientSums(self.trained())
        d_hidden: Tensor | None = None
        keys = self._key_values(self.rows, offload=self.stream.kv == "offload", backward=True)
        with self.autocast.again(), torch.enable_grad():
            for i in reversed(range(len(self.chunks))):
                a, b = self._local(i)
                x = self.store.read(hidden[a:b]).detach().requires_grad_(needs_hidden)
                dy = self.store.read(d_output[a:b])
                self._prefetch(i - 1, hidden, d_output)
                dx = self._chunk_backward(i, x, dy, keys, sums, hidden)
                if dx is not None:
                    if d_hidden is None:
                        d_hidden = self._gradient_rows(dx, d_output)
                    self.store.write(d_hidden[a:b], dx)
                keys.end_row(self.rows[i])
                self._free(i)
        self.store.settle()
        return d_hidden, sums.rounded()

    def _rows_like(self, like: Tensor, rows: int, *, lent: bool) -> Tensor:
        return self.store.lend("hidden", like, rows) if lent else like.new_empty((rows, *like.shape[1:]))

    def _gradient_rows(self, dx: Tensor, d_output: Tensor) -> Tensor:
        """Where the input's gradient goes: over the output's, as that is used up, if both belong in the store."""
        if self.lent and self.store.holds(d_output) and dx.dtype == d_output.dtype:
            return d_output
        return self._rows_like(dx, d_output.shape[0], lent=self.lent)

    def _chunk_backward(
        self, i: int, x: Tensor, dy: Tensor, keys: KeyValues, sums: GradientSums, hidden: Tensor
    ) -> Tensor | None:
        """The gradient of one chunk's input, if it needs one; adds those of the weights."""
        context = lse = None
        dx = d_context = None
        if self.stream.save_attention != "none":
            context, lse = (self.store.get(Key(name, self.owner, i)) for name in ("context", "lse"))
            dx, d_context = self._post_backward(i, x, context, dy, sums)
        q, k, v = self.block.pre(x, self._tokens(*self._local(i)))
        q_row, k_row, v_row = self.transport.scatter_heads(*(t.detach() for t in (q, k, v)), kv=2)
        self._provide(i, keys, (k_row, v_row), hidden)
        if context is None:
            with torch.no_grad():
                out, lse = self.attention.forward(self.rows[i], q_row, keys.parts(self.rows[i]))
            (context,) = self.transport.gather_heads(out)
            dx, d_context = self._post_backward(i, x, context, dy, sums)
        assert d_context is not None and lse is not None
        outputs = [t for t in (q, k, v) if t.requires_grad]
        if not outputs:
            return dx
        with torch.no_grad():
            dout, out = self.transport.scatter_heads(d_context, context)
            grads = self._row_backward(i, dout, (q_row, k_row, v_row), out, lse, keys)
        grads = [g.to(t.dtype) for t, g in zip((q, k, v), grads, strict=True) if t.requires_grad]
        d_pre = sums.add(outputs, grads, [x])
        return d_pre[0] if dx is None else dx + d_pre[0] if d_pre[0] is not None else dx

    def _post(self, i: int, x: Tensor, context: Tensor) -> Tensor:
        """The output of one chunk."""
        start, _ = self._local(i)
        ranges = self._ranges(x.shape[0])
        parts = (self.block.post(x[a:b], context[a:b], self._tokens(start + a, start + b)) for a, b in ranges)
        if len(ranges) == 1:
            return next(parts)
        output: Tensor | None = None
        for (a, b), part in zip(ranges, parts, strict=True):
            output = part.new_empty(x.shape) if output is None else output
            output[a:b] = part
        assert output is not None
        return output

    def _post_backward(
        self, i: int, x: Tensor, context: Tensor, dy: Tensor, sums: GradientSums
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of `post` at its two inputs."""
        start, _ = self._local(i)
        dx = torch.empty_like(x) if x.requires_grad else None
        d_context = torch.empty_like(context)
        for a, b in self._ranges(x.shape[0]):
            part, attended = x[a:b].detach().requires_grad_(x.requires_grad), context[a:b].detach().requires_grad_()
            y = self.block.post(part, attended, self._tokens(start + a, start + b))
            of_part, of_context = sums.add([y], [dy[a:b]], [part, attended])
            assert of_context is not None
            d_context[a:b] = of_context
            if dx is not None and of_part is not None:
                dx[a:b] = of_part
        return dx, d_context

    def _row_backward(
        self, i: int, dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, keys: KeyValues
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv of a chunk; the latter two have been summed over all rows that see it."""
        row, (q, *own) = self.rows[i], qkv
        dq = zeros_for_gradient(q)
        for part, k, v in keys.parts(row):
            dk, dv = keys.open_gradients(part)
            self.attention.backward(row, part, dout, q, k, v, out, lse, (dq, dk, dv))
            keys.close_gradients(part, (dk, dv))
        return self.transport.gather_heads(dq, *keys.gradients(i, (own[0], own[1])), kv=2)

    def _provide(self, i: int, keys: KeyValues, own: tuple[Tensor, Tensor], hidden: Tensor) -> None:
        """Have keys and values of all chunks that row i sees, computing or fetching those that are missing."""
        first = self.rows[i].keys[0]
        for j in range(i, -1, -1):
            if self.chunks[j][0] < first:
                break
            if not keys.has(j):
                keys.add(j, *(own if i == j else self._keys_of(j, hidden)))

    @torch.no_grad()
    def _keys_of(self, j: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.stream.save_attention == "all":
            return self.store.get(Key("k", self.owner, j)), self.store.get(Key("v", self.owner, j))
        a, b = self._local(j)
        x = self.store.read(hidden[a:b])
        if j:
            self._fetch(hidden, j - 1)
        _, k, v = self.block.pre(x, self._tokens(a, b))
        k, v = self.transport.scatter_heads(k, v, kv=2)
        return k, v

    def _key_values(self, rows: Sequence[Row], *, offload: bool, backward: bool) -> KeyValues:
        if not offload:
            return ResidentKeyValues(rows, backward=backward)
        keep = self.stream.save_attention == "all"
        return StoredKeyValues(rows, self.store, self.owner, backward=backward, keep=keep)

    def _save(self, i: int, context: Tensor, lse: Tensor, k: Tensor, v: Tensor) -> None:
        kept = {} if self.stream.save_attention == "none" else {"context": context, "lse": lse}
        if self.stream.save_attention == "all" and self.stream.kv == "device":
            kept |= {"k": k, "v": v}
        for name, tensor in kept.items():
            self.store.put(Key(name, self.owner, i), tensor)

    def _prefetch(self, i: int, hidden: Tensor, d_output: Tensor) -> None:
        """Have what the next chunk of backward needs come."""
        if i < 0:
            return
        self._fetch(hidden, i)
        self._fetch(d_output, i)
        if self.stream.save_attention != "none":
            for name in ("context", "lse"):
                self.store.prefetch(Key(name, self.owner, i))

    def _fetch(self, rows: Tensor, i: int) -> None:
        if self.store.holds(rows):
            a, b = self._local(i)
            self.store.fetch(rows[a:b])

    def _free(self, *chunks: int) -> None:
        for i in chunks:
            for name in ("context", "lse", "k", "v", "dk", "dv"):
                self.store.free(Key(name, self.owner, i))

    def _local(self, i: int) -> Range:
        """Where a chunk's tokens are on this rank."""
        start, stop = self.chunks[i]
        return start // self.transport.size, stop // self.transport.size

    def _ranges(self, tokens: int) -> Sequence[Range]:
        """Parts of a chunk that go through `post` together."""
        size = self.stream.ffn_chunk_tokens
        return chunk_ranges(tokens, tokens if size is None else size // self.transport.size)

    def _tokens(self, start: int, stop: int) -> TokenRange:
        return self.batch.range(start, stop, self.record)
