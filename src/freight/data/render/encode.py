"""Samples to documents: token ids, targets, BOS and EOS, length; and the checks that make a mask trustworthy.

Works in batches, since the tokenizer is fastest so; each record of a batch succeeds or fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freight.config.data_checks import longest_document
from freight.config.schema import DataConfig, Truncation
from freight.data.documents import Document, make_document
from freight.data.read.records import Reason, RecordFault, shorten
from freight.data.render.formats import PromptCompletion, Sample, Text
from freight.data.render.masks import TokenMask, mask_tokens
from freight.data.render.messages import Conversation, first_group, for_template
from freight.data.render.spans import Delimiters, Span, find_spans
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import Encoded, Encoder
from freight.data.render.truncation import TooLong, check_policy, shorten_document
from freight.data.render.turn_checks import check_turns, unwritten
from freight.errors import DataError

CHECKED_FIRST = 1000
CHECKED_EVERY = 100


@dataclass
class EncodeCounts:
    """What is reported after a run, beside the documents."""

    turns: int = 0
    ended_turns: int = 0
    straddling_tokens: int = 0
    straddling_example: str = ""
    trailing_unsupervised: int = 0
    documents_cut: int = 0
    tokens_cut: int = 0
    unwritten: int = 0
    unwritten_example: str = ""

    def add(self, other: EncodeCounts) -> None:
        """Take in what was noticed of the records that follow."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, mine or theirs if isinstance(mine, str) else mine + theirs)


@dataclass(frozen=True)
class Prepared:
    """A sample as texts to tokenise, with the characters that are supervised."""

    sample: Sample
    texts: list[str]
    spans: list[Span] = field(default_factory=list)


