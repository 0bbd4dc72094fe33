"""Configurations to verify, one for every switch; large enough that something is left to shrink."""

from __future__ import annotations

from typing import Any

from freight.config.load import config_from
from freight.config.model import architecture_of
from freight.verify.prove import Proof, Prover
from freight.verify.ranks import RankPool

LORA = {"type": "lora", "rank": 8, "alpha": 16}


def raw_config(**sections: Any) -> dict[str, Any]:
    """A configuration of a packed run; sections given are laid over, null takes one away."""
    raw: dict[str, Any] = {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "vocab_size": 1000,
            "max_position_embeddings": 2048,
        },
        "data": {"train": "chats.jsonl", "tokenizer": "nowhere", "sequence_length": 1024, "packing": {}},
        "train": {"steps": 30, "global_batch_size": 8, "micro_batch_tokens": 2048, "optimizer": {"lr": 1e-4}},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return raw


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": raw_config(),
    "padded": raw_config(data={"packing": None}, train={"label_smoothing": 0.1, "z_loss_coeff": 1e-3}),
    "text": raw_config(data={"format": "text"}, train={"grad_clip": None}),
    "short streams": raw_config(data={"packing": {"pad_rows": False, "document_multiple": 4}}),
    "uneven batch": raw_config(parallel={"data_shard": 8}, train={"global_batch_size": 9}),
    "window": raw_config(model={"sliding_window": 300, "attention_softcap": 50.0, "final_softcap": 30.0}),
    "lora": raw_config(adapter={**LORA, "dropout": 0.1}, model={"attention_dropout": 0.1}),
    "dora": raw_config(
        adapter={**LORA, "use_dora": True, "use_rslora": True, "modules_to_save": ["norm"]}, parallel={"data_shard": 2}
    ),
    "recompute": raw_config(recompute={"granularity": "full"}, offload={"layer_inputs": "host"}),
    "recompute on disk": raw_config(
        recompute={"granularity": "full"},
        offload={"layer_inputs": "disk", "directory": "/nowhere"},
        parallel={"context": 2, "context_method": "ring"},
    ),
    "ring": raw_config(parallel={"context": 4, "context_method": "ring"}),
    "ring of three": raw_config(parallel={"context": 6, "context_method": "ring"}, train={"micro_batch_tokens": 3072}),
    "lora, all-gather": raw_config(
        adapter={**LORA, "dropout": 0.1}, parallel={"context": 2, "context_method": "all_gather"}
    ),
    "ulysses": raw_config(parallel={"context": 4, "context_method": "ulysses"}, model={"num_query_groups": 1}),
    "ulysses, data": raw_config(
        parallel={"context": 4, "context_method": "ulysses", "data_shard": 2}, model={"num_query_groups": 2}
    ),
    "hybrid": raw_config(parallel={"context": 8, "context_method": "hybrid", "ulysses": 4}),
    "fpdt": raw_config(fpdt={"chunk_tokens": 256}, model={"tie_embeddings": False}),
    "fpdt on host": raw_config(fpdt={"chunk_tokens": 256, "offload": "host", "save_attention": "all"}),
    "fpdt on disk, ulysses": raw_config(
        fpdt={"chunk_tokens": 256, "offload": "disk", "kv": "offload", "save_attention": "none"},
        offload={"directory": "/nowhere"},
        parallel={"context": 2},
        adapter=LORA,
    ),
    "fpdt, all-gather": raw_config(
        fpdt={"chunk_tokens": 256, "ffn_chunk_tokens": 64, "loss_chunk_tokens": None},
        parallel={"context": 2, "context_method": "all_gather"},
        model={"sliding_window": 300},
    ),
    "fpdt, hybrid": raw_config(
        fpdt={"chunk_tokens": 256}, parallel={"context": 4, "context_method": "hybrid", "ulysses": 2}
    ),
}


def prove(ranks: RankPool, name: str, sabotage: str | None = None, **options: Any) -> Proof:
    """What verify finds of a configuration."""
    config = config_from(CONFIGS[name])
    return Prover(ranks, sabotage).prove(config, architecture_of(config.model), **options)
