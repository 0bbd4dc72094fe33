"""Streams a whole block chunk by chunk, so that the device never holds a full-length activation of its inside.

    forward:   for each chunk, ascending:  pre -> keep K, V -> one row of attention -> post
    backward:  for each chunk, descending: post -> one row of attention's gradients -> pre

In a causal decoder a chunk needs of others only K and V of those before it; all else is token by token. Descending,
everything that reads K_i and V_i is done when row i is, so dq, dK and dV of chunk i are final together and the chunk's
backward runs at once. Each weight gradient is summed over the chunks in float32 and given to autograd once, so hooks
on parameters (FSDP's reduce-scatter) fire as in a plain run. The price is one more forward per block, as with full
recomputation, except attention itself, whose context and log-sum-exp are kept by default.

Source: the schedule differs from FPDT (arXiv 2408.16978) in that the whole block is streamed, not its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from freight.errors import ConfigError
from freight.memory.key_values import KeyValues, ResidentKeyValues, StoredKeyValues, zeros_for_gradient
from freight.ops.attention import LocalAttention
from freight.ops.attention_math import working_dtype
from freight.ops.attention_plan import Range
from freight.ops.attention_rows import Row, RowAttention
from freight.ops.batch import BlockRecord, TokenBatch, TokenRange
from freight.ops.protocols import HeadTransport, Key, Pending, RunnableBlock, TensorStore


class LocalTransport:
    """The transport of a rank that has all heads of all tokens; a `HeadTransport`."""

    size = 1
    first_head = 0

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


@dataclass(frozen=True)
class Stream:
    """How a block is streamed.

    Args:
        chunk_tokens: Tokens of a chunk, over all ranks that share them.
        ffn_chunk_tokens: Tokens that go through `post` at one time, likewise; None = a whole chunk.
        kv: Where keys and values of the layer being run are: `device`, or `offload` to the store.
        save_attention: What backward finds beside the block's input: nothing (attention runs again), its `context` and
            log-sum-exp, or `all`: keys and values as well.
    """

    chunk_tokens: int
    ffn_chunk_tokens: int | None = None
    kv: Literal["device", "offload"] = "device"
    save_attention: Literal["none", "context", "all"] = "context"


class StreamingRunner:
    """Runs blocks chunk by chunk; a `BlockRunner`.

    Args:
        stream: Chunk sizes, and what is kept where.
        store: Keeps what backward needs.
        attention: Chooses kernels; the defaults if None.
        transport: Exchanges heads with ranks that share the tokens.
    """

    def __init__(
        self,
        stream: Stream,
        store: TensorStore,
        attention: LocalAttention | None = None,
        transport: HeadTransport | None = None,
    ) -> None:
        if stream.kv == "offload" and store.on_device:
            raise ConfigError("`fpdt.kv: offload` needs a tier; `fpdt.offload` is none. Use `host` or `disk`.")
        self.stream, self.store = stream, store
        self.attention = attention or LocalAttention()
        self.transport: HeadTransport = transport or LocalTransport()
        self.owners = count()

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`; keeps nothing without gradients."""
        layer = _Layer(self, block, batch, hidden.device.type)
        parameters = layer.trained()
        if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
            return _StreamedBlock.apply(hidden, layer, *parameters)  # pyright: ignore[reportReturnType]
        with torch.no_grad():
            return layer.forward(hidden, None)

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Just the call; but a tier gets the first hidden states chunk by chunk, and all blocks then follow."""
        if name != "embed" or self.store.on_device or not torch.is_grad_enabled():
            return function(*inputs)
        tokens, *weights = inputs
        return _StreamedEmbedding.apply(self, function, tokens.batch, *weights)

    def chunks(self, batch: TokenBatch) -> list[Range]:
        """Tokens of each chunk on this rank."""
        size = self.stream.chunk_tokens // self.transport.size
        return chunk_ranges(batch.tokens, size)


class _StreamedEmbedding(torch.autograd.Function):
    """`(runner, function, batch, *weights) -> hidden`, lent by the runner's store."""

    @staticmethod
    def forward(
        ctx: Any, runner: StreamingRunner, function: Callable[..., Tensor], batch: TokenBatch, *weights: Tensor
    ) -> Tensor:
        ctx.runner, ctx.function, ctx.batch = runner, function, batch
        ctx.save_for_backward(*weights)
        hidden: Tensor | None = None
        for a, b in runner.chunks(batch):
            values = function(batch.range(a, b), *weights)
            if hidden is None:
                hidden = runner.store.lend("hidden", values, batch.tokens)
            runner.store.write(hidden[a:b], values)
        assert hidden is not None
        runner.store.settle()
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = [w.detach().requires_grad_(w.requires_grad) for w in ctx.saved_tensors]
        trained = [weight for weight in weights if weight.requires_grad]
        sums = _Sums(trained)
        for a, b in ctx.runner.chunks(ctx.batch):
            with torch.enable_grad():
                values = ctx.function(ctx.batch.range(a, b), *weights)
            sums.add([values], [ctx.runner.store.read(grads[0][a:b])], [])
        found = iter(sums.rounded())
        return None, None, None, *(next(found) if weight.requires_grad else None for weight in weights)


