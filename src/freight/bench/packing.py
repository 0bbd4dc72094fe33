"""Packed training against padded, on real conversations: the same documents, weights and optimizer steps, in turns.

Every side is Freight, so that nothing differs but the layout: padded to `sequence_length`, padded to the longest of
each microbatch, grouped by length and padded, Freight's own rows of one document, and packed. What is longer than
`sequence_length` is dropped on every side; the default leaves out one conversation in a thousand. The ratio lives on
mean length over `sequence_length`: `ceiling_from_tokens` says how much there is to gain from tokens alone.

Speed is real tokens per second. FLOP utilisation is useful FLOPs (real tokens, causal pairs inside documents) over
executed ones, counted from the shapes that ran. Useful FLOPs per second would have the ratio of speed again.
Where TRL is installed its trainer packs and computes the same documents with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from freight.assemble.build import build_model
from freight.bench import padding_layouts as layouts
from freight.bench.conversations import write_conversations
from freight.bench.demo import find_model
from freight.bench.options import chosen_options
from freight.bench.padding_layouts import Layout
from freight.bench.timing import alternating_medians
from freight.bench.trl_packing import trl_step
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.config.architecture import Architecture
from freight.config.load import config_from
from freight.config.schema import Config, DataConfig
from freight.data.documents import Document, Documents
from freight.data.pack.document_rows import DocumentRows
from freight.data.pack.rows import Row
from freight.data.render.tokenizer import load_tokenizer
from freight.data.tokens.tokenise import tokenise
from freight.parallel.mesh import DeviceMesh, build_mesh
from freight.train.launch import launched
from freight.train.optimizer import build_optimizer
from freight.train.step import train_step

OPTIONS: dict[str, Any] = {
    "model": "narrow",
    "data": None,
    "sequence_length": 4096,
    "rows": 1,
    "documents_per_microbatch": 4,
    "repeats": 5,
    "max_seconds": 240,
    "threads": None,
    "lora": True,
    "trl": True,
}
# A third of SmolLM2-135M in every dim and a fifth of its layers; its vocabulary, which the tokenizer gives, stays.
NARROW = {"hidden_size": 192, "ffn_hidden_size": 512, "num_attention_heads": 3, "num_query_groups": 1, "num_layers": 6}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all sides.

    Args:
        options: `model` (`narrow`, `smollm2`, or a model folder), `data` (a chat file; by default conversations from
            the Python standard library), `sequence_length` (also the pack size), `rows` (packed rows of a step),
            `documents_per_microbatch` (of careful padding), `repeats`, `max_seconds` (past which no more than 3
            repeats are begun), `threads`, `lora` and `trl` (whether to measure them).

    Returns:
        `ratio_real_tokens_per_second`, `ratio_flop_utilisation` (packed over padded to `sequence_length`),
        `ratio_over_longest`, `ratio_over_grouped`, `ratio_over_unpacked`, `loss_difference` (largest relative, in
        float32), `ratio_lora`, `ratio_over_trl` (null where not measured), and the numbers behind them.

    Raises:
        ConfigError: An option that does not exist, or data without a document that fits.
    """
    chosen = chosen_options(options, OPTIONS)
    if chosen["threads"]:
        torch.set_num_threads(int(chosen["threads"]))
    length = chosen["sequence_length"]
    arch, place = _model(chosen["model"])
    documents = _documents(chosen["data"], place, arch, length)
    source = DocumentRows(documents, "first_fit_shuffle", length)
    rows = _like_the_average(source, chosen["rows"])
    step_documents = [documents[int(index)] for row in rows for index in row.documents]
    sides = {
        "padded": layouts.padded(step_documents, length),
        "longest": layouts.padded_to_longest(step_documents, chosen["documents_per_microbatch"]),
        "grouped": layouts.grouped_by_length(step_documents, chosen["documents_per_microbatch"]),
        "unpacked": layouts.unpacked(step_documents, length),
        "packed": layouts.packed(rows, length),
    }
    # Before there is a process group, which TRL would take for a distributed run.
    trl = trl_step(arch, step_documents, length, load_tokenizer(place)) if chosen["trl"] else None
    with launched() as world:
        mesh = build_mesh(world.size, world.device.type)
        bench = _Bench(arch, _weights(chosen["model"], place, arch), mesh, world.device)
        losses = bench.losses(sides)
        steps = {name: bench.step(layout) for name, layout in sides.items()}
        if chosen["lora"]:
            steps |= {f"lora_{name}": bench.step(sides[name], lora=True) for name in ("padded", "packed")}
        if trl:
            steps["trl"] = trl
        seconds = alternating_medians(
            steps, repeats=chosen["repeats"], max_seconds=float(chosen["max_seconds"]), wait=_wait(world.device)
        )
    return _result(chosen, arch, documents, source.packing_factor, step_documents, sides, losses, seconds)


