"""A small run, complete: what the ranks and the reference are both given, and nothing of the user's disk.

Documents are made up from numbers, so no tokenizer and no data are needed. Rows, steps and microbatches come from the
real packing and the real loader. The starting weights are those that a run draws, moved away from the values at which
errors hide: norms of one, biases and adapters of zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from freight.assemble.adapters import adapter_targets, add_adapter, init_adapter
from freight.config.architecture import Architecture
from freight.config.data_checks import algorithm, pack_size
from freight.config.load import config_from
from freight.config.model import architecture_of
from freight.config.schema import Config
from freight.data.documents import Document, InMemoryDocuments, make_document
from freight.data.load.loader import StepLoader
from freight.data.pack.document_rows import DocumentRows
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights

STEPS = 3
Dtype = Literal["fp64", "fp32", "bf16"]


@dataclass(frozen=True)
class Case:
    """A shrunk configuration with its data.

    Args:
        config: Shrunk.
        arch: What `config.model` means.
        documents: Whose rows fill three steps at least.
        data_ranks: Ranks with microbatches of their own.
        context_ranks: Ranks that share the tokens of one.
        dtype: Of masters (float32 for `bf16`) and arithmetic on the ranks; the reference is float64 always.
        device: `cpu` or `cuda`.
    """

    config: Config
    arch: Architecture
    documents: tuple[Document, ...]
    data_ranks: int = 1
    context_ranks: int = 1
    dtype: Dtype = "fp64"
    device: str = "cpu"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data_ranks * self.context_ranks

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.config.train.micro_batch_tokens or pack_size(self.config.data)

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of one microbatch."""
        return self.microbatch_tokens // pack_size(self.config.data)

    @property
    def rows_per_step(self) -> int:
        """Rows of a global batch."""
        assert self.config.train.global_batch_size is not None
        return self.config.train.global_batch_size

    @property
    def pad_rows(self) -> bool:
        """Whether every microbatch has the same number of tokens."""
        return self.config.data.packing is None or self.config.data.packing.pad_rows

    def changed(self, raw: dict[str, Any]) -> Case:
        """The same kind of run under another small configuration, with documents made for it.

        Raises:
            ConfigError: It cannot be.
        """
        config = config_from(raw)
        arch = architecture_of(config.model)
        documents = small_documents(config, arch.vocab_size, STEPS * (config.train.global_batch_size or 1))
        data = config.parallel.data_shard or 1
        return replace(
            self, config=config, arch=arch, documents=documents, data_ranks=data, context_ranks=config.parallel.context
        )

    def raw(self) -> dict[str, Any]:
        """The configuration as a file would have it."""
        return self.config.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def rows(self) -> DocumentRows:
        """The documents, packed as the configuration says."""
        data, packing = self.config.data, self.config.data.packing
        seed = self.config.train.seed if data.seed is None else data.seed
        return DocumentRows(
            InMemoryDocuments(self.documents),
            algorithm(data),
            pack_size(data),
            seed,
            packing_seed=packing.seed if packing else None,
            shuffle=data.shuffle,
            document_multiple=packing.document_multiple if packing else 1,
        )

    def loader(self, data_rank: int) -> StepLoader:
        """The real loader of one data rank, over three steps."""
        return StepLoader(
            self.rows(),
            rows_per_step=self.rows_per_step,
            micro_batch_tokens=self.microbatch_tokens,
            seed=self.config.train.seed,
            data_ranks=self.data_ranks,
            rank=data_rank,
            steps=STEPS,
            pad_rows=self.pad_rows,
        )


def small_documents(config: Config, vocab_size: int, rows: int) -> tuple[Document, ...]:
    """Documents of uneven lengths that fill some rows: some nearly as long as a row, some of a token or two.

    Prompts have no labels where the configuration trains on answers only, and one document has none at all.

    Args:
        config: Shrunk.
        vocab_size: Ids are below it.
        rows: To fill at least.
    """
    row, longest = pack_size(config.data), config.data.sequence_length or pack_size(config.data)
    multiple = config.data.packing.document_multiple if config.data.packing else 1
    longest -= longest % multiple
    made, tokens = [], 0
    wanted = rows if algorithm(config.data) == "none" else 2 * rows * row
    for number, length in enumerate(_lengths(longest)):
        done = len(made) >= wanted if algorithm(config.data) == "none" else tokens >= wanted
        if done:
            return tuple(made)
        ids = [(7 * i * i + 13 * i * (number + 1) + 5 * number) % vocab_size for i in range(length)]
        prompt = 1 if config.data.train_on == "all" or config.data.format == "text" else 1 + length // 3
        made.append(make_document(ids, [i >= prompt and number % 7 != 4 for i in range(length)]))
        tokens += -(-length // multiple) * multiple
    raise AssertionError("lengths never end")


def _lengths(longest: int) -> Iterator[int]:
    """Without end: long, short, middling and tiny documents in turn."""
    shares, number = (0.58, 0.12, 0.36, 1.0, 0.05, 0.25, 0.8, 0.3), 0
    while True:
        yield max(1, min(longest, round(longest * shares[number % len(shares)]) - number % 3))
        number += 1


@dataclass(frozen=True)
class Start:
    """What training starts from.

    Args:
        weights: float32 by the model's parameter names.
        trained: Names that get a gradient.
    """

    weights: Mapping[str, Tensor]
    trained: frozenset[str]


def drawn_weights(case: Case) -> Start:
    """The weights that a run would draw, adapter included, made whole in this process."""
    model = Decoder(case.arch)
    init_weights(model, case.config.train.seed)
    if case.config.adapter is not None:
        add_adapter(model, case.config.adapter, adapter_targets(case.config.adapter, case.arch), torch.float32)
        init_adapter(model, case.config.train.seed)
    named = dict(model.named_parameters())
    return Start(
        {name: parameter.detach() for name, parameter in named.items()},
        frozenset(name for name, parameter in named.items() if parameter.requires_grad),
    )


def moved(start: Start) -> Start:
    """Norms, biases and the zero half of adapters a little off, each by numbers of its own."""
    weights = {}
    for name, value in start.weights.items():
        if value.ndim == 1 or ".lora_B." in name:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value = value + 0.2 * torch.randn(value.shape, generator=generator)
        weights[name] = value
    return Start(weights, start.trained)
