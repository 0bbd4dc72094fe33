"""The sections of a configuration file, one class each, with their defaults.

What a key means stands in its description, from which `freight schema` and the configuration reference are made.
Checks of one key live here; checks across keys live in `config/checks.py` (no arithmetic on the machine) and
`planner/resolve.py` (everything that needs a world size or a dataset).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from freight.config.architecture import Architecture
from freight.config.base import Section


class ModelSource(Section):
    """Where the architecture and weights come from; any key of `Architecture` beside it overrides."""

    hf: str | None = Field(default=None, description="Hugging Face folder or .gguf file: architecture and weights.")
    preset: str | None = Field(default=None, description="Name of a shipped architecture, with random weights.")


# Every key of Architecture again with its bounds, optional: only what the user wrote is set, and it wins over `hf`
# or `preset`.
ModelSection = create_model(
    "ModelSection",
    __base__=ModelSource,
    __doc__="The model: `hf`, `preset`, or the architecture spelled out.",
    **{
        name: (
            Annotated[info.annotation, *info.metadata] | None if info.metadata else info.annotation | None,  # pyright: ignore
            Field(default=None, description=info.description),
        )
        for name, info in Architecture.model_fields.items()
    },
)

Algorithm = Literal["first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing", "none", "split"]
Format = Literal["auto", "messages", "conversations", "prompt_completion", "alpaca", "text", "packed"]
Truncation = Literal["error", "drop", "cut_right", "cut_left", "drop_oldest_turns", "split"]


class Source(Section):
    """One source of records."""

    path: str = Field(description="File, folder, glob, or a name on the Hugging Face Hub.")
    glob: str | None = Field(default=None, description="Chooses files of the folder: `*.jsonl`; null = all.")
    name: str | None = Field(default=None, description="Name in reports; null = the path.")
    split: str | None = Field(default=None, description="Split of a Hub or saved data set; null = train.")
    weight: float | None = Field(default=None, gt=0, description="Share of documents; null = every record once.")
    format: Format | None = Field(default=None, description="null = data.format.")
    fields: dict[str, str] = Field(default_factory=dict, description="Renames columns, over data.fields.")
    max_records: int | None = Field(default=None, ge=1, description="Only the first records; null = all.")


class PackingConfig(Section):
    """How documents share rows."""

    algorithm: Algorithm | None = Field(default=None, description="null = first_fit_shuffle, or split for text.")
    pack_size: int | None = Field(default=None, ge=2, description="Tokens of a row; null = data.sequence_length.")
    seed: int | None = Field(default=None, description="Decides order and ties; null = data.seed.")
    document_multiple: int = Field(default=1, ge=1, description="Each span is padded to a multiple of it.")
    window_documents: int | None = Field(
        default=1_000_000, ge=1, description="Documents packed together; null = an epoch."
    )
    file: str | None = Field(default=None, description="A packed file; the keys above then come from it.")
    npy_mask: Literal["token", "label"] | None = Field(
        default=None, description="What entry i of an .npy file's loss_mask is about: token i, or the label after it."
    )
    pad_rows: bool = Field(default=True, description="Every microbatch has exactly micro_batch_tokens tokens.")


class DataConfig(Section):
    """From files to microbatches."""

    train: str | tuple[str | Source, ...] | None = Field(
        default=None, description="File, folder, glob, or a list of sources; needed unless packing.file is set."
    )
    validation: str | tuple[str | Source, ...] | None = Field(
        default=None, description="Held-out data, in the same forms; null = no evaluation."
    )
    format: Format = Field(default="auto", description="auto looks at the first 100 records of each source.")
    fields: dict[str, str] = Field(default_factory=dict, description="Renames columns: `{text: body}`.")
    tokenizer: str | None = Field(default=None, description="Folder, tokenizer.json or .gguf; null = model.hf.")
    chat_template: str | None = Field(
        default=None, description="Jinja file or text, `chatml`, `plain`; null = the tokenizer's."
    )
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template.")
    assistant_start: str | None = Field(
        default=None, description="Text before each assistant turn; for templates that rewrite history."
    )
    assistant_end: str | None = Field(default=None, description="Text after each assistant turn.")
    train_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant", description="What the loss sees; text trains on all."
    )
    sequence_length: int | None = Field(
        default=None, ge=2, description="Longest document, in input tokens; needed unless all data is packed."
    )
    truncation: Truncation | None = Field(
        default=None, description="What happens to longer documents; null = error, or split for text."
    )
    bos: Literal["auto", "always", "never"] = Field(default="auto", description="One BOS in front of each document.")
    eos: Literal["auto", "always", "never"] = Field(default="auto", description="One EOS at the end of each document.")
    on_bad_record: Literal["error", "skip"] = Field(
        default="error", description="skip writes it to the rejects file and counts it."
    )
    max_skipped_fraction: float = Field(
        default=0.01, ge=0, le=1, description="Share of skipped records above which the run stops."
    )
    shuffle: bool = Field(default=True, description="A new order every epoch.")
    seed: int | None = Field(default=None, description="null = train.seed.")
    drop_last: bool = Field(default=False, description="Leave out a short last step of an epoch.")
    num_workers: int = Field(default=2, ge=0, description="0 = in the process; results are identical.")
    prefetch_batches: int = Field(default=2, ge=1, description="Steps built ahead, by all workers together.")
    cache_dir: str | None = Field(default="~/.cache/freight", description="Tokenised data; null = nothing is written.")
    streaming: bool = Field(default=False, description="Tokenise while training; for data too large to index.")
    shuffle_buffer: int = Field(default=10_000, ge=1, description="Documents that streaming shuffles together.")
    allow_changed: bool = Field(
        default=False, description="On resume, accept data that changed; the epoch starts again."
    )
    packing: PackingConfig | None = Field(default=None, description="null = one document per row, padded.")


class OptimizerConfig(Section):
    """AdamW as torch has it."""

    name: Literal["adamw"] = Field(default="adamw", description="Fused where torch has it.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Decay of both moments.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(default=0.1, ge=0, description="On weights of two or more dims only.")


class ScheduleConfig(Section):
    """Learning rate over optimizer steps; step s counts from 0."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="Shape after the warm-up; wsd = warm-up, stable, decay."
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Step s runs at (s + 1) / warmup_steps.")
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1, description="The same as a share of all steps.")
    decay_steps: int | None = Field(default=None, ge=0, description="null = all steps after the warm-up.")
    stable_steps: int | None = Field(default=None, ge=0, description="wsd only; null = what the others leave.")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Where the decay ends, as a share of lr.")