class _Bench:
    """Builds a model for every side, of the same weights, and its optimizer step."""

    def __init__(self, arch: Architecture, weights: Any, mesh: DeviceMesh, device: torch.device) -> None:
        self._arch, self._weights, self._mesh, self._device = arch, weights, mesh, device

    def losses(self, sides: Mapping[str, Layout]) -> dict[str, float]:
        """Mean loss of every side in float32."""
        model = build_model(self._arch, _config("fp32"), self._mesh, weights=self._weights)
        with torch.no_grad():
            return {name: self._loss(model, layout) for name, layout in sides.items()}

    def _loss(self, model: torch.nn.Module, layout: Layout) -> float:
        total = sum(float(model(batch.to(self._device)).nll) for batch in layout.microbatches)
        return total / _targets(layout)

    def step(self, layout: Layout, *, lora: bool = False) -> Callable[[], object]:
        """One optimizer step in bfloat16 with float32 masters."""
        config = _config("bf16", lora=lora)
        model = build_model(self._arch, config, self._mesh, weights=self._weights)
        optimizer = build_optimizer(model, config.train.optimizer)
        targets = _targets(layout)
        return lambda: train_step(
            model,
            optimizer,
            layout.microbatches,
            targets,
            learning_rate=config.train.optimizer.lr,
            grad_clip=1.0,
            mesh=self._mesh,
            device=self._device,
        )


def _model(name: str) -> tuple[Architecture, Path]:
    """The architecture, and where its tokenizer is."""
    if name not in ("narrow", "smollm2"):
        return read_architecture(name), Path(name)
    place = find_model()
    arch = read_architecture(place)
    return (arch.model_copy(update=NARROW) if name == "narrow" else arch), place


def _weights(name: str, place: Path, arch: Architecture) -> Any:
    return None if name == "narrow" else open_weights(place, arch)


def _documents(data: str | None, place: Path, arch: Architecture, sequence_length: int) -> Documents:
    """All documents that fit, tokenised in memory."""
    with TemporaryDirectory() as folder:
        path = data or str(write_conversations(Path(folder))[0])
        section = DataConfig(
            train=path,
            sequence_length=sequence_length,
            truncation="drop",
            cache_dir=None,
        )
        assert section.train is not None
        return tokenise(path, section, load_tokenizer(place), vocab_size=arch.vocab_size)


def _like_the_average(source: DocumentRows, count: int) -> list[Row]:
    """Rows of a packed epoch that are like the others.

    A step is small, so its rows are those whose number of documents is nearest to the average: the ratios live on it.
    """
    rows = [source.row(0, 0, number) for number in range(source.num_rows)]
    rows.sort(key=lambda row: abs(len(row.lengths) - source.packing_factor))
    return rows[:count]


def _config(precision: str, *, lora: bool = False) -> Config:
    """Only what `build_model` and the optimizer read."""
    raw: dict[str, Any] = {
        "model": {"preset": "smollm2-135m"},
        "data": {"train": "-", "tokenizer": "-", "sequence_length": 2},
        "train": {"steps": 1, "global_batch_size": 1, "precision": precision, "optimizer": {"lr": 1e-5}},
    }
    if lora:
        raw["adapter"] = {"type": "lora"}
    return config_from(raw)


def _targets(layout: Layout) -> int:
    return sum(int((batch.labels >= 0).sum()) for batch in layout.microbatches)


def _wait(device: torch.device) -> Callable[[], object] | None:
    return torch.cuda.synchronize if device.type == "cuda" else None


def _result(
    chosen: Mapping[str, Any],
    arch: Architecture,
    documents: Documents,
    documents_per_row: float,
    step_documents: list[Document],
    sides: Mapping[str, Layout],
    losses: Mapping[str, float],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    real = sum(len(document) for document in step_documents)
    executed = {name: layouts.executed_flops(arch, layout) for name, layout in sides.items()}
    useful = layouts.useful_flops(arch, step_documents, sides["packed"])
    packed, length = seconds["packed"], chosen["sequence_length"]

    def ratio(side: str, other: str = "packed") -> float | None:
        return round(seconds[side] / seconds[other], 3) if side in seconds else None

    return {
        "benchmark": "packing",
        **{name: value for name, value in chosen.items() if name not in ("lora", "trl")},
        "threads": torch.get_num_threads(),
        "ratio_real_tokens_per_second": ratio("padded"),
        "ratio_flop_utilisation": round(executed["padded"] / executed["packed"], 3),
        "ratio_over_longest": ratio("longest"),
        "ratio_over_grouped": ratio("grouped"),
        "ratio_over_unpacked": ratio("unpacked"),
        "ratio_lora": ratio("lora_padded", "lora_packed"),
        "ratio_over_trl": ratio("trl"),
        "loss_difference": max(abs(loss / losses["packed"] - 1) for loss in losses.values()),
        "ceiling_from_tokens": round(length * len(step_documents) / real, 3),
        "dropped_documents": documents.metadata["skipped"].get("too_long", 0),
        "documents": len(step_documents),
        "documents_per_row": round(documents_per_row, 3),
        "real_tokens": real,
        "efficiency": round(real / sum(batch.tokens for batch in sides["packed"].microbatches), 4),
        "utilisation_packed": round(useful / executed["packed"], 4),
        "utilisation_padded": round(useful / executed["padded"], 4),
        "useful_gflops_per_second": round(useful / packed / 1e9, 2),
        "real_tokens_per_second": {name: round(real / each, 1) for name, each in seconds.items()},
        "seconds": {name: round(each, 3) for name, each in seconds.items()},
        "length_quantiles": [int(q) for q in np.quantile(documents.lengths, (0, 0.25, 0.5, 0.75, 0.9, 0.99, 1))],
        "mean_length": round(float(documents.lengths.mean()), 1),
    }
