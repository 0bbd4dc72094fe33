"""The backward of a streamed block: `post`, a row of attention and `pre` of each chunk, descending.

Descending, the gradients of a chunk's keys and values are final when its own row is done, so all of a chunk is
differentiated in one go. Keys and values themselves are made anew just before the first row that sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from freight.memory.block_stream import BlockStream
from freight.memory.gradient_sums import GradientSums
from freight.memory.key_values import zeros_for_gradient
from freight.memory.staggered import staggered
from freight.ops.protocols import Pending


class BackwardPass:
    """A block's backward on one batch.

    Args:
        layer: What its forward left.
        hidden: The input `[tokens, hidden]`, as `BlockStream.keep` gave it.
        d_output: Gradient of the output; its memory is used up if it was lent.
        needs_hidden: Whether the input's gradient is asked for.
    """

    def __init__(self, layer: BlockStream, hidden: Tensor, d_output: Tensor, *, needs_hidden: bool) -> None:
        if layer.record.replay:
            raise RuntimeError("backward ran through a streamed block a second time; what it needs went with the first")
        layer.record.replay = True
        self._layer, self._hidden, self._d_output, self._needs_hidden = layer, hidden, d_output, needs_hidden
        self._d_hidden: Tensor | None = None
        self._sums = GradientSums(layer.trained())
        self._keys = layer.key_values(layer.rows, offload=layer.stream.kv == "offload", backward=True)

    def run(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input, if asked for, and of `layer.trained()`."""
        layer = self._layer
        chunk = self._attend_and_differentiate if layer.stream.save_attention == "none" else self._differentiate
        with layer.autocast.again(), torch.enable_grad():
            staggered((chunk(i) for i in reversed(range(len(layer.chunks)))), overlap=layer.overlap)
        layer.store.settle()
        del self._keys
        return self._d_hidden, self._sums.rounded()

    def _differentiate(self, i: int) -> Iterator[None]:
        """All of one chunk whose context is in the store; yields while heads travel."""
        layer = self._layer
        x = self._read_input(i)
        context, lse = (layer.store.get(layer.key(name, i)) for name in ("context", "lse"))
        self._prefetch(i - 1)
        dx, d_context = self._post(i, x, context)
        heads = layer.block.pre(x, layer.tokens(*layer.local(i)))
        if not any(tensor.requires_grad for tensor in heads):
            self._write(i, dx)
            return
        own = self._own_keys(i, heads)
        arriving = layer.transport.start_scatter_heads(heads[0].detach(), d_context, context, *own, kv=len(own))
        del context, d_context, own
        yield
        q, dout, out, *own = arriving.wait()
        self._provide(i, own)
        going = self._row(i, dout, q, out, lse)
        del arriving, q, dout, out, lse, own
        yield
        self._finish(i, x, dx, heads, going.wait())

    def _attend_and_differentiate(self, i: int) -> Iterator[None]:
        """All of one chunk whose attention runs again first."""
        layer = self._layer
        x = self._read_input(i)
        self._prefetch(i - 1)
        heads = layer.block.pre(x, layer.tokens(*layer.local(i)))
        own = self._own_keys(i, heads)
        arriving = layer.transport.start_scatter_heads(heads[0].detach(), *own, kv=len(own))
        del own
        yield
        q, *own = arriving.wait()
        self._provide(i, own)
        with torch.no_grad():
            out, lse = layer.attention.forward(layer.rows[i], q, self._keys.parts(layer.rows[i]))
        (context,) = layer.transport.gather_heads(out)
        dx, d_context = self._post(i, x, context)
        if not any(tensor.requires_grad for tensor in heads):
            self._keys.end_row(layer.rows[i])
            self._write(i, dx)
            return
        (dout,) = layer.transport.scatter_heads(d_context)
        going = self._row(i, dout, q, out, lse)
        del arriving, q, own, out, lse, context, d_context, dout
        yield
        self._finish(i, x, dx, heads, going.wait())

    def _read_input(self, i: int) -> Tensor:
        """A chunk of the input, as the leaf of a graph."""
        a, b = self._layer.local(i)
        return self._layer.store.read(self._hidden[a:b]).detach().requires_grad_(self._needs_hidden)

    def _prefetch(self, i: int) -> None:
        """Have what a chunk needs come."""
        layer = self._layer
        layer.fetch(self._hidden, i)
        layer.fetch(self._d_output, i)
        if i >= 0 and layer.stream.save_attention != "none":
            for name in ("context", "lse"):
                layer.store.prefetch(layer.key(name, i))

    def _post(self, i: int, x: Tensor, context: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of `post` at its two inputs; adds those of its weights."""
        layer = self._layer
        start, stop = layer.local(i)
        dy = layer.store.read(self._d_output[start:stop])
        dx = torch.empty_like(x) if x.requires_grad else None
        d_context = torch.empty_like(context)
        for a, b in layer.ranges(x.shape[0]):
            part, attended = x[a:b].detach().requires_grad_(x.requires_grad), context[a:b].detach().requires_grad_()
            y = layer.block.post(part, attended, layer.tokens(start + a, start + b))
            of_part, of_context = self._sums.add([y], [dy[a:b]], [part, attended])
            assert of_context is not None
            d_context[a:b] = of_context
            if dx is not None and of_part is not None:
                dx[a:b] = of_part
        return dx, d_context

    def _own_keys(self, i: int, heads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keys and values that are not there yet: those of a chunk that no row after it has seen."""
        layer = self._layer
        seen = i + 1 < len(layer.rows) and layer.rows[i + 1].keys[0] <= layer.rows[i].queries[0]
        return () if seen or layer.stream.save_attention == "all" else [tensor.detach() for tensor in heads[1:]]

    def _provide(self, i: int, own: Sequence[Tensor]) -> None:
        """Have keys and values of all chunks that row i sees."""
        layer = self._layer
        if own:
            self._keys.add(i, *own)
        first = layer.rows[i].keys[0]
        missing = [j for j in range(i, -1, -1) if layer.chunks[j][0] >= first and not self._keys.has(j)]
        staggered((self._add_keys(j) for j in missing), overlap=layer.overlap)

    def _add_keys(self, j: int) -> Iterator[None]:
        """Keys and values of one chunk, from the store or made anew; yields while they travel."""
        layer = self._layer
        if layer.stream.save_attention == "all":
            self._keys.add(j, *(layer.store.get(layer.key(name, j)) for name in ("k", "v")))
            return
        a, b = layer.local(j)
        x = layer.store.read(self._hidden[a:b])
        layer.fetch(self._hidden, j - 1)
        with torch.no_grad():
            arriving = layer.transport.start_scatter_heads(*layer.block.keys(x, layer.tokens(a, b)), kv=2)
        del x
        yield
        self._keys.add(j, *arriving.wait())

    @torch.no_grad()
    def _row(self, i: int, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Pending:
        """dq, dk and dv of a chunk, on their way home; the latter two have been summed over all rows that see it."""
        layer, keys = self._layer, self._keys
        row = layer.rows[i]
        dq = zeros_for_gradient(q)
        for part, k, v in keys.parts(row):
            dk, dv = keys.open_gradients(part)
            layer.attention.backward(row, part, dout, q, k, v, out, lse, (dq, dk, dv))
            keys.close_gradients(part, (dk, dv))
        going = layer.transport.start_gather_heads(dq, *keys.gradients(i), kv=2)
        keys.end_row(row)
        return going

    def _finish(self, i: int, x: Tensor, dx: Tensor | None, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Differentiate `pre`."""
        asked = [(t, grad.to(t.dtype)) for t, grad in zip(heads, grads, strict=True) if t.requires_grad]
        (d_pre,) = self._sums.add([t for t, _ in asked], [grad for _, grad in asked], [x])
        self._write(i, d_pre if dx is None else dx if d_pre is None else dx + d_pre)

    def _write(self, i: int, dx: Tensor | None) -> None:
        """Put the gradient of a chunk's input, if it needs one, where it belongs; the chunk is done."""
        layer = self._layer
        if dx is not None:
            if self._d_hidden is None:
                self._d_hidden = self._gradient_rows(dx)
            a, b = layer.local(i)
            layer.store.write(self._d_hidden[a:b], dx)
        layer.free(i)

    def _gradient_rows(self, dx: Tensor) -> Tensor:
        """Where the input's gradient goes: over the output's, as that is used up, if both belong in the store."""
        layer, d_output = self._layer, self._d_output
        if layer.lent and layer.store.holds(d_output) and dx.dtype == d_output.dtype:
            return d_output
        return layer.rows_like(dx, d_output.shape[0])
