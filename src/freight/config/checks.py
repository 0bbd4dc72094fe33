"""What must hold between keys of a configuration, without reading data, weights or the machine.

Two kinds: combinations that are wrong, and options that would do nothing. The second are faults only where the user
wrote the option: a default is nobody's mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freight.config.architecture import Architecture
from freight.config.data_checks import data_faults, known_pack_size, reads_packed, tokenises, two
from freight.config.keys import shown
from freight.config.memory_checks import memory_faults
from freight.config.messages import did_you_mean
from freight.config.schema import Config, DataConfig, ScheduleConfig, Source

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_NAME = re.compile(r".*\.(jsonl?|ndjson|parquet|arrow|txt|md|csv|tsv|gz|zst|bz2|xz|zip)", re.IGNORECASE)
_SOURCE_KEYS = ("data.train", "data.validation")
# What `wandb.init` takes, known here so that a slip is found before the run and without wandb.
_WANDB = (
    "entity", "project", "id", "name", "notes", "tags", "config_exclude_keys", "config_include_keys",
    "allow_val_change", "group", "job_type", "mode", "force", "anonymous", "reinit", "resume_from", "fork_from",
    "save_code", "tensorboard", "sync_tensorboard", "monitor_gym", "settings",
)  # fmt: skip
_WANDB_OURS = ("dir", "config", "resume")
_BATCH_KEYS = ("global_batch_size", "global_batch_documents", "global_batch_tokens")


def faults(config: Config) -> list[str]:
    """Everything wrong between the keys of a configuration, one sentence each."""
    return [*_model(config), *data_faults(config.data), *_train(config), *memory_faults(config), *_run(config)]


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
    if config.data.tokenizer is None and model.hf is None and tokenises(config.data):
        yield (
            "`data.tokenizer` is missing, and without `model.hf` there is none to take. Set it to a tokenizer folder, "
            "a tokenizer.json or a .gguf file."
        )


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
    train, row = config.train, known_pack_size(config.data)
    if row is None or (
        reads_packed(config.data) and (config.data.packing is None or config.data.packing.pack_size is None)
    ):
        return  # The row's size stands in the file.
    for key in ("micro_batch_tokens", "global_batch_tokens"):
        tokens = getattr(train, key)
        if tokens is not None and tokens % row:
            name = "pack_size" if config.data.packing else "`data.sequence_length`"
            yield (
                f"`train.{key}` must be a multiple of {name} = {row}; got {tokens}. "
                f"Use {two(tokens - tokens % row, tokens - tokens % row + row)}."
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
    yield from _wandb(log.wandb or {})
    steps = config.train.steps
    if log.profile is not None and steps is not None and log.profile.start_step >= steps:
        yield f"`log.profile.start_step` {log.profile.start_step} is never reached in {steps} steps. Use a smaller one."


def _wandb(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        key = f"`log.wandb.{name}`"
        if name in _WANDB_OURS:
            yield f"{key} is set by Freight itself; got {shown(value)}. Remove it."
        elif name not in _WANDB:
            yield (
                f"{key} is no argument of wandb.init; got {shown(value)}.{did_you_mean(name, _WANDB)} "
                f"Known: {', '.join(_WANDB)}."
            )


def fit_faults(config: Config, arch: Architecture) -> list[str]:
    """What a configuration asks of an architecture that it cannot do."""
    longest = config.data.sequence_length
    positions = arch.max_position_embeddings
    if longest is None or longest <= positions or reads_packed(config.data):
        return []  # The documents of a packed file may be shorter than its rows; the file tells.
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