class _StreamedBlock(torch.autograd.Function):
    """`(hidden, layer, *trained parameters) -> hidden`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: _Layer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        kept = layer.keep(hidden)
        ctx.save_for_backward(hidden if kept is hidden else None)
        ctx.copy = None if kept is hidden else kept
        return layer.forward(hidden, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: _Layer = ctx.layer
        (hidden,) = ctx.saved_tensors
        hidden, ctx.copy = ctx.copy if hidden is None else hidden, None
        d_hidden, of_parameters = layer.backward(hidden, grads[0], needs_hidden=ctx.needs_input_grad[0])
        return d_hidden, None, *of_parameters


class _Layer:
    """One run of one block on one batch: what its forward leaves for its backward."""

    def __init__(self, runner: StreamingRunner, block: RunnableBlock, batch: TokenBatch, device_type: str) -> None:
        self.stream, self.store, self.transport = runner.stream, runner.store, runner.transport
        self.block, self.batch = block, batch
        spec = block.attention_spec
        if not spec.causal:
            raise ConfigError(
                "`fpdt` needs causal attention; `model.causal` is false. "
                "Remove `fpdt`, or use `parallel.context` with recompute."
            )
        self.owner = next(runner.owners)
        self.record = BlockRecord()
        self.chunks = chunk_ranges(batch.stream_tokens, self.stream.chunk_tokens)
        self.attention = RowAttention(runner.attention, batch, spec, self.chunks, self.transport.first_head)
        self.rows: tuple[Row, ...] = ()
        self.lent = False  # whether input and output are the store's
        self.autocast = _Autocast(device_type)

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
        with self.autocast.again():
            for i in range(len(self.chunks)):
                a, b = self._local(i)
                x = self.store.read(hidden[a:b])
                if i + 1 < len(self.chunks):
                    self._fetch(hidden, i + 1)
                q, k, v = self.transport.scatter_heads(*self.block.pre(x, self._tokens(a, b)), kv=2)
                if keys is None:
                    offload = kept is not None and self.stream.kv == "offload"
                    self.rows = self.attention.rows(q, k, by_block=offload)
                    keys = self._key_values(offload=offload, backward=False)
                keys.add(i, k, v)
                out, lse = self.attention.forward(self.rows[i], q, keys.parts(self.rows[i]))
                keys.end_row(self.rows[i])
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
        sums = _Sums(self.trained())
        d_hidden: Tensor | None = None
        keys = self._key_values(offload=self.stream.kv == "offload", backward=True)
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
        self, i: int, x: Tensor, dy: Tensor, keys: KeyValues, sums: _Sums, hidden: Tensor
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
        self, i: int, x: Tensor, context: Tensor, dy: Tensor, sums: _Sums
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

    def _key_values(self, *, offload: bool, backward: bool) -> KeyValues:
        if not offload:
            return ResidentKeyValues(self.rows, backward=backward)
        keep = self.stream.save_attention == "all"
        return StoredKeyValues(self.rows, self.store, self.owner, backward=backward, keep=keep)

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


class _Sums:
    """Gradients of parameters, summed over chunks in float32 (float64 for float64)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
        """Differentiate outputs; returns the gradients of inputs (None where none is asked) and adds the others."""
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        found = torch.autograd.grad(outputs, [*asked, *self._parameters], grads, allow_unused=True)
        for i, grad in enumerate(found[len(asked) :]):
            if grad is not None:
                total = self._sums[i]
                if total is None:
                    self._sums[i] = grad.to(working_dtype(grad.dtype), copy=True)
                else:
                    total.add_(grad)
        of_inputs = iter(found[: len(asked)])
        return [next(of_inputs) if tensor.requires_grad else None for tensor in inputs]

    def rounded(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes."""
        return [None if s is None else s.to(p.dtype) for s, p in zip(self._sums, self._parameters, strict=True)]


class _Autocast:
    """The autocast state of a forward, to be entered again by its backward."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def again(self) -> AbstractContextManager[Any]:
        """Without its cache of cast weights, whose graph the first chunk would use up."""
        return torch.autocast(self._device_type, self._dtype, self._enabled, cache_enabled=False)


def chunk_ranges(tokens: int, size: int) -> list[Range]:
    """`[0, tokens)` in ranges of `size`, the last one shorter."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
