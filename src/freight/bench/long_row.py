"""One document of 131,072 tokens trained in one process below a memory limit, its losses held against a plain forward.

The real program trains one step: a config with `fpdt`, chunks on disk, the real optimizer. Peak memory is the resident
set of the whole process, model and optimizer included. Afterwards the same weights give the loss of every token twice,
streamed and plain, and both are compared in ranges of 4,096 tokens all along the document: what a chunk missed or saw
twice would show from there on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from freight.assemble.build import architecture_for, build_model
from freight.assemble.execution import Execution, build_execution
from freight.bench.options import chosen_options
from freight.bench.streaming_sides import reset_peak, resident
from freight.config.load import config_from
from freight.config.schema import Config
from freight.nn.block import PlainRunner
from freight.nn.decoder import Decoder
from freight.nn.loss_head import TokenLossHead
from freight.ops.batch import TokenBatch
from freight.parallel.mesh import DeviceMesh, build_mesh
from freight.planner.execution import resolve_execution
from freight.train.launch import launched
from freight.train.optimizer import build_optimizer
from freight.train.step import StepResult, train_step

OPTIONS: dict[str, Any] = {
    "tokens": 131_072,
    "chunk_tokens": 8192,
    "probe_tokens": 4096,
    "limit_bytes": 4 << 30,
    "layers": 2,
    "hidden": 192,
    "vocab": 49_152,
    "threads": 2,
    "directory": None,
}
HEAD_DIM = 64


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train one step on one document, then compare losses.

    Args:
        options: `tokens` of the document, `chunk_tokens`, `probe_tokens` of a compared range, `limit_bytes` of resident
            memory, `layers`, `hidden` (in heads of 64 dims, one key-value head) and `vocab` of the model, `threads`,
            and the `directory` for chunks (null = the system's).

    Returns:
        `peak_resident_bytes` of the training step and `within_limit`; `seconds`; `loss` of the step and
        `reference_loss` of the plain forward; `largest_probe_difference` of mean losses, `largest_token_difference` of
        single ones.
    """
    chosen = chosen_options(options, OPTIONS)
    torch.set_num_threads(chosen["threads"])
    with launched() as world, tempfile.TemporaryDirectory(dir=chosen["directory"], prefix="freight-bench-") as folder:
        config, mesh = config_of(chosen, folder), build_mesh(world.size)
        arch = architecture_for(config)
        plan = resolve_execution(config, arch, chosen["tokens"])
        batch = document(chosen["tokens"], chosen["vocab"])
        with build_execution(plan, config, arch, mesh, "cpu") as execution:
            model = build_model(arch, config, mesh, execution=execution)
            reset_peak()
            began = time.perf_counter()
            # A learning rate of 0: the comparison needs the weights of the step.
            step = one_step(model, config, batch, execution, mesh)
            seconds, peak = time.perf_counter() - began, resident("VmHWM")
            streamed = token_losses(model, batch)
            model.use_runner(PlainRunner())
            plain = token_losses(model, batch)
    probes = [abs(float(a - b)) for a, b in zip(*map(means(chosen["probe_tokens"]), (streamed, plain)), strict=True)]
    return {
        "benchmark": "long_row",
        **chosen,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_resident_bytes": peak,
        "within_limit": peak <= chosen["limit_bytes"],
        "seconds": round(seconds, 1),
        "loss": step.loss,
        "reference_loss": float(plain.double().sum() / step.num_targets),
        "probes": len(probes),
        "largest_probe_difference": max(probes),
        "largest_token_difference": float((streamed - plain).abs().max()),
        "wait_seconds": round(execution.metrics().get("fpdt/wait_seconds", 0.0), 2),
    }


def config_of(chosen: Mapping[str, Any], folder: str) -> Config:
    """The run as a config."""
    heads = chosen["hidden"] // HEAD_DIM
    return config_from(
        {
            "model": {
                "num_layers": chosen["layers"],
                "hidden_size": chosen["hidden"],
                "ffn_hidden_size": chosen["hidden"] * 8 // 3,
                "num_attention_heads": heads,
                "num_query_groups": 1,
                "vocab_size": chosen["vocab"],
                "tie_embeddings": True,
                "max_position_embeddings": chosen["tokens"],
            },
            "data": {"train": "-", "tokenizer": "-", "sequence_length": chosen["tokens"]},
            "train": {"steps": 1, "global_batch_size": 1, "optimizer": {"lr": 1e-12}, "precision": "fp32"},
            "offload": {"directory": folder},
            "fpdt": {"chunk_tokens": chosen["chunk_tokens"], "offload": "disk"},
        }
    )


def document(tokens: int, vocab: int) -> TokenBatch:
    """Random tokens: what a position sees of the others decides its loss as it does in text."""
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    return TokenBatch.from_documents([ids.tolist()])


def one_step(model: Decoder, config: Config, batch: TokenBatch, execution: Execution, mesh: DeviceMesh) -> StepResult:
    """Forward, backward and update, at a learning rate that moves no weight."""
    return train_step(
        model,
        build_optimizer(model, config.train.optimizer),
        [execution.deal(batch)],
        batch.tokens - 1,
        learning_rate=0.0,
        grad_clip=1.0,
        mesh=mesh,
        device=torch.device("cpu"),
    )


@torch.no_grad()
def token_losses(model: Decoder, batch: TokenBatch) -> Tensor:
    """float32 `[tokens]`, the way the model's blocks are run now."""
    return model(batch, TokenLossHead())


def means(size: int) -> Any:
    """Mean losses of ranges of `size` tokens."""

    def of(losses: Tensor) -> Iterator[Tensor]:
        return (part.double().mean() for part in losses.split(size))

    return of