class TrainConfig(Section):
    """The loop."""

    steps: int | None = Field(default=None, ge=1, description="Optimizer steps; this or epochs.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the documents; this or steps.")
    global_batch_size: int | None = Field(default=None, ge=1, description="Rows per step; one of the three.")
    global_batch_documents: int | None = Field(
        default=None, ge=1, description="Documents per step, translated into rows; one of the three."
    )
    global_batch_tokens: int | None = Field(default=None, ge=1, description="Tokens per step; one of the three.")
    micro_batch_tokens: int | None = Field(
        default=None, ge=1, description="Tokens computed at one time; null = one row. Changes cost, not results."
    )
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="bf16 computes in bfloat16 and keeps float32 master weights."
    )
    grad_clip: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null = off.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Share of the target spread over all tokens.")
    z_loss_coeff: float | None = Field(default=None, gt=0, description="Weight of log(Z)^2; null = off.")
    loss_chunk_tokens: int = Field(
        default=512, ge=1, description="Label tokens whose logits exist at one time. Changes cost, not results."
    )
    max_nonfinite_steps: int = Field(
        default=3, ge=1, description="Steps skipped in a row for non-finite gradients before the run stops."
    )
    seed: int = Field(default=0, description="Everything random derives from it.")
    compile: bool = Field(default=False, description="torch.compile the token-wise parts of blocks.")
    evaluate_every_steps: int | None = Field(default=None, ge=1, description="null = at the end only.")


BackendName = Literal["math", "cpu_flash", "flash", "flash_attn", "cudnn", "efficient"]


class AttentionConfig(Section):
    """Which kernels compute attention; results agree to rounding."""

    backend: Literal["auto", "math", "cpu_flash", "flash", "flash_attn", "cudnn", "efficient"] = Field(
        default="auto", description="auto takes the fastest that is able."
    )
    disable: tuple[BackendName, ...] = Field(default=(), description="Never used by auto.")
    deterministic: bool = Field(default=False, description="Only kernels whose backward is deterministic.")


class AdapterConfig(Section):
    """Small trained matrices beside frozen weights."""

    type: Literal["lora"] = Field(default="lora", description="`W x + scale * B A x` with W frozen.")
    rank: int = Field(default=16, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(default=32, gt=0, description="scale = alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of the inputs of A dropped in training.")
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear",
        description="all-linear (without head and router), a list of names (exact, or ends after a dot), or a regex "
        "that matches whole names. Freight's names and the Hugging Face family's both count.",
    )
    layers: tuple[int, ...] | None = Field(default=None, description="Only these layers, from 0; null = all.")
    use_rslora: bool = Field(default=False, description="scale = alpha / sqrt(rank).")
    use_dora: bool = Field(default=False, description="Also train the length of every row of the weight.")
    modules_to_save: tuple[str, ...] = Field(
        default=(), description="Modules trained in full and saved with the adapter, such as embed_tokens."
    )


