"""Faults on purpose: each shows that a kind of mistake is found, and that the right tensor is named.

A sabotage replaces one named function of the program while the ranks run. The program has no hooks for it, and the
reference, which runs in another process, never has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from freight.config.messages import did_you_mean
from freight.config.schema import Config
from freight.data.load import loader
from freight.errors import ConfigError
from freight.memory.gradient_sums import GradientSums
from freight.memory.key_values import ResidentKeyValues
from freight.memory.recompute import RecomputeRunner
from freight.memory.store_host import HostStore
from freight.nn import decoder
from freight.nn.block import Block
from freight.nn.decoder import Decoder
from freight.ops import attention_blocks
from freight.ops.attention_mask import FULL, MaskKind
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.protocols import LossSums
from freight.parallel import context_ring, gradients
from freight.parallel.head_transport import UlyssesTransport
from freight.train import optimizer, step

Patches = Sequence[Any]  # of unittest.mock


@dataclass(frozen=True)
class Sabotage:
    """A fault.

    Args:
        what: It does.
        needs: Of a configuration, in words.
        fits: Whether a configuration has that.
        patches: Made anew for every run.
    """

    what: str
    needs: str
    fits: Callable[[Config], bool]
    patches: Callable[[], Patches]


def check_sabotage(name: str | None, config: Config) -> None:
    """Refuse a fault that does not exist, or that could do nothing to a configuration.

    Raises:
        ConfigError: Names the faults there are, or what the configuration would need.
    """
    if name is None:
        return
    if name not in SABOTAGES:
        known = ", ".join(SABOTAGES)
        raise ConfigError(f"`--sabotage {name}` does not exist.{did_you_mean(name, list(SABOTAGES))} Known: {known}.")
    if not SABOTAGES[name].fits(config):
        raise ConfigError(f"`--sabotage {name}` needs {SABOTAGES[name].needs}; this config has none. Use another.")


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Run with a fault.

    Args:
        name: Of the fault; None = none.
    """
    with ExitStack() as stack:
        for patch in SABOTAGES[name].patches() if name is not None else ():
            stack.enter_context(patch)
        yield


