"""Does packed training converge as unpacked training does? Both train a small model from nothing, over several seeds.

The real program runs, config to run folder: the same conversations, the same number of documents per step, other random
weights and another order for every seed. Packed steps hold as many documents on average; unpacked rows hold one each.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from freight.bench.conversations import write_conversations
from freight.bench.demo import find_model
from freight.bench.options import chosen_options
from freight.config.load import config_from
from freight.errors import ConfigError
from freight.train.loop import train

OPTIONS: dict[str, Any] = {
    "seeds": 3,
    "steps": 150,
    "documents": 8,
    "sequence_length": 1024,
    "output": "runs/convergence",
}
# A sixth of SmolLM2-135M in width, four layers; the tokenizer gives the vocabulary.
MODEL = {
    "vocab_size": 49152,
    "hidden_size": 96,
    "ffn_hidden_size": 256,
    "num_attention_heads": 3,
    "num_query_groups": 1,
    "num_layers": 4,
    "tie_embeddings": True,
    "max_position_embeddings": 8192,
}
HELD_OUT_RECORDS = 100
EVALUATIONS = 10
SIDES = {"packed": "first_fit_shuffle", "unpacked": "none"}
SMOOTHING_STEPS = 10

Curve = list[tuple[int, float]]


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train every side with every seed, and draw the curves.

    Args:
        options: `seeds`, `steps`, `documents` (per step), `sequence_length` (also the pack size) and `output`, a folder
            for run folders and the picture `convergence.svg`.

    Returns:
        Held-out losses at the end by side and seed, the difference of their means, and their spread over seeds.

    Raises:
        ConfigError: An option that does not exist, or a run that failed.
    """
    chosen = chosen_options(options, OPTIONS)
    folder = Path(chosen["output"])
    train_file, held_out_file = write_conversations(folder / "data")
    curves: dict[str, list[dict[str, Curve]]] = {side: [] for side in SIDES}
    for seed in range(int(chosen["seeds"])):
        for side in SIDES:
            raw = _config(side, seed, chosen, train_file, held_out_file)
            result = train(config_from(raw), name=f"{side}-{seed}", overwrite=True, report_line=lambda _: None)
            if result.exit_code:
                raise ConfigError(f"{result.run_dir}: {result.message}")
            curves[side].append(_curves(result.run_dir))
    draw(folder / "convergence.svg", curves)
    final = {side: [round(each["eval/loss"][-1][1], 4) for each in runs] for side, runs in curves.items()}
    means = {side: statistics.mean(losses) for side, losses in final.items()}
    return {
        "benchmark": "convergence",
        **chosen,
        "heldout_loss_packed": final["packed"],
        "heldout_loss_unpacked": final["unpacked"],
        "heldout_loss_before": round(curves["packed"][0]["eval/loss"][0][1], 4),
        "difference_of_means": round(means["packed"] - means["unpacked"], 4),
        "largest_spread_over_seeds": round(max(max(losses) - min(losses) for losses in final.values()), 4),
        "picture": str(folder / "convergence.svg"),
    }


def draw(path: Path, curves: Mapping[str, list[dict[str, Curve]]]) -> None:
    """Training loss (mean of the last steps) and held-out loss; one thin line per seed, one colour per side."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (side, runs) in enumerate(curves.items()):
        style: dict[str, Any] = {
            "color": f"C{number}",
            "linestyle": ("-", "--")[number],
            "linewidth": 1.2,
            "alpha": 0.8,
        }
        for seed, each in enumerate(runs):
            label = side if seed == 0 else None
            left.plot(*zip(*_smoothed(each["train/loss"]), strict=True), label=label, **style)
            right.plot(*zip(*each["eval/loss"], strict=True), label=label, marker=".", **style)
    left.set(title="training loss", xlabel="step", ylabel="loss per token")
    right.set(title="held-out loss", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    with mpl.rc_context({"svg.hashsalt": "freight"}):
        figure.savefig(path, metadata={"Date": None})


def _config(side: str, seed: int, chosen: Mapping[str, Any], train_file: Path, held_out_file: Path) -> dict[str, Any]:
    steps = int(chosen["steps"])
    return {
        "model": MODEL,
        "data": {
            "train": str(train_file),
            "validation": [{"path": str(held_out_file), "max_records": HELD_OUT_RECORDS}],
            "tokenizer": str(find_model()),
            "sequence_length": int(chosen["sequence_length"]),
            "truncation": "drop",
            "packing": {"algorithm": SIDES[side], "pad_rows": False},
        },
        "train": {
            "steps": steps,
            "global_batch_documents": int(chosen["documents"]),
            "optimizer": {"lr": 2e-3},
            "schedule": {"name": "cosine", "warmup_ratio": 0.1},
            "seed": seed,
            "evaluate_every_steps": max(1, steps // EVALUATIONS),
        },
        "checkpoint": {"save_final": False},
        "log": {"dir": str(Path(chosen["output"]) / f"{side}-{seed}"), "tensorboard": False},
    }


def _curves(run_dir: Path) -> dict[str, Curve]:
    """`(step, value)` of both losses, from the run's metrics."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in ("train/loss", "eval/loss")}


def _smoothed(curve: Curve) -> Curve:
    values = [value for _, value in curve]
    return [
        (step, statistics.mean(values[max(0, index + 1 - SMOOTHING_STEPS) : index + 1]))
        for index, (step, _) in enumerate(curve)
    ]
