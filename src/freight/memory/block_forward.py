"""The forward of a streamed block: `pre`, a row of attention and `post` of each chunk, ascending."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from freight.memory.block_stream import BlockStream
from freight.memory.key_values import KeyValues
from freight.memory.staggered import staggered
from freight.ops.attention_rows import Row


class ForwardPass:
    """A block's forward on one batch.

    Args:
        layer: The run, where what backward needs goes.
        hidden: The input `[tokens, hidden]`.
        kept: Of `BlockStream.keep`; None keeps nothing for a backward.
    """

    def __init__(self, layer: BlockStream, hidden: Tensor, kept: Tensor | None) -> None:
        self._layer, self._hidden, self._kept = layer, hidden, kept
        self._output: Tensor | None = None
        self._keys: KeyValues | None = None
        self._rows: tuple[Row, ...] = ()
        layer.lent = kept is not None and layer.store.holds(hidden)

    def run(self) -> Tensor:
        """The block's output `[tokens, hidden]`; lent if the input was."""
        layer = self._layer
        with layer.autocast.again():
            staggered((self._chunk(i) for i in range(len(layer.chunks))), overlap=layer.overlap)
        assert self._output is not None
        if layer.lent:
            layer.store.settle()
        return self._output

    def _chunk(self, i: int) -> Iterator[None]:
        """All of one chunk; yields while heads travel."""
        layer = self._layer
        a, b = layer.local(i)
        x = layer.store.read(self._hidden[a:b])
        layer.fetch(self._hidden, i + 1)
        arriving = layer.transport.start_scatter_heads(*layer.block.pre(x, layer.tokens(a, b)), kv=2)
        yield
        q, k, v = arriving.wait()
        keys = self._keys = self._keys or self._open(q, k)
        keys.add(i, k, v)
        out, lse = layer.attention.forward(self._rows[i], q, keys.parts(self._rows[i]))
        keys.end_row(self._rows[i])
        going = layer.transport.start_gather_heads(out)
        self._save_keys(i, k, v)
        del arriving, q, k, v, out
        yield
        (context,) = going.wait()
        y = self._post(i, x, context)
        if self._output is None:
            self._output = layer.rows_like(y, self._hidden.shape[0])
        layer.store.write(self._output[a:b], y)
        self._save_context(i, context, lse)
        if self._kept is not None and self._kept is not self._hidden:
            layer.store.write(self._kept[a:b], x)

    def _open(self, q: Tensor, k: Tensor) -> KeyValues:
        """A place for keys and values, when the first ones are there."""
        layer, backward = self._layer, self._kept is not None
        offload = backward and layer.stream.kv == "offload"
        self._rows = layer.attention.rows(q, k, by_block=offload)
        # In backward by block even where all keys lie together: a kernel returns dk and dv of all its keys.
        layer.rows = layer.attention.rows(q, k, by_block=True) if backward else self._rows
        return layer.key_values(self._rows, offload=offload, backward=False)

    def _post(self, i: int, x: Tensor, context: Tensor) -> Tensor:
        """The output of one chunk."""
        layer = self._layer
        start, _ = layer.local(i)
        ranges = layer.ranges(x.shape[0])
        parts = (layer.block.post(x[a:b], context[a:b], layer.tokens(start + a, start + b)) for a, b in ranges)
        if len(ranges) == 1:
            return next(parts)
        output: Tensor | None = None
        for (a, b), part in zip(ranges, parts, strict=True):
            output = part.new_empty(x.shape) if output is None else output
            output[a:b] = part
        assert output is not None
        return output

    def _save_keys(self, i: int, k: Tensor, v: Tensor) -> None:
        """For backward, unless `StoredKeyValues` leaves them in the store."""
        layer = self._layer
        if self._kept is not None and layer.stream.save_attention == "all" and layer.stream.kv == "device":
            # Made of one message with the queries, which would be kept with them.
            layer.store.put(layer.key("k", i), k.contiguous())
            layer.store.put(layer.key("v", i), v.contiguous())

    def _save_context(self, i: int, context: Tensor, lse: Tensor) -> None:
        layer = self._layer
        if self._kept is not None and layer.stream.save_attention != "none":
            layer.store.put(layer.key("context", i), context)
            layer.store.put(layer.key("lse", i), lse)