def _instead(owner: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """A patch under which `wrong(right, *args)` is called in place of `right(*args)`."""
    right = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    return mock.patch.object(owner, name, replaced)


# --- attention ---------------------------------------------------------------------------------------------------


def _no_diagonal() -> Patches:
    def call(right: Any, mask: Any, *rest: Any) -> Any:
        return right(FULL if mask.kind == MaskKind.CAUSAL else mask, *rest)

    return [_instead(attention_blocks, "BlockCall", call)]


def _skipped_merge() -> Patches:
    def add(right: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("merging", True):
            right(*args, **kwargs)

    return [_instead(context_ring, "add_forward", add)]


def _wide_window() -> Patches:
    right = Block.attention_spec.fget
    assert right is not None

    def spec(self: Block) -> Any:
        asked = right(self)
        return asked if asked.window is None else replace(asked, window=asked.window + 1)

    return [mock.patch.object(Block, "attention_spec", property(spec))]


def _stale_chunk() -> Patches:
    def add(right: Any, self: Any, chunk: int, k: Tensor, v: Tensor) -> None:
        before, self.sabotage = getattr(self, "sabotage", v), v
        right(self, chunk, k, before if before.shape == v.shape else v)

    return [_instead(ResidentKeyValues, "add", add)]


def _unsummed_heads() -> Patches:
    def gather(right: Any, self: UlyssesTransport, *tensors: Tensor, kv: int = 0, **kwargs: Any) -> Any:
        last = len(tensors) - kv
        if kv and self.rank % 2:
            tensors = *tensors[:last], *(torch.zeros_like(x) for x in tensors[last:])
        return right(self, *tensors, kv=kv, **kwargs)

    return [_instead(UlyssesTransport, "start_gather_heads", gather)]


# --- documents and labels ----------------------------------------------------------------------------------------


def _of_batches(change: Callable[[TokenBatch], TokenBatch]) -> Patches:
    return [_instead(loader, "build_microbatch", lambda right, *args, **kwargs: change(right(*args, **kwargs)))]


def _later_positions() -> Patches:
    return _of_batches(lambda batch: replace(batch, position_ids=batch.position_ids + batch.valid))


def _dropped_boundary() -> Patches:
    def joined(batch: TokenBatch) -> TokenBatch:
        starts, lengths = list(batch.cu_seqlens), list(batch.lengths)
        for i, length in enumerate(lengths[:-1]):
            if length and length == starts[i + 1] - starts[i] and lengths[i + 1]:
                lengths[i : i + 2] = [length + lengths[i + 1]]
                del starts[i + 1]
                return replace(batch, cu_seqlens=tuple(starts), lengths=tuple(lengths), documents=())
        return batch

    return _of_batches(joined)


def _labelled_padding() -> Patches:
    return _of_batches(lambda batch: replace(batch, labels=batch.labels.where(batch.valid, 0)))


def _late_shift() -> Patches:
    def local(right: Any, *args: Any) -> TokenBatch:
        part = right(*args)
        following = torch.cat([part.input_ids[1:], part.input_ids.new_full((1,), IGNORE_INDEX)])
        return replace(part, labels=following.where(part.labels != IGNORE_INDEX, part.labels))

    return [_instead(TokenBatch, "local", local)]


# --- sums over ranks and microbatches ----------------------------------------------------------------------------


def _of_objective(factor: Callable[[TokenBatch], float]) -> Patches:
    """The loss that is shown stays; what is differentiated is multiplied."""

    def forward(right: Any, self: Decoder, batch: TokenBatch, *rest: Any, **kwargs: Any) -> Any:
        result = right(self, batch, *rest, **kwargs)
        return LossSums(result.objective * factor(batch), result.nll) if isinstance(result, LossSums) else result

    return [_instead(Decoder, "forward", forward)]


def _lost_rank() -> Patches:
    return _of_objective(lambda _: float(dist.get_rank() != dist.get_world_size() - 1))


def _times_context() -> Patches:
    return _of_objective(lambda batch: 1.0 if batch.layout is None else float(batch.layout.ranks))


def _lost_microbatch() -> Patches:
    return _of_objective(lambda batch: float(batch.microbatch != 0))


def _mean_per_rank() -> Patches:
    return [mock.patch.object(step, "sum_over_batches", lambda value, mesh: value)]


def _local_norm() -> Patches:
    return [mock.patch.object(gradients, "_sharded_over", lambda tensor: ())]


def _no_clipping() -> Patches:
    return [mock.patch.object(step, "scale_gradients", lambda parameters, factor: None)]


def _decayed_norms() -> Patches:
    def groups(right: Any, model: Any) -> Any:
        decaying, others = right(model)
        return decaying | others, {}

    return [_instead(optimizer, "decay_groups", groups)]


def _embedding_twice() -> Patches:
    def embed(right: Any, ids: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        return right(ids, weight * 2 - weight.detach(), **kwargs)

    return [_instead(decoder, "embedding", embed)]


# --- memory schedules and adapters -------------------------------------------------------------------------------


def _lost_ffn_chunk() -> Patches:
    def add(right: Any, self: Any, outputs: Any, grads: Any, inputs: Any) -> Any:
        if len(inputs) == 2 and not hasattr(self, "sabotage"):  # `post` has two inputs; this is its first range
            self.sabotage, parameters = True, self._parameters
            self._parameters = ()
            try:
                return right(self, outputs, grads, inputs)
            finally:
                self._parameters = parameters
        return right(self, outputs, grads, inputs)

    return [_instead(GradientSums, "add", add)]


def _rounded_tier() -> Patches:
    return [_instead(HostStore, "put", lambda right, self, key, x: right(self, key, x.float().to(x.dtype)))]


def _stale_input() -> Patches:
    def get(right: Any, self: RecomputeRunner, store: Any, key: Any) -> Tensor:
        return right(self, store, self._stored[0])

    return [_instead(RecomputeRunner, "get", get)]


def _lora_scale() -> Patches:
    from freight.nn.lora import ADAPTER, LoraLinear  # noqa: PLC0415 - imports peft

    return [mock.patch.object(LoraLinear, "scale", property(lambda self: 2 * self.scaling[ADAPTER]))]


def _local_dropout() -> Patches:
    from freight.nn import lora  # noqa: PLC0415 - imports peft

    def keep(right: Any, parts: Any, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
        return right(parts, torch.arange(len(rows)), columns, rate)

    return [_instead(lora, "keep_mask", keep)]


# --- which need what ---------------------------------------------------------------------------------------------


def _any(_: Config) -> bool:
    return True


def _packed(config: Config) -> bool:
    return config.data.packing is not None or config.data.format == "packed"


def _ring(config: Config) -> bool:
    return config.parallel.context > 1 and config.fpdt is None and config.parallel.context_method in ("ring", "hybrid")


def _context(config: Config) -> bool:
    return config.parallel.context > 1


def _fpdt(config: Config) -> bool:
    return config.fpdt is not None


def _host(config: Config) -> bool:
    return config.offload.layer_inputs == "host" or (config.fpdt is not None and config.fpdt.offload == "host")


SABOTAGES: dict[str, Sabotage] = {
    "causal_diagonal": Sabotage("tokens see those after them", "any config", _any, _no_diagonal),
    "skipped_merge": Sabotage("of a ring only the first block counts", "a ring", _ring, _skipped_merge),
    "wide_window": Sabotage(
        "windows see one key more", "`model.sliding_window`", lambda c: c.model.sliding_window is not None, _wide_window
    ),
    "stale_chunk": Sabotage("values of the chunk before", "`fpdt`", _fpdt, _stale_chunk),
    "unsummed_heads": Sabotage(
        "gradients of keys and values come from even ranks only",
        "`parallel.context_method: ulysses` or hybrid",
        lambda c: _context(c) and c.parallel.context_method in ("ulysses", "hybrid"),
        _unsummed_heads,
    ),
    "later_positions": Sabotage("positions count from 1", "any config", _any, _later_positions),
    "dropped_boundary": Sabotage("two documents are one", "`data.packing`", _packed, _dropped_boundary),
    "labelled_padding": Sabotage("padding has labels", "any config", _any, _labelled_padding),
    "late_shift": Sabotage(
        "labels are shifted after tokens are dealt out", "`parallel.context`", _context, _late_shift
    ),
    "lost_rank": Sabotage("the last rank's gradients are lost", "any config", _any, _lost_rank),
    "times_context": Sabotage("the loss times the context ranks", "`parallel.context`", _context, _times_context),
    "lost_microbatch": Sabotage("the first microbatch's gradients are lost", "any config", _any, _lost_microbatch),
    "mean_per_rank": Sabotage(
        "each data rank divides by its own labels",
        "`parallel.data_shard`",
        lambda c: (c.parallel.data_shard or 1) > 1,
        _mean_per_rank,
    ),
    "local_norm": Sabotage(
        "the norm is that of a rank's shards",
        "several ranks",
        lambda c: _context(c) or (c.parallel.data_shard or 1) > 1,
        _local_norm,
    ),
    "no_clipping": Sabotage(
        "gradients are not clipped", "`train.grad_clip`", lambda c: c.train.grad_clip is not None, _no_clipping
    ),
    "decayed_norms": Sabotage("norms and biases decay", "full training", lambda c: c.adapter is None, _decayed_norms),
    "embedding_twice": Sabotage(
        "the embedding's gradient counts twice", "full training", lambda c: c.adapter is None, _embedding_twice
    ),
    "lost_ffn_chunk": Sabotage("weights miss one range of the FFN", "`fpdt`", _fpdt, _lost_ffn_chunk),
    "rounded_tier": Sabotage("the host tier keeps float32", "a host tier", _host, _rounded_tier),
    "stale_input": Sabotage(
        "a block runs again on another block's input",
        "`offload.layer_inputs`",
        lambda c: c.offload.layer_inputs != "none",
        _stale_input,
    ),
    "lora_scale": Sabotage("adapters count twice", "`adapter`", lambda c: c.adapter is not None, _lora_scale),
    "local_dropout": Sabotage(
        "dropout counts the tokens of a rank",
        "`adapter.dropout` and `parallel.context`",
        lambda c: c.adapter is not None and c.adapter.dropout > 0 and _context(c),
        _local_dropout,
    ),
}
