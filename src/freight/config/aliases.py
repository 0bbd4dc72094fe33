"""Names that other trainers use, read as ours with one notice each.

A foreign key is recognised by its last name, wherever it stands (`model.data.train_ds.max_seq_length`), as long as the
path is no key of Freight. Features that this version lacks are recognised too: at their source's neutral value they are
dropped with a notice, at any other they are a fault, so a pasted config never loses meaning silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from freight.config.keys import Path, dotted, either, known, shown
from freight.config.schema import Config
from freight.config.unavailable import covers

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Alias:
    """What a foreign name means here.

    Args:
        key: Dotted key of Freight.
        values: Foreign value -> ours; None = the value as it is. A foreign value that is not listed is a fault.
        convert: Applied to the value when `values` is None; raises ValueError with what is accepted.
        says_default: Our default, which other trainers' configs write without need: it is left unwritten, so that it is
            never called an option without effect.
        also: Other keys that the name sets, unless its value is `says_default`.
    """

    key: str
    values: Mapping[Any, Any] | None = None
    convert: Callable[[Any], Any] | None = None
    says_default: Any = ()
    also: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lacking:
    """A foreign name whose feature this version lacks, and the values at which it does nothing."""

    topic: str
    neutral: tuple[Any, ...]


def _scale_of(query_pre_attn_scalar: Any) -> float:
    if isinstance(query_pre_attn_scalar, bool) or not isinstance(query_pre_attn_scalar, (int, float)):
        raise ValueError("a number above 0")
    if not query_pre_attn_scalar > 0:
        raise ValueError("a number above 0")
    return 1 / math.sqrt(query_pre_attn_scalar)


def _context_of(size: Any) -> Any:
    """Megatron's null is one rank."""
    return 1 if size is None else size


def _ranks_of(size: Any) -> Any:
    """-1 is torchtitan's word for the rest."""
    if size is None:
        return None
    if isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1):
        return None if size == -1 else size
    raise ValueError("a number of ranks, or -1")


def _seconds_of(minutes: Any) -> int:
    if minutes is None:
        return 600
    if isinstance(minutes, (int, float)) and not isinstance(minutes, bool) and minutes > 0:
        return max(1, round(minutes * 60))
    raise ValueError("a number of minutes above 0")


def _window_of(window_size: Any) -> Any:
    """Megatron's [left, 0] leaves the token itself out; -1 is no window."""
    if isinstance(window_size, int):
        return window_size
    if isinstance(window_size, (list, tuple)) and len(window_size) == 2 and window_size[1] in (0, -1):
        left = window_size[0]
        if isinstance(left, int) and left >= 0:
            return left + 1
        if left == -1:
            return None
    raise ValueError("[left, 0]")


