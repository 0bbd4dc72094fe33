"""The sections of a configuration file, one class each, with their defaults.

What a key means stands in its description, from which `freight schema` and the configuration reference are made.
Checks of one key live here; checks across keys live in `config/checks.py` (no arithmetic on the machine) and
`planner/resolve.py` (everything that needs a world size or a dataset).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, create_model

from freight.config.architecture import Architecture
from freight.config.base import Section


class ModelSource(Section):
    """Where the architecture and weights come from; any key of `Architecture` beside it overrides."""

    hf: str | None = Field(None, description="Hugging Face folder or .gguf file: architecture and weights.")
    preset: str | None = Field(None, description="Name of a shipped architecture, with random weights.")


# Every key of Architecture again, optional: only what the user wrote is set, and it wins over `hf` or `preset`.
ModelSection = create_model(
    "ModelSection",
    __base__=ModelSource,
    __doc__="The model: `hf`, `preset`, or the architecture spelled out.",
    **{
        name: (info.annotation | None, Field(None, description=info.description))  # pyright: ignore
        for name, info in Architecture.model_fields.items()
    },
)

Algorithm = Literal["first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing", "none", "split"]
Format = Literal["auto", "messages", "conversations", "prompt_completion", "alpaca", "text", "packed"]
Truncation = Literal["error", "drop", "cut_right", "cut_left", "drop_oldest_turns", "split"]


class Source(Section):
    """One source of records."""

    path: str
    name: str | None = None
    split: str = "train"
    weight: float | None = Field(None, gt=0)
    format: Format | None = None
    fields: dict[str, str] = {}
    max_records: int | None = Field(None, ge=1)


class PackingConfig(Section):
    """How documents share rows."""

    algorithm: Algorithm | None = Field(None, description="null = first_fit_shuffle, or split for text.")
    pack_size: int | None = Field(None, ge=2, description="Tokens of a row; null = data.sequence_length.")
    seed: int | None = Field(None, description="null = data.seed.")
    document_multiple: int = Field(1, ge=1, description="Each span is padded to a multiple of it.")
    window_documents: int | None = Field(1_000_000, ge=1, description="Documents packed together; null = an epoch.")
    file: str | None = Field(None, description="A packed file; the keys above then come from it.")
    pad_rows: bool = Field(True, description="Every microbatch has exactly micro_batch_tokens tokens.")


class DataConfig(Section):
    """From files to microbatches."""

    train: str | tuple[str | Source, ...] = Field(description="File, folder, glob, or a list of sources.")
    validation: str | tuple[str | Source, ...] | None = None
    format: Format = "auto"
    fields: dict[str, str] = {}
    tokenizer: str | None = Field(None, description="Folder, tokenizer.json or .gguf; null = model.hf.")
    chat_template: str | None = Field(None, description="Jinja file or text, `chatml`, `plain`; null = tokenizer's.")
    template_kwargs: dict[str, Any] = {}
    assistant_start: str | None = Field(None, description="Delimiter before assistant text; for templates that rewrite.")
    assistant_end: str | None = None
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    sequence_length: int = Field(ge=2, description="Largest document, in input tokens.")
    truncation: Truncation | None = Field(None, description="null = error, or split for text.")
    bos: Literal["auto", "always", "never"] = "auto"
    eos: Literal["auto", "always", "never"] = "auto"
    on_bad_record: Literal["error", "skip"] = "error"
    max_skipped_fraction: float = Field(0.01, ge=0, le=1)
    shuffle: bool = True
    seed: int | None = Field(None, description="null = train.seed.")
    drop_last: bool = False
    num_workers: int = Field(2, ge=0, description="0 = in the process; results are identical.")
    prefetch_batches: int = Field(2, ge=1)
    cache_dir: str | None = Field("~/.cache/freight", description="null = nothing is written.")
    allow_changed: bool = Field(False, description="On resume, accept data that changed; the epoch restarts.")
    packing: PackingConfig | None = None


class OptimizerConfig(Section):
    """AdamW as torch has it."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    state_dtype: Literal["fp32"] = "fp32"


class ScheduleConfig(Section):
    """Learning rate over optimizer steps; step s counts from 0."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    decay_steps: int | None = Field(None, ge=0)
    stable_steps: int | None = Field(None, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)


class TrainConfig(Section):
    """The loop."""

    steps: int | None = Field(None, ge=1, description="Optimizer steps; this or epochs.")
    epochs: float | None = Field(None, gt=0)
    global_batch_size: int | None = Field(None, ge=1, description="Rows per step; one of the three.")
    global_batch_documents: int | None = Field(None, ge=1)
    global_batch_tokens: int | None = Field(None, ge=1)
    micro_batch_tokens: int | None = Field(None, ge=1, description="null = pack_size, or sequence_length.")
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["bf16", "fp32"] = "bf16"
    grad_clip: float | None = Field(1.0, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    z_loss_coeff: float | None = Field(None, gt=0)
    loss_chunk_tokens: int = Field(512, ge=1, description="Label tokens whose logits exist at one time.")
    max_nonfinite_steps: int = Field(3, ge=1)
    seed: int = 0
    compile: bool = False
    evaluate_every_steps: int | None = Field(None, ge=1)


BackendName = Literal["math", "cpu_flash", "flash", "flash_attn", "cudnn", "efficient"]


class AttentionConfig(Section):
    """Which kernels compute attention; results agree to rounding."""

    backend: Literal["auto", "math", "cpu_flash", "flash", "flash_attn", "cudnn", "efficient"] = "auto"
    disable: tuple[BackendName, ...] = ()
    deterministic: bool = False


class CheckpointConfig(Section):
    """Saved state."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    dir: str | None = Field(None, description="null = <log.dir>/checkpoints.")
    every_steps: int | None = Field(None, ge=1)
    keep: int = Field(2, ge=1)
    asynchronous: bool = Field(True, alias="async", description="Write while training goes on.")
    save_final: bool = True


class ProfileConfig(Section):
    """A torch.profiler trace of some steps."""

    start_step: int = Field(ge=0)
    steps: int = Field(ge=1)


class LogConfig(Section):
    """The run folder."""

    dir: str | None = Field(None, description="null = runs/<config name>.")
    every_steps: int = Field(1, ge=1)
    tensorboard: bool = True
    wandb: dict[str, Any] | None = None
    profile: ProfileConfig | None = None


class Config(Section):
    """A whole configuration file."""

    model: ModelSection  # pyright: ignore[reportInvalidTypeForm]
    data: DataConfig
    train: TrainConfig
    attention: AttentionConfig = AttentionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
