"""A batch of records to documents: the unit of work of tokenising, the same in this process and in any other.

What a batch becomes depends on nothing but its records and their number within the source, so any number of processes
gives the same documents, faults and counts. Lines of JSON come unparsed: parsing is part of the work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freight.config.schema import DataConfig, Truncation
from freight.data.documents import Document
from freight.data.read.jsonl import as_object, decode_utf8
from freight.data.read.records import RecordFault
from freight.data.read.strict_json import StrictDecoder
from freight.data.render.encode import EncodeCounts, SampleEncoder
from freight.data.render.formats import Sample, convert, rename_fields
from freight.data.render.messages import Conversation, left_out
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import Encoder
from freight.data.tokens.token_columns import DocumentColumns, columns_of, id_type_of

Content = dict[str, Any] | bytes | RecordFault


@dataclass(frozen=True)
class SourceRules:
    """How records of one source are read.

    Args:
        format: A key of `REQUIRED`.
        fields: Canonical field name -> column.
        policy: Truncation.
    """

    format: str
    fields: dict[str, str]
    policy: Truncation


class BatchTask(NamedTuple):
    """Records to encode.

    Args:
        rules: Of their source.
        first: Records of the source before these.
        records: Each parsed, as a line of JSON, or with the fault that a reader found.
    """

    rules: SourceRules
    first: int
    records: list[Content]


@dataclass
class EncodedBatch:
    """What a batch became.

    Args:
        num_documents: Of each record; 0 beside a fault.
        faults: By place in the batch.
        columns: The documents, in order.
        counts: What was noticed.
        ignored: Keys that are not used, with the number of records that have them.
        columns_seen: Renamed columns that a record has.
    """

    num_documents: list[int]
    faults: dict[int, RecordFault]
    columns: DocumentColumns
    counts: EncodeCounts
    ignored: Counter[str] = field(default_factory=Counter)
    columns_seen: set[str] = field(default_factory=set)


class BatchEncoder:
    """Encodes batches of records of any source of a run; can be sent to other processes.

    Args:
        config: The `data` section.
        encoder: The tokenizer.
        template: The chat template, if any.
        vocab_size: Rows of the model's embedding.
    """

    def __init__(self, config: DataConfig, encoder: Encoder, template: ChatTemplate | None, vocab_size: int) -> None:
        self._config = config
        self._encoder = encoder
        self._template = template
        self._vocab_size = vocab_size
        self._id_type = id_type_of(vocab_size)

    def __call__(self, task: BatchTask) -> EncodedBatch:
        """Encode one batch.

        Raises:
            DataError: The config does not fit the tokenizer, template or kind of record.
        """
        counts, ignored, seen = EncodeCounts(), Counter[str](), set[str]()
        samples = [read_record(record, task.rules, ignored, seen) for record in task.records]
        encoder = SampleEncoder(
            self._config, self._encoder, self._template, task.rules.policy, self._vocab_size, counts
        )
        numbers = [task.first + place for place, sample in enumerate(samples) if not isinstance(sample, RecordFault)]
        good = [sample for sample in samples if not isinstance(sample, RecordFault)]
        encoded = iter(encoder.encode(good, numbers))
        results = [sample if isinstance(sample, RecordFault) else next(encoded) for sample in samples]
        if self._template:
            for sample in good:
                if isinstance(sample, Conversation):
                    ignored.update(sorted(left_out(sample, self._template.mentions)))
        documents: list[Document] = []
        for result in results:
            if not isinstance(result, RecordFault):
                documents += result
        return EncodedBatch(
            [0 if isinstance(result, RecordFault) else len(result) for result in results],
            {place: result for place, result in enumerate(results) if isinstance(result, RecordFault)},
            columns_of(documents, self._id_type),
            counts,
            ignored,
            seen,
        )


def read_record(record: Content, rules: SourceRules, ignored: Counter[str], seen: set[str]) -> Sample | RecordFault:
    """A record as a sample, or its fault.

    Args:
        record: See `BatchTask`.
        rules: Of its source.
        ignored: Counts keys that are not used, once per record.
        seen: Gets the renamed columns that the record has.
    """
    try:
        value = parse_record(record)
        seen.update(value.keys() & rules.fields.values())
        keys: set[str] = set()
        sample = convert(rename_fields(value, rules.fields), rules.format, keys.add)
    except RecordFault as fault:
        return fault
    ignored.update(sorted(keys))
    return sample


def parse_record(record: Content) -> dict[str, Any]:
    """The record's object.

    Raises:
        RecordFault: There is none.
    """
    if isinstance(record, RecordFault):
        raise record
    if isinstance(record, bytes):
        return as_object(StrictDecoder().decode(decode_utf8(record)))
    return record