_PRECISION = {
    "bf16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16", "bfloat16": "bf16",
    "fp32": "fp32", "32": "fp32", 32: "fp32", "32-true": "fp32", "float32": "fp32",
}  # fmt: skip
_SCHEDULE = {
    "cosine": "cosine", "cosine_with_min_lr": "cosine", "CosineAnnealing": "cosine", "linear": "linear",
    "constant": "constant", "constant_with_warmup": "constant", "wsd": "wsd", "WSD": "wsd",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
_OPTIMIZER = {name: "adamw" for name in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fused_adam")}
_ACTIVATION = {
    "silu": "swiglu", "swish": "swiglu", "fast-swiglu": "swiglu", "swiglu": "swiglu", "geglu": "geglu",
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "squared-relu": "relu2",
    "relu2": "relu2",
}  # fmt: skip
_CONTEXT_METHOD = {
    "p2p": "ring", "a2a": "ulysses", "a2a+p2p": "hybrid", "all_gather": "all_gather", "allgather": "all_gather",
    None: None,
}  # fmt: skip
_FULL_RECOMPUTE = {"full": "full", "selective": "selective", None: None}
_NORM = {
    "rmsnorm": "rmsnorm", "RMSNorm": "rmsnorm", "layernorm": "layernorm", "LayerNorm": "layernorm",
}  # fmt: skip

ALIASES: Mapping[str, Alias] = {
    # Data.
    "max_seq_length": Alias("data.sequence_length"),
    "max_length": Alias("data.sequence_length"),
    "sequence_len": Alias("data.sequence_length"),
    "cutoff_len": Alias("data.sequence_length"),
    "seq_length": Alias("data.sequence_length"),
    "encoder_seq_length": Alias("data.sequence_length"),
    "file_names": Alias("data.train"),
    "train_file": Alias("data.train"),
    "dataset_path": Alias("data.train"),
    "validation_file": Alias("data.validation"),
    "answer_only_loss": Alias("data.train_on", {True: "assistant", False: "all"}, says_default="assistant"),
    "train_on_inputs": Alias("data.train_on", {True: "all", False: "assistant"}),
    "assistant_only_loss": Alias("data.train_on", {True: "assistant", False: "all"}),
    "sample_packing": Alias("data.packing", {True: {}, False: None}),
    "packed_sequence": Alias("data.packing", {True: {}, False: None}),
    "packing_algorithm": Alias("data.packing.algorithm"),
    "packed_sequence_size": Alias("data.packing.pack_size"),
    "packed_train_data_path": Alias("data.packing.file"),
    "tokenizer_name_or_path": Alias("data.tokenizer"),
    "tokenizer_model": Alias("data.tokenizer"),
    "dataloader_num_workers": Alias("data.num_workers"),
    "dataloader_drop_last": Alias("data.drop_last"),
    # Train.
    "max_steps": Alias("train.steps"),
    "train_iters": Alias("train.steps"),
    "num_train_epochs": Alias("train.epochs"),
    "num_epochs": Alias("train.epochs"),
    "max_epochs": Alias("train.epochs"),
    "learning_rate": Alias("train.optimizer.lr"),
    "lr": Alias("train.optimizer.lr"),
    "weight_decay": Alias("train.optimizer.weight_decay"),
    "betas": Alias("train.optimizer.betas"),
    "adam_epsilon": Alias("train.optimizer.eps"),
    "adam_eps": Alias("train.optimizer.eps"),
    "optim": Alias("train.optimizer.name", _OPTIMIZER),
    "optimizer": Alias("train.optimizer.name", _OPTIMIZER),
    "lr_scheduler_type": Alias("train.schedule.name", _SCHEDULE),
    "lr_scheduler": Alias("train.schedule.name", _SCHEDULE),
    "lr_decay_style": Alias("train.schedule.name", _SCHEDULE),
    "warmup_steps": Alias("train.schedule.warmup_steps"),
    "lr_warmup_iters": Alias("train.schedule.warmup_steps"),
    "warmup_ratio": Alias("train.schedule.warmup_ratio"),
    "min_lr_rate": Alias("train.schedule.min_lr_ratio"),
    "max_grad_norm": Alias("train.grad_clip"),
    "clip_grad": Alias("train.grad_clip"),
    "gradient_clip_val": Alias("train.grad_clip"),
    "label_smoothing_factor": Alias("train.label_smoothing"),
    "eval_steps": Alias("train.evaluate_every_steps"),
    "precision": Alias("train.precision", _PRECISION),
    "bf16": Alias("train.precision", {True: "bf16", "auto": "bf16", "full": "bf16", False: "fp32"}),
    "torch_compile": Alias("train.compile"),
    "global_batch_size": Alias("train.global_batch_size"),
    # Run.
    "output_dir": Alias("log.dir"),
    "logging_steps": Alias("log.every_steps"),
    "log_interval": Alias("log.every_steps"),
    "save_steps": Alias("checkpoint.every_steps"),
    "save_interval": Alias("checkpoint.every_steps"),
    "save_total_limit": Alias("checkpoint.keep"),
    # Model.
    "base_model": Alias("model.hf"),
    "model_name_or_path": Alias("model.hf"),
    "n_layer": Alias("model.num_layers"),
    "num_hidden_layers": Alias("model.num_layers"),
    "intermediate_size": Alias("model.ffn_hidden_size"),
    "num_key_value_heads": Alias("model.num_query_groups"),
    "kv_channels": Alias("model.head_dim"),
    "normalization": Alias("model.norm", _NORM),
    "layernorm_epsilon": Alias("model.norm_eps"),
    "rms_norm_eps": Alias("model.norm_eps"),
    "hidden_act": Alias("model.activation", _ACTIVATION),
    "tie_word_embeddings": Alias("model.tie_embeddings"),
    "rotary_base": Alias("model.rope.theta"),
    "rope_theta": Alias("model.rope.theta"),
    "rotary_percentage": Alias("model.rope.percent"),
    "rotary_percent": Alias("model.rope.percent"),
    "partial_rotary_factor": Alias("model.rope.percent"),
    "rotary_interleaved": Alias("model.rope.interleaved"),
    "init_method_std": Alias("model.init_std"),
    "initializer_range": Alias("model.init_std"),
    "query_pre_attn_scalar": Alias("model.attention_scale", convert=_scale_of),
    "attn_logit_softcapping": Alias("model.attention_softcap"),
    "final_logit_softcapping": Alias("model.final_softcap"),
    "window_size": Alias("model.sliding_window", convert=_window_of),
    # Attention.
    "attention_backend": Alias(
        "attention.backend", {"auto": "auto", "flash": "flash", "fused": "cudnn", "unfused": "math", "local": "math"}
    ),
    # An unusual pair: true asks for what Freight does anyway.
    "use_flash_attention": Alias("attention.disable", {True: [], False: ["flash", "flash_attn", "cudnn"]}),
    # Ranks and memory.
    "context_parallel_size": Alias("parallel.context", convert=_context_of),
    "cp_size": Alias("parallel.context", convert=_context_of),
    # Megatron writes it even where nothing is split, see `derived_keys.py`.
    "cp_comm_type": Alias("parallel.cp_comm_type", _CONTEXT_METHOD, says_default=None),
    "dp_shard_size": Alias("parallel.data_shard", convert=_ranks_of),
    "data_parallel_size": Alias("parallel.data_shard", convert=_ranks_of),
    "distributed_timeout_minutes": Alias("parallel.timeout_seconds", convert=_seconds_of, says_default=600),
    "gradient_checkpointing": Alias("recompute", {True: {"granularity": "full"}, False: None, None: None}),
    "activations_checkpoint_granularity": Alias("recompute.granularity", _FULL_RECOMPUTE, says_default=None),
    "recompute_granularity": Alias("recompute.granularity", _FULL_RECOMPUTE, says_default=None),
    "activations_checkpoint_method": Alias("recompute.method", says_default=None),
    "recompute_method": Alias("recompute.method", says_default=None),
    "activations_checkpoint_num_layers": Alias("recompute.num_layers", says_default=None),
    "recompute_num_layers": Alias("recompute.num_layers", says_default=None),
    "cpu_offloading": Alias("offload.layer_inputs", {True: "host", False: "none", None: "none"}, says_default="none"),
    "ds_sequence_parallel_size": Alias("parallel.context", says_default=1, also={"parallel.context_method": "ulysses"}),
    "ds_sequence_parallel_fpdt": Alias("fpdt", {True: {}, False: None}),
    "ds_sequence_parallel_fpdt_chunk_size": Alias("fpdt.chunk_tokens"),
    "ds_sequence_parallel_fpdt_offloading": Alias("fpdt.offload", {True: "host", False: "none"}),
    # Counts the tokens of one rank, see `derived_keys.py`.
    "fpdt_FFN_chunk_size": Alias("fpdt.ffn_chunk_tokens_of_rank"),
    # Resolved together into rows and tokens, see `derived_keys.py`.
    "per_device_train_batch_size": Alias("train.per_device_train_batch_size"),
    "micro_batch_size": Alias("train.per_device_train_batch_size"),
    "gradient_accumulation_steps": Alias("train.gradient_accumulation_steps"),
}

LACKING: Mapping[str, Lacking] = {
    "tp_size": Lacking("tensor parallelism", (1, None)),
    "tensor_model_parallel_size": Lacking("tensor parallelism", (1, None)),
    "pp_size": Lacking("pipeline parallelism", (1, None)),
    "pipeline_model_parallel_size": Lacking("pipeline parallelism", (1, None)),
    "virtual_pipeline_model_parallel_size": Lacking("pipeline parallelism", (None,)),
    "ep_size": Lacking("expert parallelism", (1, None)),
    "expert_model_parallel_size": Lacking("expert parallelism", (1, None)),
    "dp_replicate_size": Lacking("data parallelism", (1, None)),
    "sequence_parallel": Lacking("sequence parallelism", (False, None)),
    "overlap_grad_sync": Lacking("communication overlap", (False, None)),
    "overlap_grad_reduce": Lacking("communication overlap", (False, None)),
    "overlap_param_sync": Lacking("communication overlap", (False, None)),
    "overlap_param_gather": Lacking("communication overlap", (False, None)),
    "tp_comm_overlap": Lacking("communication overlap", (False, None)),
    "ub_tp_comm_overlap": Lacking("communication overlap", (False, None)),
    "constant_steps": Lacking("a constant phase of cosine", (0, None)),
    "concat_sampling_probabilities": Lacking("mixing of packed files", ([1.0], [1], None)),
    "num_moe_experts": Lacking("mixture of experts", (None, 0)),
    "num_experts": Lacking("mixture of experts", (None, 0)),
    "load_in_4bit": Lacking("quantised training", (False, None)),
    "load_in_8bit": Lacking("quantised training", (False, None)),
    "use_peft": Lacking("adapters", (False, None)),
    "fp8": Lacking("fp8", (False, None)),
    "fp16": Lacking("float16 (use bf16)", (False, None)),
}  # fmt: skip


# Names that mean something only inside a section of NeMo's: (section, name) -> ours.
SECTION_ALIASES: Mapping[tuple[str, str], Alias] = {
    ("train_ds", "shuffle"): Alias("data.shuffle"),
    ("train_ds", "num_workers"): Alias("data.num_workers"),
    ("train_ds", "drop_last"): Alias("data.drop_last"),
    ("validation_ds", "file_names"): Alias("data.validation"),
    ("optim", "name"): Alias("train.optimizer.name", {"distributed_fused_adam": "adamw", **_OPTIMIZER}),
    ("sched", "name"): Alias("train.schedule.name", _SCHEDULE),
    ("sched", "min_lr"): Alias("train.min_lr"),
}
# What stands beside a switch of DeepSpeed that is off.
_FPDT_PARTS = ("ds_sequence_parallel_fpdt_chunk_size", "ds_sequence_parallel_fpdt_offloading", "fpdt_FFN_chunk_size")

# In such a section nothing else is read; why.
UNREAD_SECTIONS: Mapping[str, str] = {
    "validation_ds": "validation goes by the keys of training",
    "test_ds": "`freight evaluate` takes a file of its own",
}


def apply_aliases(raw: dict[str, Any], notice: Notice) -> list[str]:
    """Rewrite foreign names in place; returns the faults (a value without a meaning here, spellings that disagree)."""
    faults: list[str] = []
    leaves = list(_leaves(raw))
    fpdt_off = any(path[-1] == "ds_sequence_parallel_fpdt" and value is False for path, value in leaves)
    for path, value in leaves:
        if known(Config, path) or covers(path) or not isinstance(path[-1], str):
            continue
        name = path[-1].lstrip("-").replace("-", "_")
        section = str(path[-2]) if len(path) > 1 else ""
        if (section, name) in SECTION_ALIASES:
            _remove(raw, path)
            faults += _rename(raw, dotted(path), value, SECTION_ALIASES[section, name], notice)
        elif section in UNREAD_SECTIONS:
            _remove(raw, path)
            notice(f"`{dotted(path)}: {shown(value)}` is dropped: {UNREAD_SECTIONS[section]}.")
        elif fpdt_off and name in _FPDT_PARTS:
            _remove(raw, path)
            notice(f"`{dotted(path)}: {shown(value)}` is dropped: ds_sequence_parallel_fpdt is false.")
        elif name in LACKING:
            _remove(raw, path)
            faults += _drop(dotted(path), value, LACKING[name], notice)
        elif name in ALIASES:
            _remove(raw, path)
            faults += _rename(raw, dotted(path), value, ALIASES[name], notice)
    return faults


def _drop(key: str, value: Any, lacking: Lacking, notice: Notice) -> list[str]:
    if any(value is neutral or (value == neutral and type(value) is type(neutral)) for neutral in lacking.neutral):
        notice(f"`{key}: {shown(value)}` is dropped: {lacking.topic} stays off.")
        return []
    return [f"`{key}` ({lacking.topic}) is not available in this version of Freight; got {shown(value)}; remove it."]


def _rename(raw: dict[str, Any], key: str, value: Any, alias: Alias, notice: Notice) -> list[str]:
    if alias.values is not None:
        matches = [ours for theirs, ours in alias.values.items() if theirs == value and type(theirs) is type(value)]
        if not matches:
            accepted = either([shown(v).strip('"') for v in alias.values])
            return [f"`{key}` (read as `{alias.key}`) must be {accepted}; got {shown(value)}. Use `{alias.key}`."]
        value = deepcopy(matches[0])  # what is written into a config must not be the table's own mapping
    elif alias.convert is not None:
        try:
            value = alias.convert(value)
        except ValueError as error:
            return [f"`{key}` (read as `{alias.key}`) must be {error}; got {shown(value)}. Use `{alias.key}`."]
    said = value == alias.says_default and type(value) is type(alias.says_default)
    for ours, of_ours in {alias.key: value, **({} if said else alias.also)}.items():
        if problem := _write(raw, key, ours, of_ours, only_compare=said):
            return [problem]
    if known(Config, tuple(alias.key.split("."))):
        notice(f"`{key}` is read as `{alias.key}: {shown(value)}`.")
    return []


def _write(raw: dict[str, Any], foreign: str, key: str, value: Any, *, only_compare: bool) -> str | None:
    """Put a value at one of our keys; a sentence if something else stands there."""
    *parents, last = key.split(".")
    section: Any = raw
    for part in parents:
        if section.get(part) is None:
            if only_compare:
                return None
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            return f"`{foreign}` is read as `{key}`, but `{part}` is no mapping. Write `{key}` instead."
    present = section.get(last)
    if isinstance(value, dict) and isinstance(present, dict) and value.items() <= present.items():
        value = present  # says nothing that is not there
    if last in section and section[last] != value:
        return (
            f"`{foreign}` {shown(value)} and `{key}` {shown(section[last])} disagree: they are two spellings of one "
            "key. Keep one."
        )
    if not only_compare:
        section[last] = value
    return None


def _leaves(node: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _remove(raw: dict[str, Any], path: Sequence[Any]) -> None:
    """Delete a leaf, and with it the mappings that held nothing else and are no sections of ours."""
    chain: list[dict[str, Any]] = [raw]
    for part in path[:-1]:
        chain.append(chain[-1][part])
    del chain[-1][path[-1]]
    for depth in range(len(path) - 2, -1, -1):
        if chain[depth + 1] or known(Config, tuple(path[: depth + 1])):
            break
        del chain[depth][path[depth]]