class ParallelConfig(Section):
    """How ranks share the work; results do not change. Start them with torchrun, or `freight train --ranks N`."""

    data_shard: int | None = Field(
        default=None, ge=1, description="Ranks with other microbatches and a shard of everything; null = the rest."
    )
    context: int = Field(default=1, ge=1, description="Ranks that share the tokens of a microbatch.")
    context_method: Literal["auto", "ring", "all_gather", "ulysses", "hybrid"] = Field(
        default="auto", description="How attention reaches tokens of other ranks."
    )
    ulysses: int | None = Field(
        default=None, ge=1, description="Ranks of a row that exchange heads, in hybrid; null = decided by heads."
    )
    timeout_seconds: int = Field(default=600, ge=1, description="After which a rank that waits for others gives up.")


class RecomputeConfig(Section):
    """Activations that are dropped in forward and computed again in backward; bit-equal results."""

    granularity: Literal["full"] = Field(description="full keeps only the input of a layer.")
    method: Literal["uniform"] = Field(default="uniform", description="uniform recomputes all layers.")
    num_layers: Literal[1] = Field(default=1, description="Layers recomputed together.")


class OffloadConfig(Section):
    """Where recomputed and streamed layers keep their inputs; bit-equal results."""

    layer_inputs: Literal["none", "host", "disk"] = Field(
        default="none", description="Where `recompute` keeps layer inputs; none = on the device."
    )
    directory: str | None = Field(default=None, description="For disk: an existing folder, best on local NVMe.")
    prefetch_groups: int = Field(default=1, ge=1, description="Layer inputs fetched ahead in backward.")


class FpdtConfig(Section):
    """Whole layers streamed chunk by chunk; `{}` is on with defaults. Changes cost, not results."""

    chunk_tokens: int | Literal["auto"] = Field(
        default="auto", description="Tokens of a chunk over all context ranks; auto = 65536, at most a quarter row."
    )
    ffn_chunk_tokens: int | Literal["auto"] | None = Field(
        default="auto", description="Tokens that go through the MLP together; auto = half a chunk, null = a chunk."
    )
    loss_chunk_tokens: int | Literal["auto"] | None = Field(
        default="auto", description="Tokens whose logits exist together; auto = max(1024, chunk/32), null = a chunk."
    )
    offload: Literal["none", "host", "disk"] = Field(
        default="none", description="Where hidden states, their gradients and attention outputs go."
    )
    kv: Literal["auto", "device", "offload"] = Field(
        default="auto", description="Where keys, values and their gradients of a layer live."
    )
    save_attention: Literal["none", "context", "all"] = Field(
        default="context", description="What backward finds of attention: nothing, outputs, or keys and values too."
    )


class OverlapConfig(Section):
    """What travels while something is computed; the same bits either way."""

    context: bool = Field(default=True, description="Keys, values and heads of other ranks; false waits for each.")


class CheckpointConfig(Section):
    """Saved state."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    dir: str | None = Field(default=None, description="null = <log.dir>/checkpoints.")
    every_steps: int | None = Field(default=None, ge=1, description="null = only at the end.")
    keep: int = Field(default=2, ge=1, description="Newest ones kept.")
    asynchronous: bool = Field(default=True, alias="async", description="Write while training goes on.")
    save_final: bool = Field(default=True, description="Save after the last step.")


class ProfileConfig(Section):
    """A torch.profiler trace of some steps."""

    start_step: int = Field(ge=0, description="First step traced.")
    steps: int = Field(ge=1, description="Steps traced.")


class LogConfig(Section):
    """The run folder."""

    dir: str | None = Field(default=None, description="null = runs/<config name>.")
    every_steps: int = Field(default=1, ge=1, description="Steps between lines of metrics.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard events.")
    wandb: dict[str, Any] | None = Field(default=None, description="Arguments of wandb.init; null = off.")
    profile: ProfileConfig | None = Field(default=None, description="null = off.")


class Config(Section):
    """A whole configuration file."""

    model: ModelSection  # pyright: ignore[reportInvalidTypeForm]
    data: DataConfig
    adapter: AdapterConfig | None = Field(default=None, description="null = every weight is trained.")
    train: TrainConfig
    attention: AttentionConfig = AttentionConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig | None = Field(default=None, description="null = all activations are kept.")
    offload: OffloadConfig = OffloadConfig()
    fpdt: FpdtConfig | None = Field(default=None, description="null = layers are not streamed.")
    overlap: OverlapConfig = OverlapConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
