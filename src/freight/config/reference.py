"""The configuration reference, made from the schema: JSON schema for editors, markdown for people.

`python -m freight.config.reference > docs/configuration.md` rewrites the committed page; a test holds the two equal.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic.fields import FieldInfo

from freight.config.aliases import ALIASES, LACKING
from freight.config.architecture import Architecture, RopeConfig, RopeScaling
from freight.config.base import Section
from freight.config.keys import allowed, fields_of, known, section_in, with_bounds
from freight.config.presets import preset, preset_names
from freight.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FpdtConfig,
    LogConfig,
    ModelSource,
    OffloadConfig,
    OptimizerConfig,
    OverlapConfig,
    PackingConfig,
    ParallelConfig,
    ProfileConfig,
    RecomputeConfig,
    ScheduleConfig,
    Source,
    TrainConfig,
)

# Key at which a section stands -> the section; the order of the page.
SECTIONS: dict[str, type[Section]] = {
    "model": ModelSource,
    "model.": Architecture,
    "model.rope": RopeConfig,
    "model.rope.scaling": RopeScaling,
    "data": DataConfig,
    "data.train[]": Source,
    "data.packing": PackingConfig,
    "adapter": AdapterConfig,
    "train": TrainConfig,
    "train.optimizer": OptimizerConfig,
    "train.schedule": ScheduleConfig,
    "attention": AttentionConfig,
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "offload": OffloadConfig,
    "fpdt": FpdtConfig,
    "overlap": OverlapConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "log.profile": ProfileConfig,
}

# What becomes a key of ours only together with others -> where it ends up.
_DERIVED = {
    "train.per_device_train_batch_size": "train.micro_batch_tokens",
    "train.gradient_accumulation_steps": "train.micro_batch_tokens",
    "fpdt.ffn_chunk_tokens_of_rank": "fpdt.ffn_chunk_tokens",
    "parallel.cp_comm_type": "parallel.context_method",
}

_HEAD = """\
# Configuration

One YAML file with the sections `model`, `data` and `train`, and if wanted `adapter`, `attention`, `parallel`,
`recompute`, `offload`, `fpdt`, `overlap`, `checkpoint` and `log`. Any key can be set on the command line:
`freight train run.yaml train.steps=10 data.packing.pack_size=4096`.
`${section.key}` takes the value of another key. `null` is off.

`freight check run.yaml` names every fault of a file at once and prints what the file means in words. `freight schema`
prints a JSON schema, with which editors complete and check:

```yaml
# yaml-language-server: $schema=freight.schema.json
model: {preset: debug, vocab_size: 49152}
data:
  train: chats.jsonl
  tokenizer: models/smollm2
  sequence_length: 2048
  packing: {algorithm: first_fit_shuffle}
train:
  epochs: 1
  global_batch_documents: 32
  optimizer: {lr: 2.0e-5}
```

This page is made from the schema.
"""


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema(by_alias=True)}


def page() -> str:
    """The whole markdown page."""
    parts = [_HEAD]
    for key, section in SECTIONS.items():
        title = "`model`, spelled out" if key == "model." else f"`{key}`"
        parts += [f"## {title}\n", f"{(section.__doc__ or '').strip()}\n", options_table(section)]
    parts += ["## Presets\n", _presets(), "## Names of other trainers\n", _aliases()]
    return "\n".join(parts)


def options_table(section: type[Section]) -> str:
    """Key, accepted values, default and meaning of every key of a section, as a markdown table."""
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields_of(section).items():
        cells = (
            f"`{name}`",
            _cell(allowed(with_bounds(field))),
            _default(field),
            _cell(field.description or _doc(field)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return "see below"
    text = json.dumps(value) if not isinstance(value, (str, tuple)) else value if value else "[]"
    return f"`{list(text) if isinstance(text, tuple) else text}`"


def _doc(field: FieldInfo) -> str:
    section = section_in(field.annotation)
    return (section.__doc__ or "").strip() if section else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _presets() -> str:
    rows = [
        "| `model.preset` | layers | hidden | heads | KV heads | vocabulary | positions |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        arch = preset(name)
        rows.append(
            f"| `{name}` | {arch.num_layers} | {arch.hidden_size} | {arch.num_attention_heads} | {arch.groups} | "
            f"{arch.vocab_size} | {arch.max_position_embeddings} |"
        )
    return "\n".join(rows) + "\n"


def _aliases() -> str:
    lines = [
        "Names of NeMo, Megatron, axolotl and TRL are understood wherever they stand, each with a one-line notice. Two "
        "spellings that disagree are an error.\n",
        "| name | read as |",
        "|---|---|",
    ]
    for name, alias in ALIASES.items():
        ours = alias.key if known(Config, tuple(alias.key.split("."))) else _DERIVED[alias.key]
        lines.append(f"| `{name}` | `{ours}` |")
    lines += [
        "",
        "Names of features that this version does not have are dropped with a notice where their value switches the "
        f"feature off, and refused otherwise: {', '.join(f'`{name}`' for name in LACKING)}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
