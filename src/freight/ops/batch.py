"""The microbatch: a flat stream of tokens that holds whole documents.

There is no batch dim. `cu_seqlens` says where each segment of the stream begins, `lengths` how many of its tokens are
real; what is left over is padding, which belongs to no document. All bookkeeping is Python integers made once by the
data layer, so nothing downstream ever reads a tensor back to decide what to do.

A rank of context parallelism holds some of the stream's tokens: its tensors are those tokens, its integers stay those
of the whole stream, and a layout says which tokens they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from freight.errors import LayoutError
from freight.ops.layout import SequenceLayout

IGNORE_INDEX = -100
CACHE_ENTRIES = 16


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One microbatch.

    Args:
        input_ids: int64 `[tokens]`.
        labels: int64 `[tokens]`, already shifted per document; `IGNORE_INDEX` where nothing is to be predicted.
        position_ids: int64 `[tokens]`, restarting at 0 in every document; 0 at padding.
        cu_seqlens: Start of each segment, then the number of tokens; strictly increasing from 0.
        lengths: Real tokens of each segment; the rest of a segment is padding, a segment of padding has 0.
        documents: Index of each segment's document in its source, -1 for padding; empty if unknown.
        seed: Seed of everything random inside the model.
        step: Optimizer step the batch belongs to.
        microbatch: Number of the microbatch within the global batch.
        layout: How the stream is dealt out to ranks; None = all of it is here. The tensors above are then this rank's,
            and all integers the whole stream's. Made by `local`.
        rank: This rank of the layout.

    Raises:
        LayoutError: The integers contradict each other.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: tuple[int, ...]
    lengths: tuple[int, ...]
    documents: tuple[int, ...] = ()
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    layout: SequenceLayout | None = None
    rank: int = 0
    _cache: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        starts = self.cu_seqlens
        tokens = self.input_ids.shape[0] if self.layout is None else self.layout.tokens
        if len(starts) < 2 or starts[0] != 0 or starts[-1] != tokens or any(b <= a for a, b in pairwise(starts)):
            raise LayoutError(
                f"`cu_seqlens` must start at 0, increase strictly and end at the row's {tokens} tokens; "
                f"got {list(starts)}."
            )
        spans = [b - a for a, b in pairwise(starts)]
        if len(self.lengths) != len(spans) or any(not 0 <= n <= s for n, s in zip(self.lengths, spans, strict=True)):
            raise LayoutError(f"`lengths` must lie between 0 and the segments' {spans}; got {list(self.lengths)}.")

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]] | None = None,
        *,
        pad_to: int | None = None,
        pad_id: int = 0,
        **fields: Any,
    ) -> TokenBatch:
        """Put documents one after another, padding last.

        Args:
            documents: Token ids of each document.
            labels: Shifted labels of each; by default every next token of the same document is predicted.
            pad_to: Tokens of the stream; by default the documents' own.
            pad_id: Id at padding; it has no influence on anything.
            **fields: Other fields of the batch: `seed`, `step`, `microbatch`.
        """
        if labels is None:
            labels = [[*document[1:], IGNORE_INDEX] for document in documents]
        total = sum(len(document) for document in documents)
        padding = (pad_to or total) - total
        starts = [0]
        for document in documents:
            starts.append(starts[-1] + len(document))
        lengths = [len(document) for document in documents]
        if padding > 0:
            starts.append(total + padding)
            lengths.append(0)
        return cls(
            input_ids=torch.tensor([i for d in documents for i in d] + [pad_id] * padding),
            labels=torch.tensor([i for d in labels for i in d] + [IGNORE_INDEX] * padding),
            position_ids=torch.tensor([i for d in documents for i in range(len(d))] + [0] * padding),
            cu_seqlens=tuple(starts),
            lengths=tuple(lengths),
            **fields,
        )

    def local(self, layout: SequenceLayout, rank: int) -> TokenBatch:
        """What one rank of a layout holds; the stream is padded to the layout's unit first.

        Labels were shifted on the whole stream, so a rank's last token still knows its next one.

        Args:
            layout: Of this stream.
            rank: Of the layout's ranks.

        Raises:
            LayoutError: The layout is of another stream, or this batch is a rank's part already.
        """
        stream = self.cu_seqlens[-1]
        if self.layout is not None or layout.tokens - layout.pad != stream:
            raise LayoutError(f"the layout is of {layout.tokens - layout.pad} tokens; got a stream of {stream}.")
        index = layout.index(rank).to(self.device)

        def part(x: Tensor, fill: int) -> Tensor:
            return (torch.nn.functional.pad(x, (0, layout.pad), value=fill) if layout.pad else x).index_select(0, index)

        padding = (0,) if layout.pad else ()
        return replace(
            self,
            input_ids=part(self.input_ids, 0),
            labels=part(self.labels, IGNORE_INDEX),
            position_ids=part(self.position_ids, 0),
            cu_seqlens=(*self.cu_seqlens, layout.tokens) if padding else self.cu_seqlens,
            lengths=(*self.lengths, *padding),
            documents=(*self.documents, *(-1 for _ in padding)) if self.documents else (),
            layout=layout,
            rank=rank,
            _cache=OrderedDict(),
        )

    @property
    def tokens(self) -> int:
        """Tokens that are here, padding included."""
        return self.input_ids.shape[0]

    @property
    def stream_tokens(self) -> int:
        """Tokens of the whole stream, padding included."""
        return self.cu_seqlens[-1]

    @cached_property
    def token_numbers(self) -> Tensor:
        """int64 `[tokens]`: place of each token in the whole stream; what dropout counts by."""
        numbers = torch.arange(self.tokens) if self.layout is None else self.layout.index(self.rank)
        return numbers.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.input_ids.device

    @cached_property
    def real_tokens(self) -> int:
        """Tokens of the whole stream that belong to a document."""
        return sum(self.lengths)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`(start, length)` of every segment with real tokens, in the whole stream."""
        return tuple((start, length) for start, length in zip(self.cu_seqlens, self.lengths, strict=False) if length)

    @cached_property
    def max_seqlen(self) -> int:
        """Real tokens of the longest document."""
        return max(self.lengths)

    @cached_property
    def valid(self) -> Tensor:
        """Bool `[tokens]`: the token belongs to a document."""
        mask = torch.zeros(self.stream_tokens, dtype=torch.bool)
        for start, length in self.spans:
            mask[start : start + length] = True
        return self._here(mask)

    @cached_property
    def segments(self) -> Tensor:
        """int64 `[tokens]`: number of the segment each token belongs to."""
        sizes = torch.tensor([stop - start for start, stop in pairwise(self.cu_seqlens)])
        return self._here(torch.repeat_interleave(torch.arange(len(sizes)), sizes))

    @cached_property
    def document_lengths(self) -> Tensor:
        """int64 `[tokens]`: length of the document each token belongs to, 0 at padding."""
        out = torch.zeros(self.stream_tokens, dtype=torch.int64)
        for start, length in self.spans:
            out[start : start + length] = length
        return self._here(out)

    def _here(self, of_stream: Tensor) -> Tensor:
        """The part of a CPU tensor of the whole stream that belongs to the tokens here."""
        return (of_stream if self.layout is None else of_stream[self.layout.index(self.rank)]).to(self.device)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What all layers of the microbatch share (plans, rotations), made once; the oldest of a few is dropped."""
        if key not in self._cache:
            self._cache[key] = make()
            if len(self._cache) > CACHE_ENTRIES:
                self._cache.popitem(last=False)
        return self._cache[key]

    def range(self, start: int = 0, stop: int | None = None, record: BlockRecord | None = None) -> TokenRange:
        """View of the tokens `[start, stop)`; all of them by default."""
        return TokenRange(self, start, self.tokens if stop is None else stop, record)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TokenBatch:
        """The same batch on another device, with an empty cache."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
            _cache=OrderedDict(),
        )


