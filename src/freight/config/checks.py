"""What must hold between keys of a configuration, without reading data, weights or the machine.

Two kinds: combinations that are wrong, and options that would do nothing. The second are faults only where the user
wrote the option: a default is nobody's mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from freight.config.architecture import Architecture
from freight.config.model_checks import architecture_faults
from freight.config.schema import Config, DataConfig, ScheduleConfig, Source

__all__ = ["architecture_faults", "data_faults", "faults", "file_faults", "fit_faults"]

CHAT_FORMATS = ("messages", "conversations", "prompt_completion", "alpaca")
_SOURCE_KEYS = ("data.train", "data.validation")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_NAME = re.compile(r".*\.(jsonl?|ndjson|parquet|arrow|txt|md|csv|tsv|gz|zst|bz2|xz|zip)", re.IGNORECASE)
_BATCH_KEYS = ("global_batch_size", "global_batch_documents", "global_batch_tokens")


def faults(config: Config) -> list[str]:
    """Everything wrong between the keys of a configuration, one sentence each."""
    return [*_model(config), *data_faults(config.data), *_train(config), *_run(config)]


def pack_size(data: DataConfig) -> int:
    """Tokens of a row."""
    return (data.packing.pack_size if data.packing else None) or data.sequence_length


def algorithm(data: DataConfig) -> str:
    """Packing algorithm, defaults resolved; `format: auto` counts as chat until records have been seen."""
    if data.packing is None:
        return "none"
    return data.packing.algorithm or ("split" if data.format == "text" else "first_fit_shuffle")


def _model(config: Config) -> Iterator[str]:
    model = config.model
    spelled = model.model_fields_set - {"hf", "preset"}
    if model.hf is not None and model.preset is not None:
        yield f'`model.hf` and `model.preset` are both given ("{model.hf}", "{model.preset}"). Keep one.'
    if model.hf is None and model.preset is None and not spelled:
        yield (
            "`model` is missing. Set `model.hf` to a Hugging Face folder or .gguf file, `model.preset` to a shipped "
            "architecture such as `debug`, or spell the architecture out."
        )
    if config.data.tokenizer is None and model.hf is None and not _packed(config.data):
        yield (
            "`data.tokenizer` is missing, and without `model.hf` there is none to take. Set it to a tokenizer folder, "
            "a tokenizer.json or a .gguf file."
        )


def data_faults(data: DataConfig) -> Iterator[str]:
    """Faults between the keys of `data` alone."""
    yield from _sizes(data)
    yield from _formats(data)
    yield from _sources(data)
    yield from _streaming(data)
    yield from _without_effect(data)


def _packed(data: DataConfig) -> bool:
    return data.format == "packed" or (data.packing is not None and data.packing.file is not None)


def _sizes(data: DataConfig) -> Iterator[str]:
    packing = data.packing
    if packing is None:
        return
    size, multiple = packing.pack_size, packing.document_multiple
    if size is not None and size < data.sequence_length and packing.file is None:
        yield (
            f"`data.sequence_length` {data.sequence_length} > `data.packing.pack_size` {size}: a document "
            f"must fit in a row. Use `pack_size` {data.sequence_length} or more, or `sequence_length` {size}."
        )
    row = pack_size(data)
    if packing.file is None and row % multiple:
        below, above = row - row % multiple, row - row % multiple + multiple
        key = "data.packing.pack_size" if size else "data.sequence_length"
        yield (
            f"`{key}` must be a multiple of `data.packing.document_multiple` {multiple}; got {row}. "
            f"Use {_two(below, above)}."
        )


def _formats(data: DataConfig) -> Iterator[str]:
    chat = data.format if data.format in CHAT_FORMATS else None
    if chat and data.packing is not None and data.packing.algorithm == "split":
        yield (
            f"`data.packing.algorithm` split cuts answers from their prompts; got it with `data.format` {chat}. "
            "Use first_fit_shuffle."
        )
    if chat and data.truncation == "split":
        yield (
            f"`data.truncation` split cuts answers from their prompts; got it with `data.format` {chat}. "
            "Use drop, cut_right or drop_oldest_turns."
        )
    if chat and chat != "prompt_completion" and data.truncation == "cut_left":
        yield f"`data.truncation` cut_left is not for chats; got it with `data.format` {chat}. Use drop_oldest_turns."
    if data.format == "text":
        if data.truncation == "drop_oldest_turns":
            yield "`data.truncation` drop_oldest_turns needs chats; got it with `data.format` text. Use split or drop."
        if "train_on" in data.model_fields_set and data.train_on != "all":
            yield f"`data.train_on` {data.train_on} needs chats; `data.format` text trains on all. Remove it."
    if (data.assistant_start is None) != (data.assistant_end is None):
        given, lacking = ("start", "end") if data.assistant_start is not None else ("end", "start")
        yield f"`data.assistant_{given}` is given without `data.assistant_{lacking}`. Give both, or neither."


def _sources(data: DataConfig) -> Iterator[str]:
    """Weights: every source of training has one, or none has."""
    train = [source if isinstance(source, Source) else None for source in _entries(data.train)]
    without = [index for index, source in enumerate(train) if source is None or source.weight is None]
    if without and len(without) < len(train):
        yield (
            f"`data.train[{without[0]}]` has no `weight`, others have. Give every source one (its share of the "
            "documents), or none: then every record is read once."
        )
    if len(train) == 1 and not without:
        yield "`data.train[0].weight` has no effect on the only source. Remove it."
    for index, source in enumerate(_entries(data.validation)):
        if isinstance(source, Source) and source.weight is not None:
            yield f"`data.validation[{index}].weight` has no effect: validation reads every record once. Remove it."


def _entries(sources: str | tuple[str | Source, ...] | None) -> tuple[str | Source, ...]:
    return (sources,) if isinstance(sources, str) else sources or ()


def _streaming(data: DataConfig) -> Iterator[str]:
    if not data.streaming:
        if "shuffle_buffer" in data.model_fields_set:
            yield "`data.shuffle_buffer` has no effect without `data.streaming`: all documents are shuffled. Remove it."
        return
    if _packed(data):
        yield "`data.streaming` has no effect on a packed file, which is read at random. Remove it."
    if data.drop_last:
        yield "`data.drop_last` has no effect with `data.streaming`, whose stream has no end. Remove it."
    if data.cache_dir is not None and "cache_dir" in data.model_fields_set and data.validation is None:
        yield "`data.cache_dir` has no effect with `data.streaming`, which keeps nothing. Remove it."
    if data.packing is not None and "window_documents" in data.packing.model_fields_set:
        yield "`data.packing.window_documents` has no effect with `data.streaming`. Set `data.shuffle_buffer` instead."
    if any(isinstance(source, Source) and source.max_records is not None for source in _entries(data.train)):
        yield "`data.train[...].max_records` has no effect with `data.streaming`. Remove one of them."


# Keys that decide how text becomes tokens: a packed file holds tokens, so they can no longer do anything.
_TOKENISING = (
    "fields", "chat_template", "template_kwargs", "assistant_start", "assistant_end", "train_on", "truncation", "bos",
    "eos", "on_bad_record", "max_skipped_fraction",
)  # fmt: skip


def _without_effect(data: DataConfig) -> Iterator[str]:
    written = data.model_fields_set
    if _packed(data):
        for key in _TOKENISING:
            if key in written:
                yield f"`data.{key}` has no effect on a packed file, which holds tokens. Remove it."
    if data.on_bad_record == "error" and "max_skipped_fraction" in written and not _packed(data):
        yield "`data.max_skipped_fraction` has no effect with `data.on_bad_record: error`. Remove it, or use skip."
    packing = data.packing
    if packing is not None and packing.file is None and algorithm(data) == "none":
        for key in ("seed", "window_documents"):
            if key in packing.model_fields_set and getattr(packing, key) is not None:
                yield f"`data.packing.{key}` has no effect with algorithm `none`. Remove it."
    seeded = packing is not None and packing.file is None and algorithm(data) not in ("none", "split")
    if not data.shuffle and data.seed is not None and (not seeded or (packing and packing.seed is not None)):
        yield "`data.seed` has no effect with `data.shuffle: false`. Remove it, or shuffle."
    if data.num_workers == 0 and "prefetch_batches" in written:
        yield "`data.prefetch_batches` has no effect with `data.num_workers: 0`. Remove it, or use a worker."


def _train(config: Config) -> Iterator[str]:
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        got = "neither" if train.steps is None else f"{train.steps} and {train.epochs:g}"
        yield f"exactly one of `train.steps` and `train.epochs` must be set; got {got}. Set one, the other null."
    given = [key for key in _BATCH_KEYS if getattr(train, key) is not None]
    if len(given) != 1:
        got = " and ".join(f"{key} {getattr(train, key)}" for key in given) or "none"
        yield (
            "exactly one of `train.global_batch_size` (rows), `train.global_batch_documents` and "
            f"`train.global_batch_tokens` must be set; got {got}. Keep one."
        )
    yield from _batch(config)
    if config.data.streaming:
        if train.epochs is not None:
            yield f"`train.epochs` {train.epochs:g} needs the number of documents; streaming never knows it. Use steps."
        if train.global_batch_documents is not None and config.data.packing is not None:
            yield (
                f"`train.global_batch_documents` {train.global_batch_documents} needs the documents per row, which "
                "streaming does not know ahead. Use global_batch_tokens."
            )
    yield from schedule_faults(train.schedule, train.steps)
    if train.evaluate_every_steps is not None and config.data.validation is None:
        yield "`train.evaluate_every_steps` has no effect without `data.validation`. Set the latter, or use null."
    low, high = train.optimizer.betas
    for beta in (low, high):
        if not 0 <= beta < 1:
            yield f"`train.optimizer.betas` must be at least 0 and below 1; got {beta:g}. Use for example [0.9, 0.95]."


def _batch(config: Config) -> Iterator[str]:
    train, row = config.train, pack_size(config.data)
    if _packed(config.data) and (config.data.packing is None or config.data.packing.pack_size is None):
        return  # The row's size stands in the file.
    for key in ("micro_batch_tokens", "global_batch_tokens"):
        tokens = getattr(train, key)
        if tokens is not None and tokens % row:
            name = "pack_size" if config.data.packing else "`data.sequence_length`"
            yield (
                f"`train.{key}` must be a multiple of {name} = {row}; got {tokens}. "
                f"Use {_two(tokens - tokens % row, tokens - tokens % row + row)}."
            )


def schedule_faults(schedule: ScheduleConfig, steps: int | None) -> Iterator[str]:
    """Faults of `train.schedule`, given the number of steps where it is known."""
    written, name = schedule.model_fields_set, schedule.name
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield (
            "`train.schedule.warmup_steps` and `train.schedule.warmup_ratio` both set the warm-up; got "
            f"{schedule.warmup_steps} and {schedule.warmup_ratio:g}. Keep one."
        )
    if name == "wsd" and schedule.decay_steps is None and schedule.stable_steps is None:
        yield "`train.schedule` wsd needs decay_steps or stable_steps; got neither. Set one of them."
    if schedule.stable_steps is not None and name != "wsd":
        yield f"`train.schedule.stable_steps` has no effect with `name: {name}`. Remove it, or use wsd."
    if schedule.decay_steps is not None and name == "constant":
        yield "`train.schedule.decay_steps` has no effect with `name: constant`. Remove it, or use linear."
    if "min_lr_ratio" in written and name == "constant":
        yield "`train.schedule.min_lr_ratio` has no effect with `name: constant`. Remove it, or use cosine."
    if steps is None:
        return
    parts = {
        key: getattr(schedule, key) or 0
        for key in ("warmup_steps", "stable_steps", "decay_steps")
        if not (key == "decay_steps" and name == "constant") and not (key == "stable_steps" and name != "wsd")
    }
    if sum(parts.values()) > steps:
        given = " + ".join(f"`train.schedule.{key}` {value}" for key, value in parts.items() if value)
        yield f"{given} must be at most the run's {steps} steps; got {sum(parts.values())}. Shorten, or train longer."


def _run(config: Config) -> Iterator[str]:
    checkpoint, attention, log = config.checkpoint, config.attention, config.log
    if checkpoint.every_steps is None and not checkpoint.save_final:
        for key, name in (("dir", "dir"), ("keep", "keep"), ("asynchronous", "async")):
            if key in checkpoint.model_fields_set:
                yield f"`checkpoint.{name}` has no effect: nothing is saved. Set `every_steps` or `save_final`."
    if attention.backend != "auto" and attention.backend in attention.disable:
        yield f"`attention.backend` {attention.backend} is in `attention.disable`. Remove it there, or use auto."
    elif attention.backend != "auto" and attention.disable:
        yield f"`attention.disable` has no effect with `backend: {attention.backend}`. Remove it, or use auto."
    steps = config.train.steps
    if log.profile is not None and steps is not None and log.profile.start_step >= steps:
        yield f"`log.profile.start_step` {log.profile.start_step} is never reached in {steps} steps. Use a smaller one."


def fit_faults(config: Config, arch: Architecture) -> list[str]:
    """What a configuration asks of an architecture that it cannot do."""
    longest = config.data.sequence_length
    positions = arch.max_position_embeddings
    if longest <= positions:
        return []
    fix = f"Use `data.sequence_length` {positions}"
    if arch.position_embedding == "rope":
        fix += ", or stretch the positions with `model.max_position_embeddings` and `model.rope.scaling`"
    return [f"`data.sequence_length` must be at most the model's {positions} positions; got {longest}. {fix}."]


def file_faults(config: Config) -> list[str]:
    """Files a configuration names that do not exist; relative paths count from the working folder."""
    named = [("model.hf", config.model.hf), *_data_files(config.data)]
    return [
        f'`{key}` "{path}" does not exist. Give an existing path (relative ones count from the working folder).'
        for key, path in named
        if path is not None and not _exists(path) and not (key.startswith(_SOURCE_KEYS) and is_hub_name(path))
    ]


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist may be `owner/name` on the Hugging Face Hub; if it is shows the reader."""
    return _HUB_NAME.fullmatch(path) is not None and _FILE_NAME.fullmatch(path) is None


def _data_files(data: DataConfig) -> Iterator[tuple[str, str | None]]:
    for key in ("train", "validation"):
        value = getattr(data, key)
        for index, source in enumerate(value if isinstance(value, tuple) else (value,)):
            name = f"data.{key}[{index}]" if isinstance(value, tuple) else f"data.{key}"
            if isinstance(source, Source):
                yield f"{name}.path", source.path
            else:
                yield name, source
    yield "data.tokenizer", data.tokenizer
    if data.packing is not None:
        yield "data.packing.file", data.packing.file


def _exists(path: str) -> bool:
    if any(mark in path for mark in "*?["):
        return True  # A pattern; an empty match is reported by the reader, with the folder's names.
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError):
        return False


def _two(below: int, above: int) -> str:
    return f"{below} or {above}" if below > 0 else f"{above}"