class SampleEncoder:
    """Encodes the samples of one source.

    Args:
        config: Rules of BOS, EOS and supervision.
        encoder: The tokenizer.
        template: Chat template; None if the source has no chats.
        policy: Truncation of this source.
        vocab_size: Rows of the model's embedding; every id must be below.
        counts: Filled in.

    Raises:
        DataError: BOS or EOS is asked for and the tokenizer has none.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder,
        template: ChatTemplate | None,
        policy: Truncation,
        vocab_size: int,
        counts: EncodeCounts,
    ) -> None:
        if config.bos == "always" and encoder.bos_id is None:
            raise DataError("data.bos is always, but the tokenizer has no BOS token; use auto or never")
        self._config = config
        self._encoder = encoder
        self._template = template
        self._policy: Truncation = policy
        self._vocab_size = vocab_size
        self._delimiters = delimiters_of(config)
        self.counts = counts

    def encode(
        self, samples: Sequence[Sample], numbers: Sequence[int] | None = None
    ) -> list[list[Document] | RecordFault]:
        """Documents of each sample, or why it has none.

        Args:
            samples: To encode.
            numbers: Of each sample's record within its source, from 0, which decide what is checked thoroughly; None =
                all are.
        """
        prepared = [self._prepare(sample) for sample in samples]
        texts = [text for item in prepared if isinstance(item, Prepared) for text in item.texts]
        encoded = iter(self._encoder.encode(texts))
        results: list[list[Document] | RecordFault] = []
        for number, item in zip(numbers or [0] * len(samples), prepared, strict=True):
            if isinstance(item, RecordFault):
                results.append(item)
                continue
            pieces = [next(encoded) for _ in item.texts]
            try:
                results.append(self._finish(item, pieces, thorough=is_checked(number)))
            except RecordFault as fault:
                results.append(fault)
        return results

    def _prepare(self, sample: Sample) -> Prepared | RecordFault:
        if isinstance(sample, Text):
            check_policy(self._policy, "text")
            return Prepared(sample, [sample.text])
        if isinstance(sample, PromptCompletion):
            check_policy(self._policy, "prompt_completion")
            return Prepared(sample, [sample.prompt, sample.completion])
        check_policy(self._policy, "chat")
        try:
            return self._render(sample)
        except RecordFault as fault:
            return fault

    def _render(self, conversation: Conversation) -> Prepared:
        template = self._template
        if template is None:
            raise DataError("the tokenizer has no chat template; set data.chat_template=FILE (shipped: chatml, plain)")
        conversation = for_template(conversation, template.mentions)
        turns = conversation.assistant_turns
        wanted = [turn for turn in turns if conversation.weights[turn]]
        if self._config.train_on == "last_assistant":
            wanted = wanted[-1:] if wanted and wanted[-1] == turns[-1] else []
        if self._config.train_on == "all" and len(wanted) == len(turns):
            text = template.render(conversation.messages, conversation.tools)
            return Prepared(conversation, [text], [Span(0, len(text), None)])
        if not wanted and self._config.train_on != "all":
            raise RecordFault(Reason.NO_TARGET, "", "no assistant turn is supervised")
        if self._config.train_on == "all":
            silent = [turn for turn in turns if not conversation.weights[turn]]
            text, spans = find_spans(template, conversation, silent, self._delimiters)
            return Prepared(conversation, [text], complement(spans, len(text)))
        text, spans = find_spans(template, conversation, wanted, self._delimiters)
        return Prepared(conversation, [text], spans)

    def _finish(self, prepared: Prepared, pieces: list[Encoded], *, thorough: bool) -> list[Document]:
        sample = prepared.sample
        if isinstance(sample, Conversation):
            document, mask = self._finish_chat(prepared, sample, pieces[0], thorough=thorough)
            self._count_chat(sample, prepared.texts[0], pieces[0], mask)
            if thorough and (missing := unwritten(sample, prepared.texts[0])):
                self.counts.unwritten += 1
                self.counts.unwritten_example = self.counts.unwritten_example or shorten(
                    sample.messages[missing[0]]["content"]
                )
        elif isinstance(sample, PromptCompletion):
            document = self._finish_pair(pieces[0], pieces[1])
        else:
            document = self._finish_text(pieces[0])
        self._check_ids(document)
        if document.num_targets == 0:
            raise RecordFault(Reason.NO_TARGET, "", "no token is supervised")
        limit = longest_document(self._config)
        if len(document) <= limit:
            return [document]
        if self._policy == "drop_oldest_turns" and isinstance(sample, Conversation):
            left = [self._drop_oldest_turns(sample, document)]
        else:
            front = int(self._encoder.bos_id is not None and document.ids[0] == self._encoder.bos_id)
            left = shorten_document(document, self._policy, limit, front)
        self.counts.documents_cut += 1
        self.counts.tokens_cut += len(document) - sum(map(len, left))
        return left

    def _finish_text(self, encoded: Encoded) -> Document:
        ids = joined(self._front(encoded.ids[:1], [self._encoder.bos_id]), encoded.ids, self._eos())
        return make_document(ids, np.ones(len(ids), dtype=np.bool_))

    def _finish_pair(self, prompt: Encoded, completion: Encoded) -> Document:
        front = self._front(prompt.ids[:1], self._encoder.front_ids)
        ids = joined(front, prompt.ids, completion.ids, self._eos())
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[0 if self._config.train_on == "all" else len(front) + len(prompt.ids) :] = True
        return make_document(ids, mask)

    def _finish_chat(
        self, prepared: Prepared, conversation: Conversation, encoded: Encoded, *, thorough: bool
    ) -> tuple[Document, TokenMask]:
        mask = mask_tokens(prepared.texts[0], encoded, prepared.spans, self._encoder.special_ids)
        if self._config.train_on != "all":
            check_turns(conversation, encoded, mask, self._encoder, thorough=thorough)
        ends = self._eos() if self._config.eos == "always" and self._lacks_end(conversation, mask) else []
        added = [token for token in self._encoder.front_ids if token == self._encoder.bos_id]
        front = self._front(encoded.ids[:1], added)
        ids = joined(front, encoded.ids, ends)
        targets = np.ones(len(ids), dtype=np.bool_)
        targets[: len(front)] = False
        targets[len(front) : len(front) + len(encoded.ids)] = mask.targets
        return make_document(ids, targets), mask

    def _lacks_end(self, conversation: Conversation, mask: TokenMask) -> bool:
        """Whether the conversation ends in a supervised assistant turn without an end token."""
        ends_in_answer = conversation.messages[-1]["role"] == "assistant"
        return ends_in_answer and bool(mask.turns) and not mask.turns[-1].ends

    def _front(self, first: Any, automatic: Sequence[int | None]) -> list[int]:
        """What goes before a document: never a second BOS."""
        bos = self._encoder.bos_id
        if self._config.bos == "never" or (bos is not None and list(first) == [bos]):
            return []
        chosen = [bos] if self._config.bos == "always" else automatic
        return [token for token in chosen if token is not None]

    def _eos(self) -> list[int]:
        if self._config.eos == "never":
            return []
        if self._encoder.eos_id is None:
            raise DataError("the tokenizer has no EOS token to end documents with; set data.eos=never")
        return [self._encoder.eos_id]

    def _check_ids(self, document: Document) -> None:
        worst = int(document.ids.max(initial=0))
        if worst >= self._vocab_size:
            size = self._encoder.size
            raise RecordFault(
                Reason.ID_OUT_OF_RANGE,
                "",
                f"token {worst} ({shorten(self._encoder.decode([worst]))}) is not below model.vocab_size "
                f"{self._vocab_size}; the tokenizer has {size} tokens: set model.vocab_size={max(size, worst + 1)}",
            )

    def _count_chat(self, conversation: Conversation, text: str, encoded: Encoded, mask: TokenMask) -> None:
        counts = self.counts
        counts.turns += len(mask.turns)
        counts.ended_turns += sum(turn.ends for turn in mask.turns)
        counts.ended_turns += self._config.eos == "always" and self._lacks_end(conversation, mask)
        counts.trailing_unsupervised += conversation.messages[-1]["role"] != "assistant"
        counts.straddling_tokens += len(mask.straddling)
        if mask.straddling and not counts.straddling_example:
            at = mask.straddling[0]
            counts.straddling_example = text[encoded.starts[at] : encoded.stops[at]]

    def _drop_oldest_turns(self, conversation: Conversation, document: Document) -> Document:
        """Render again without the oldest user..assistant groups until it fits; system and tools stay."""
        limit = longest_document(self._config)
        while (group := first_group(conversation.messages)) and len(document) > limit:
            conversation = conversation.without(*group)
            prepared = self._render(conversation)
            encoded = self._encoder.encode(prepared.texts)[0]
            document, _ = self._finish_chat(prepared, conversation, encoded, thorough=True)
        if len(document) > limit:
            raise TooLong(len(document), limit)
        return document


def is_checked(number: int) -> bool:
    """Whether the record of this number in its source, from 0, is decoded again: the first ones, then a sample."""
    return number < CHECKED_FIRST or number % CHECKED_EVERY == 0


def joined(*parts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids, end to end."""
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def delimiters_of(config: DataConfig) -> Delimiters | None:
    """`data.assistant_start` and `data.assistant_end`, which need each other.

    Raises:
        DataError: One without the other.
    """
    if not config.assistant_start and not config.assistant_end:
        return None
    if not config.assistant_start or not config.assistant_end:
        raise DataError("data.assistant_start and data.assistant_end need each other; set both")
    return Delimiters(config.assistant_start, config.assistant_end)


def complement(spans: Sequence[Span], length: int) -> list[Span]:
    """Everything that is in none of the spans."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), length]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Span(start, stop, None) for start, stop in pairs if start < stop]