@dataclass
class BlockRecord:
    """What a runner keeps of one (layer, microbatch) between a first run of a block's parts and their replay."""

    replay: bool = False
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenRange:
    """The tokens `[start, stop)` of a batch, as token-wise code sees them.

    `pre` and `post` of a block work on any range alone, which is what lets a runner stream a block chunk by chunk.
    """

    batch: TokenBatch
    start: int
    stop: int
    record: BlockRecord | None = None

    @property
    def input_ids(self) -> Tensor:
        """int64 `[stop - start]`."""
        return self.batch.input_ids[self.start : self.stop]

    @property
    def position_ids(self) -> Tensor:
        """int64 `[stop - start]`, restarting in every document."""
        return self.batch.position_ids[self.start : self.stop]

    @property
    def token_numbers(self) -> Tensor:
        """int64 `[stop - start]`: place of each token in the whole stream."""
        return self.batch.token_numbers[self.start : self.stop]

    @property
    def valid(self) -> Tensor:
        """Bool `[stop - start]`."""
        return self.batch.valid[self.start : self.stop]

    @property
    def document_lengths(self) -> Tensor:
        """int64 `[stop - start]`, length of each token's document."""
        return self.batch.document_lengths[self.start : self.stop]

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """As `TokenBatch.cached`, for this range."""
        return self.batch.cached((key, self.start, self.stop), make)
