"""The books of tokenising: what was read, used, left out and noticed. They are what an interrupted build goes on from.

Everything here but the lengths of documents is small and fits JSON, so it can be written beside every finished shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freight.config.schema import Truncation
from freight.data.read.records import RawRecord
from freight.data.read.rejects import Rejects
from freight.data.render.encode import EncodeCounts
from freight.data.render.truncation import TooLong
from freight.data.tokens.token_store import FileEntry
from freight.errors import DataError

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
STRADDLING_LIMIT = 0.001
SAMPLED_RECORDS = 1000  # read before the first ones are judged as a whole


class Mark(NamedTuple):
    """Where reading stands.

    Args:
        source: Index of the source.
        file: Index of the file among all files.
        after: Number of the last record of that file that was taken.
        position: Bytes of all files read so far.
    """

    source: int = 0
    file: int = 0
    after: int = -1
    position: int = 0


@dataclass
class Books:
    """Counts over all sources.

    Args:
        mark: Records up to it are in the books.
        files: All files of the sources begun so far.
        formats: Format of each source, by name.
        policies: Truncation of each source, by name.
        counts: What encoding noticed.
        ignored: Keys that are not used.
        missing_columns: Renamed columns that no record had yet.
        documents: Documents made.
        tokens: Tokens of all documents.
        targets: Labels of all documents.
        notices: For the user.
        warnings: For the user.
    """

    mark: Mark = field(default_factory=Mark)
    files: list[FileEntry] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    policies: dict[str, Truncation] = field(default_factory=dict)
    counts: EncodeCounts = field(default_factory=EncodeCounts)
    ignored: Counter[str] = field(default_factory=Counter)
    missing_columns: set[str] = field(default_factory=set)
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "counts": asdict(self.counts), "missing_columns": sorted(self.missing_columns)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Books:
        """The books that `as_json` wrote."""
        return cls(
            **{
                **content,
                "mark": Mark(*content["mark"]),
                "files": [FileEntry(*entry) for entry in content["files"]],
                "counts": EncodeCounts(**content["counts"]),
                "ignored": Counter(content["ignored"]),
                "missing_columns": set(content["missing_columns"]),
            }
        )

    def check_ends(self) -> None:
        """Hold the first turns against the need of an end.

        Raises:
            DataError: No assistant turn ends in a special token.
        """
        if self.counts.turns and not self.counts.ended_turns:
            raise DataError(
                "no assistant turn ends in a special token: the model would never learn to stop; add {{ eos_token }} "
                "to the chat template, or set data.eos=always"
            )

    def close(self) -> None:
        """Put the last remarks down.

        Raises:
            DataError: A renamed column that no record has.
        """
        if self.missing_columns:
            raise DataError(f"data.fields: no record has a column {min(self.missing_columns)!r}; leave it out")
        if self.counts.straddling_tokens > STRADDLING_LIMIT * self.tokens:
            self.warnings.append(
                f"{self.counts.straddling_tokens:,} of {self.tokens:,} tokens cover supervised and other text, such "
                f"as {self.counts.straddling_example!r}; they are supervised"
            )
        if self.counts.unwritten:
            self.warnings.append(
                f"the chat template leaves out a user's or system message of {self.counts.unwritten:,} records among "
                f"those looked at, such as {self.counts.unwritten_example}"
            )
        if self.ignored:
            listed = ", ".join(f"{key} ({count:,})" for key, count in self.ignored.most_common())
            self.notices.append(f"keys that are not used: {listed}")

    def summary(self, rejects: dict[str, Rejects], lengths: NDArray[np.int32]) -> dict[str, Any]:
        """The numbers of the run, for metadata and reports.

        Args:
            rejects: Of each source.
            lengths: Of every document.
        """
        skipped: Counter[str] = Counter()
        for each in rejects.values():
            skipped.update(each.counts)
        read, used = sum(each.read for each in rejects.values()), sum(each.used for each in rejects.values())
        assert read == used + skipped.total(), (read, used, skipped)
        assert (len(lengths), int(lengths.sum(dtype=np.int64))) == (self.documents, self.tokens), "documents were lost"
        return {
            "format": only_value(self.formats),
            "truncation": only_value(self.policies),
            "num_documents": self.documents,
            "num_tokens": self.tokens,
            "num_target_tokens": self.targets,
            "records_read": read,
            "records_used": used,
            "skipped": dict(skipped),
            "supervised_share": self.targets / max(1, self.tokens),
            "length_quantiles": {
                str(q): int(v) for q, v in zip(QUANTILES, np.quantile(lengths, QUANTILES), strict=True)
            },
            "straddling_tokens": self.counts.straddling_tokens,
            "trailing_unsupervised": self.counts.trailing_unsupervised,
            "documents_cut": self.counts.documents_cut,
            "tokens_cut": self.counts.tokens_cut,
            "tokens_dropped": sum(each.dropped_tokens for each in rejects.values()),
            "ignored_keys": dict(self.ignored),
            "notices": self.notices,
            "warnings": self.warnings,
        }


@dataclass
class TooLongCount:
    """With truncation `error`: counts documents that are too long until it can say how common they are.

    Args:
        first: The first one, described.
        count: How many there are.
        longest: Tokens of the longest.
    """

    first: str = ""
    count: int = 0
    longest: int = 0

    def add(self, record: RawRecord, fault: TooLong) -> None:
        """Count one."""
        self.first = self.first or f"{record.place}: {fault}"
        self.count += 1
        self.longest = max(self.longest, fault.tokens)

    def stop(self, read: int, *, enough: bool) -> None:
        """Raise if there was one and enough records were read.

        Raises:
            DataError: Names the first, how common they are, and what to set.
        """
        if not self.count or not enough:
            return
        fitting = 1 << (self.longest - 1).bit_length()
        raise DataError(
            f"{self.first} ({self.count:,} of the first {read:,} records are). "
            f"Set data.truncation=drop or cut_right, or data.sequence_length={fitting}"
        )


def only_value(values: Mapping[str, str]) -> str:
    """The value that all sources share, or `mixed`."""
    distinct = set(values.values())
    return distinct.pop() if len(distinct) == 1 else "mixed"
