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

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from freight.errors import ConfigError
from freight.memory.block_backward import BackwardPass
from freight.memory.block_forward import ForwardPass
from freight.memory.block_stream import BlockStream, StreamSetting
from freight.memory.gradient_sums import GradientSums
from freight.memory.stream import LocalTransport, Stream, chunk_ranges
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import HeadTransport, RunnableBlock, TensorStore

__all__ = ["LocalTransport", "Stream", "StreamingRunner"]


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
        self.setting = StreamSetting(
            stream, store, attention or LocalAttention(), transport or LocalTransport(), count()
        )

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`; keeps nothing without gradients."""
        _refuse_units_inside(block)
        layer = BlockStream(self.setting, block, batch)
        parameters = layer.trained()
        if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
            return _StreamedBlock.apply(hidden, layer, *parameters)  # pyright: ignore[reportReturnType]
        with torch.no_grad():
            return ForwardPass(layer, hidden, None).run()

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Just the call; but a tier gets the first hidden states chunk by chunk, and all blocks then follow."""
        if name != "embed" or self.setting.store.on_device or not torch.is_grad_enabled():
            return function(*inputs)
        tokens, *weights = inputs
        return _StreamedEmbedding.apply(self.setting, function, tokens.batch, *weights)


def _refuse_units_inside(block: RunnableBlock) -> None:
    """Parts of a block that are sharded on their own would be gathered after their parameters are listed."""
    if isinstance(block, nn.Module) and any(hasattr(part, "unshard") for part in block.modules() if part is not block):
        raise ConfigError(
            "`adapter.use_dora` cannot run under `fpdt`: its lengths are sharded apart from their block. "
            "Set it to false, or use `recompute` instead of `fpdt`."
        )


class _StreamedEmbedding(torch.autograd.Function):
    """`(setting, function, batch, *weights) -> hidden`, lent by the store."""

    @staticmethod
    def forward(
        ctx: Any, setting: StreamSetting, function: Callable[..., Tensor], batch: TokenBatch, *weights: Tensor
    ) -> Tensor:
        ctx.store, ctx.function, ctx.batch = setting.store, function, batch
        ctx.chunks = chunk_ranges(batch.tokens, setting.stream.chunk_tokens // setting.transport.size)
        ctx.save_for_backward(*weights)
        hidden: Tensor | None = None
        for a, b in ctx.chunks:
            values = function(batch.range(a, b), *weights)
            if hidden is None:
                hidden = ctx.store.lend("hidden", values, batch.tokens)
            ctx.store.write(hidden[a:b], values)
        assert hidden is not None
        ctx.store.settle()
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = [w.detach().requires_grad_(w.requires_grad) for w in ctx.saved_tensors]
        trained = [weight for weight in weights if weight.requires_grad]
        sums = GradientSums(trained)
        for a, b in ctx.chunks:
            with torch.enable_grad():
                # A dense gradient would be one of the largest tensors of all, once per chunk.
                values = ctx.function(ctx.batch.range(a, b), *weights, sparse=True)
            sums.add([values], [ctx.store.read(grads[0][a:b])], [])
        found = iter(sums.rounded())
        return None, None, None, *(next(found) if weight.requires_grad else None for weight in weights)


class _StreamedBlock(torch.autograd.Function):
    """`(hidden, layer, *trained parameters) -> hidden`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: BlockStream, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        kept = layer.keep(hidden)
        ctx.save_for_backward(hidden if kept is hidden else None)
        ctx.copy = None if kept is hidden else kept
        return ForwardPass(layer, hidden, kept).run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: BlockStream = ctx.layer
        (hidden,) = ctx.saved_tensors
        hidden, ctx.copy = ctx.copy if hidden is None else hidden, None
        d_hidden, of_parameters = BackwardPass(layer, hidden, grads[0], needs_hidden=ctx.needs_input_grad[0]).run()
        return d_hidden, None, *of_parameters
