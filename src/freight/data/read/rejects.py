"""Records that are not used: counted by reason, written beside the output, and stopped at when there are too many.

Nothing vanishes: for every source, records read = records used + the counts here, and the sum is asserted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from freight.data.read.records import RAW_LIMIT, RawRecord, Reason, RecordFault
from freight.errors import DataError

JUDGED_RECORDS = 1000
SYSTEMATIC = (Reason.UNSTABLE_TEMPLATE, Reason.ID_OUT_OF_RANGE)


class Rejects:
    """The rejects of one source.

    Args:
        name: Of the source; the file is `rejects-<name>.jsonl`.
        folder: Where it is written, from the first reject on; None = only counted.
        skip: Go on after a bad record; otherwise the first one is an error.
    """

    def __init__(self, name: str, folder: Path | None, *, skip: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.read = 0
        self.used = 0
        self.dropped_tokens = 0
        self._name = name
        self._folder = folder
        self._skip = skip
        self._file: TextIOWrapper | None = None
        self._examples: dict[Reason, str] = {}

    def state(self) -> dict[str, Any]:
        """What `resume` needs to go on from here, as JSON; what was written so far is on disk."""
        return {
            "read": self.read,
            "used": self.used,
            "dropped_tokens": self.dropped_tokens,
            "counts": dict(self.counts),
            "examples": {str(reason): text for reason, text in self._examples.items()},
            "bytes": self._file.tell() if self._file is not None else 0,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; lines written after it are cut off the file."""
        self.read, self.used, self.dropped_tokens = state["read"], state["used"], state["dropped_tokens"]
        self.counts = Counter(state["counts"])
        self._examples = {Reason(reason): text for reason, text in state["examples"].items()}
        if state["bytes"] and self._folder is not None:
            path = self._folder / rejects_name(self._name)
            os.truncate(path, state["bytes"])
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def accept(self) -> None:
        """Count a record that is used."""
        self.used += 1
        self._count_read()

    def drop(self, record: RawRecord, fault: RecordFault, tokens: int) -> None:
        """Count and write a record left out because it is too long, as the truncation policy says."""
        self.dropped_tokens += tokens
        self._take(record, fault)

    def reject(self, record: RawRecord, fault: RecordFault) -> None:
        """Count and write a bad record.

        Raises:
            DataError: Bad records are not to be skipped, or a fault that is not the records' hits most of them.
        """
        if not self._skip:
            raise DataError(f"{record.place}: {fault}; fix the record or set data.on_bad_record=skip")
        self._examples.setdefault(fault.reason, f"{record.place}: {fault}")
        self._take(record, fault)

    def finish(self, allowed_fraction: float, path: str) -> None:
        """Close the file and hold the counts against what is allowed.

        Args:
            allowed_fraction: `data.max_skipped_fraction`; documents that are too long do not count.
            path: The source, for messages.

        Raises:
            DataError: No record is usable, or too many are bad.
        """
        self.close()
        self._judge()
        assert self.read == self.used + self.counts.total(), (self.read, self.used, self.counts)
        if self.used == 0:
            raise DataError(f"{path}: 0 usable records of {self.read:,} read{self.by_reason()}")
        bad = self.counts.total() - self.counts[Reason.TOO_LONG]
        if bad > allowed_fraction * self.read:
            raise DataError(
                f"{path}: {bad:,} of {self.read:,} records are bad{self.by_reason()}, above "
                f"data.max_skipped_fraction {allowed_fraction}; fix them or raise it"
            )

    def by_reason(self) -> str:
        """` (3 invalid_json, 1 empty)`, or nothing."""
        listed = ", ".join(f"{count:,} {reason}" for reason, count in self.counts.most_common())
        return f" ({listed})" if listed else ""

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, record: RawRecord, fault: RecordFault) -> None:
        self.counts[str(fault.reason)] += 1
        if self._folder is not None:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = (self._folder / rejects_name(self._name)).open("w", encoding="utf-8", buffering=1)
            # A line at a time: a stream may end with its process, in the middle of a pass.
            self._file.write(json.dumps(describe_reject(record, fault), ensure_ascii=False) + "\n")
        self._count_read()

    def _count_read(self) -> None:
        self.read += 1
        if self.read == JUDGED_RECORDS:
            self._judge()

    def _judge(self) -> None:
        """Stop where a fault of the template or tokenizer, not of records, hits more than half of the first ones."""
        if self.read > JUDGED_RECORDS:
            return
        for reason in SYSTEMATIC:
            if 2 * self.counts[reason] > self.read:
                raise DataError(
                    f"{self._examples[reason]} ({self.counts[reason]:,} of the first {self.read:,} records are "
                    f"{reason}: that is a wrong template or tokenizer, not bad records)"
                )


def rejects_name(source: str) -> str:
    """File name of a source's rejects."""
    return f"rejects-{source}.jsonl"


def describe_reject(record: RawRecord, fault: RecordFault) -> dict[str, Any]:
    """One line of a rejects file; long records are cut, with their full length in bytes beside."""
    raw = record.raw
    if raw is None:
        raw = json.dumps(record.value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    line = {
        "file": str(record.place.path),
        "line": record.place.number,
        "reason": str(fault.reason),
        "field": fault.field,
        "message": fault.message,
        "raw": raw[:RAW_LIMIT].decode("utf-8", "backslashreplace"),
    }
    return line if len(raw) <= RAW_LIMIT else {**line, "raw_bytes": len(raw)}
