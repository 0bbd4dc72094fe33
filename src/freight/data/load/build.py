"""From a configuration to rows: tokenise and pack in memory, or open a packed file and hold it against the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from freight.config.data_checks import algorithm, longest_document, pack_size
from freight.config.schema import DataConfig, Source
from freight.data.documents import Documents
from freight.data.load.open_packed import check_tokenising, for_validation, open_packed, packed_path
from freight.data.load.streaming import stream_rows
from freight.data.pack.document_rows import DocumentRows
from freight.data.pack.file_rows import FileRows
from freight.data.pack.packing import check_pack_size
from freight.data.pack.rows import RowSource
from freight.data.tokens.tokenise import tokenise
from freight.errors import ConfigError

Which = Literal["train", "validation"]
Progress = Callable[[int, int, str], None]


def open_rows(
    config: DataConfig,
    train_seed: int,
    which: Which,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    rejects_dir: Path | None,
    progress: Progress | None = None,
    data_ranks: int = 1,
    rank: int = 0,
) -> RowSource:
    """The rows of `data.train` or `data.validation`. Validation is never shuffled, streamed or mixed by weight.

    Those of validation are always `indexed`.

    Args:
        config: The `data` section.
        train_seed: Where `data.seed` is null.
        which: Which of the two.
        tokenizer: The run's tokenizer, with its chat template; None if the config names packed files only.
        vocab_size: The model's; no id may reach it.
        rejects_dir: Where records that cannot be used are listed; those of validation in `validation/` below it.
        progress: Called with done, total and a word.
        data_ranks: Ranks that share the shards of a stream; all other data every rank has whole.
        rank: This one.

    Raises:
        ConfigError: Keys that are missing, or contradict each other or the packed file.
        DataError: Data that cannot be used.
    """
    seed = data_seed(config, train_seed)
    check_tokenising(config)
    path = packed_path(config, which)
    if path is not None:
        file = open_packed(config, path, tokenizer, vocab_size, progress)
        return FileRows(file, seed, shuffle=config.shuffle and which == "train")
    if which == "validation":
        config = for_validation(config)
    check_sizes(config, pack_size(config))
    sources = config.train if which == "train" else config.validation
    if sources is None:
        raise ConfigError(f"`data.{which}` is missing. Name a file, a folder or a glob.")
    if tokenizer is None:
        raise ConfigError("`data.tokenizer` is missing; name a tokenizer folder, a tokenizer.json or a .gguf file.")
    if which == "validation" and rejects_dir is not None:
        rejects_dir = rejects_dir / which  # its sources may have the same names as those of training
    if which == "train" and config.streaming:
        return stream_rows(
            config, seed, tokenizer, vocab_size=vocab_size, rejects_dir=rejects_dir, data_ranks=data_ranks, rank=rank
        )
    config = config.model_copy(update={"streaming": False})
    documents = tokenise(sources, config, tokenizer, vocab_size=vocab_size, output_dir=rejects_dir, progress=progress)
    weights = weights_of(sources, documents) if which == "train" else None
    return pack_in_memory(documents, config, seed, shuffle=config.shuffle and which == "train", weights=weights)


def weights_of(sources: str | Sequence[str | Source], documents: Documents) -> dict[str, float] | None:
    """Weight of each source under the name it has among the documents; None if none has one."""
    if isinstance(sources, str):
        return None
    weights = {
        str(facts["name"]): source.weight
        for source, facts in zip(sources, documents.metadata["sources"], strict=True)
        if isinstance(source, Source) and source.weight is not None
    }
    return weights or None


def pack_in_memory(
    documents: Documents,
    config: DataConfig,
    seed: int,
    *,
    shuffle: bool,
    weights: Mapping[str, float] | None = None,
) -> DocumentRows:
    """Rows of tokenised documents as the config wants them.

    Args:
        documents: The documents.
        config: The `data` section.
        seed: Order of documents; also of packing, unless `data.packing.seed` is set.
        shuffle: False keeps the documents' order.
        weights: Of each source by name; None = every document once.
    """
    packing = config.packing
    return DocumentRows(
        documents,
        algorithm(config, documents.metadata["format"]),
        pack_size(config),
        seed,
        packing_seed=packing.seed if packing else None,
        shuffle=shuffle,
        document_multiple=packing.document_multiple if packing else 1,
        window_documents=packing.window_documents if packing else None,
        weights=weights,
    )


def data_seed(config: DataConfig, train_seed: int) -> int:
    """`data.seed`, by default the run's."""
    return train_seed if config.seed is None else config.seed


def check_sizes(config: DataConfig, pack_size: int) -> None:
    """What can be refused before any tokenising.

    Raises:
        ConfigError: Impossible sizes, or `split` with a chat format.
    """
    check_pack_size(pack_size, config.packing.document_multiple if config.packing else 1)
    longest = longest_document(config)
    if longest > pack_size:
        raise ConfigError(
            f"`data.sequence_length` {longest} > pack_size {pack_size}: a document must fit in a row. "
            f"Set data.sequence_length={pack_size}, or pack_size={longest}."
        )
    if config.format != "auto":
        algorithm(config, config.format)
