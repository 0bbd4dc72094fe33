"""What tokenising hands to packing: documents of token ids, each knowing which of its tokens are targets.

The mask is aligned to tokens ("token i is a target"), never to labels, and the shift to labels is done once, here, per
document, before anything is packed or split over ranks. Access is by index and lazy: a corpus may be a memory map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

NO_TAIL = -1


@dataclass(frozen=True, eq=False)
class Document:
    """Token ids of one document, or of one piece of a longer one.

    Args:
        ids: int32 `[length]`; all of them are inputs.
        loss_mask: bool `[length]`; entry i says token i is a target. Entry 0 is always False: nothing predicts it.
        tail_label: What the last token predicts, when the document goes on in the next piece; -1 if nothing.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    tail_label: int = NO_TAIL

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """Labels that are not `IGNORE_INDEX`."""
        return int(np.count_nonzero(self.loss_mask)) + (self.tail_label != NO_TAIL)

    def labels(self) -> NDArray[np.int64]:
        """int64 `[length]`: the next token where it is a target, else `IGNORE_INDEX`."""
        from freight.ops.batch import IGNORE_INDEX  # noqa: PLC0415 - brings torch: 3 s, not for tokenising

        labels = np.full(len(self), IGNORE_INDEX, dtype=np.int64)
        labels[:-1] = np.where(self.loss_mask[1:], self.ids[1:], IGNORE_INDEX)
        if self.tail_label != NO_TAIL:
            labels[-1] = self.tail_label
        return labels

    def piece(self, start: int, stop: int) -> Document:
        """Tokens `[start, stop)` as a document of their own, whose last token still predicts what followed.

        Consecutive pieces together have every input once and every target once.
        """
        if (start, stop) == (0, len(self)):
            return self
        tail = self.tail_label
        if stop < len(self):
            tail = int(self.ids[stop]) if self.loss_mask[stop] else NO_TAIL
        return make_document(self.ids[start:stop], self.loss_mask[start:stop], tail)

    def first(self, count: int) -> Document:
        """The first `count` tokens; what followed is given up, targets included."""
        return make_document(self.ids[:count], self.loss_mask[:count]) if count < len(self) else self


def make_document(ids: Any, loss_mask: Any, tail_label: int = NO_TAIL) -> Document:
    """Build a document from anything array-like; the first token is never a target.

    Args:
        ids: Token ids, `[length]`, length >= 1.
        loss_mask: Whether each is a target, `[length]`.
        tail_label: See `Document`.
    """
    mask = np.array(loss_mask, dtype=np.bool_)
    mask[:1] = False
    return Document(np.asarray(ids, dtype=np.int32), mask, tail_label)


class Documents(Protocol):
    """Documents in the order of their source, by index."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, `[documents]`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when any id, mask or the order changes; part of the key of every shuffle."""
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts for packed files and reports.

        Always there: `tokenizer_hash`, `template_hash` (or None), `vocab_size`, `pad_id`, `eos_id` (or None),
        `format`, `sequence_length`, `truncation`, `num_documents`, `num_tokens`, `num_target_tokens`, `sources`
        (`[{path, hash, records}]`) and `skipped` (`{reason: count}`).
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Document: ...

    def origin(self, index: int, /) -> str:
        """Where a document came from, for messages: `train.jsonl:17`."""
        ...

    def source_of(self, index: int, /) -> str:
        """Name of the source it came from, for losses per source."""
        ...


class InMemoryDocuments:
    """Documents held in a list.

    Args:
        documents: The documents.
        metadata: Facts; those that follow from the documents are filled in.
        origins: One per document; by default `document 0`, `document 1`, ...
        sources: Name of each document's source; by default `memory`.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        metadata: dict[str, Any] | None = None,
        *,
        origins: Sequence[str] | None = None,
        sources: Sequence[str] | None = None,
    ) -> None:
        self._documents = list(documents)
        self._origins = origins
        self._sources = sources
        self.lengths = np.array([len(document) for document in documents], dtype=np.int32)
        fingerprint = Fingerprint()
        for document in documents:
            fingerprint.add(document_digest(document))
        self.fingerprint = fingerprint.text()
        longest = int(self.lengths.max(initial=0))
        self.metadata: dict[str, Any] = {
            "tokenizer_hash": "",
            "template_hash": None,
            "vocab_size": max((int(d.ids.max(initial=-1)) + 1 for d in documents), default=0),
            "pad_id": 0,
            "eos_id": None,
            "format": "text",
            "sequence_length": longest,
            "truncation": "error",
            "sources": [],
            "skipped": {},
            **(metadata or {}),
            **totals(documents),
        }

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int, /) -> Document:
        return self._documents[index]

    def origin(self, index: int, /) -> str:
        """See `Documents.origin`."""
        return self._origins[index] if self._origins is not None else f"document {index}"

    def source_of(self, index: int, /) -> str:
        """See `Documents.source_of`."""
        return self._sources[index] if self._sources is not None else "memory"


def totals(documents: Sequence[Document]) -> dict[str, int]:
    """Counts over documents, named as in a packed file's metadata."""
    return {
        "num_documents": len(documents),
        "num_tokens": sum(len(document) for document in documents),
        "num_target_tokens": sum(document.num_targets for document in documents),
    }


def document_digest(document: Document) -> bytes:
    """16 bytes that change with any id, target or the tail of a document."""
    content = hashlib.blake2b(digest_size=16)
    content.update(np.array([len(document), document.tail_label], dtype="<i8").tobytes())
    content.update(document.ids.astype("<i4").tobytes())
    content.update(np.packbits(document.loss_mask).tobytes())
    return content.digest()


class Fingerprint:
    """Digest of documents in order; equal documents in memory or on disk have the same.

    It is a digest of digests, so that documents may be made, and taken in, by different processes.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, digests: bytes) -> None:
        """Take in the next documents.

        Args:
            digests: `document_digest` of each, joined.
        """
        self._digest.update(digests)

    def text(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()
