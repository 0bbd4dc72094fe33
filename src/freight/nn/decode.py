"""Incremental decoding: each layer keeps the keys and values of the tokens seen, so a new token costs one row.

For looking at a model, one sequence at a time. The first piece of a sequence goes through the block's own core (it may
be long); later pieces use explicit attention over the cache, whose scores are `[heads, new, seen]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freight.nn.block import Block
from freight.nn.decoder import Decoder
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.protocols import AttentionSpec, RunnableBlock


@dataclass(frozen=True, eq=False)
class ContinuedBatch(TokenBatch):
    """New tokens of a document whose beginning is already cached.

    Args:
        document_tokens: Tokens of the finished document; what length-dependent rotations go by.
    """

    document_tokens: int = 0

    @cached_property
    def document_lengths(self) -> Tensor:
        """int64 `[tokens]`: the length of the finished document, at every token."""
        return torch.full((self.tokens,), self.document_tokens, device=self.device)


class DecodeCache:
    """Keys and values of one sequence, for every layer.

    Args:
        max_tokens: Tokens the finished sequence may have. Rotations that depend on a document's length (`dynamic`,
            `longrope`) are those of a document of this length throughout, as keys cannot be rotated again.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._layers: dict[int, _LayerCache] = {}

    @property
    def tokens(self) -> int:
        """Tokens seen by every layer."""
        return min((layer.tokens for layer in self._layers.values()), default=0)

    def batch(self, ids: Sequence[int], device: torch.device | str = "cpu") -> TokenBatch:
        """The next tokens of the sequence, with positions that continue.

        Raises:
            ValueError: There is no room for them.
        """
        stop = self.tokens + len(ids)
        if stop > self.max_tokens:
            raise ValueError(f"the cache holds {self.max_tokens} tokens; {stop} do not fit")
        batch = ContinuedBatch(
            input_ids=torch.tensor(ids),
            labels=torch.full((len(ids),), IGNORE_INDEX),
            position_ids=torch.arange(self.tokens, stop),
            cu_seqlens=(0, len(ids)),
            lengths=(len(ids),),
            document_tokens=self.max_tokens,
        )
        return batch.to(device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[new, groups, head_dim]` of a layer; all of its tokens so far come back."""
        if layer not in self._layers:
            shape = (self.max_tokens, *k.shape[1:])
            self._layers[layer] = _LayerCache(k.new_empty(shape), v.new_empty(shape))
        cached = self._layers[layer]
        start, stop = cached.tokens, cached.tokens + k.shape[0]
        cached.keys[start:stop], cached.values[start:stop] = k, v
        cached.tokens = stop
        return cached.keys[:stop], cached.values[:stop]


@dataclass
class _LayerCache:
    keys: Tensor
    values: Tensor
    tokens: int = 0


class CachedRunner:
    """Runs blocks on new tokens only; a `BlockRunner`.

    Args:
        cache: Of the sequence being decoded.
    """

    def __init__(self, cache: DecodeCache) -> None:
        self.cache = cache

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[new, hidden]` -> `[new, hidden]`."""
        assert isinstance(block, Block)
        spec, tokens = block.attention.spec, batch.range()
        q, k, v = block.pre(hidden, tokens)
        keys, values = self.cache.extend(spec.layer, k, v)
        first = keys.shape[0] == k.shape[0]
        context = block.core(q, k, v, batch) if first else attend_cached(q, keys, values, spec)
        return block.post(hidden, context, tokens)

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Just the call."""
        return function(*inputs)


def attend_cached(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of the last tokens of a sequence to all of it.

    Args:
        q: `[new, heads, head_dim]`.
        keys: `[seen, groups, head_dim]`, the new tokens' own included.
        values: As `keys`.
        spec: Scale, window and softcap.

    Returns:
        Context `[new, heads, head_dim]`; scores and softmax in float32 (float64 for float64).
    """
    new, seen, dtype = q.shape[0], keys.shape[0], torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(1, (keys.shape[1], -1)).to(dtype)  # [new, heads, d] -> [new, groups, heads / groups, d]
    scores = torch.einsum("qgrd,kgd->grqk", grouped, keys.to(dtype)) * spec.scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    query = torch.arange(seen - new, seen, device=q.device)[:, None]
    key = torch.arange(seen, device=q.device)
    hidden_keys = key > query
    if spec.window is not None:
        hidden_keys |= key <= query - spec.window
    probabilities = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
    return torch.einsum("grqk,kgd->qgrd", probabilities, values.to(dtype)).flatten(1, 2).to(q.dtype)


@contextmanager
def decoding(model: Decoder, max_tokens: int) -> Iterator[Callable[[Sequence[int]], Tensor]]:
    """While open, the model decodes one sequence: `next_logits(ids)` appends ids, returns the logits after the last.

    Args:
        model: Its blocks run through a cache meanwhile, without gradients and dropout.
        max_tokens: Tokens the sequence may reach, prompt included.

    Yields:
        A function from the next token ids to logits `[vocab]` (float32 for 16-bit models), softcap applied.
    """
    cache = DecodeCache(max_tokens)
    device = model.embed_tokens.weight.device
    runners = [block.runner for block in model.blocks]
    training = model.training

    @torch.no_grad()
    def next_logits(ids: Sequence[int]) -> Tensor:
        last = LogitsHead(torch.tensor([len(ids) - 1], device=device), model.arch.final_softcap)
        return model(cache.batch(ids, device), last).squeeze(0)

    try:
        model.eval().use_runner(CachedRunner(cache))
        yield next_logits
    finally:
        model.train(training)
        for block, runner in zip(model.blocks, runners, strict=True):
            block.runner = runner
