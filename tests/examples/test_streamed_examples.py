"""The streamed examples mean what their comments and the page on FPDT say, on the ranks of their launch line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freight.config.load import load_config
from freight.config.model import architecture_of
from freight.parallel.head_split import HeadSplit
from freight.planner.execution import ExecutionPlan, resolve_execution
from freight.planner.tier_space import amount

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("fpdt_*.yaml"))
PAGE = ROOT / "docs" / "fpdt.md"
CHUNKS = {"four": 4, "sixteen": 16}


def said(text: str, pattern: str) -> str:
    """What a comment says; the pattern's group."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def plan_of(path: Path, text: str) -> ExecutionPlan:
    """On as many ranks as the launch line starts."""
    config = load_config(path, check_files=False)
    assert config.data.sequence_length is not None
    return resolve_execution(
        config,
        architecture_of(config.model),
        config.data.sequence_length,
        world_size=int(said(text, r"--nproc-per-node (\d+)")),
    )


def test_all_three_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["fpdt_gpt_6.7b_256k", "fpdt_gpt_6.7b_32k", "fpdt_llama_8b_1m"]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_a_row_has_as_many_chunks_as_its_comment_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    plan = plan_of(path, text)
    assert plan.runner == "stream" and plan.stream is not None and plan.tier == "host"
    assert plan.tokens == int(said(text, r"rows of ([\d,]+) tokens").replace(",", ""))  # nothing is padded
    chunks, rest = divmod(plan.tokens, plan.stream.chunk_tokens)
    assert (chunks, rest) == (CHUNKS[said(text, r"chunk_tokens: \d+ +# (\w+) chunks")], 0)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_gpu_has_as_many_heads_as_its_comment_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    plan = plan_of(path, text)
    assert plan.context is not None and plan.context.ulysses == plan.context_ranks == plan.world_size
    arch = architecture_of(load_config(path, check_files=False).model)
    split = HeadSplit(arch.num_attention_heads, arch.groups, plan.context_ranks)
    heads, each = said(text, r"# (\d+) (?:query )?heads: "), said(text, r"heads: (\d+) a GPU")
    assert arch.num_attention_heads == int(heads)
    assert {share.num_queries for share in split.shares} == {int(each)}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_a_step_has_as_many_rows_as_its_comment_says(path: Path) -> None:
    config = load_config(path, check_files=False)
    assert config.train.global_batch_tokens is not None and config.data.sequence_length is not None
    rows = int(said(path.read_text(encoding="utf-8"), r"global_batch_tokens: \d+ +# (\d+) rows"))
    assert config.train.global_batch_tokens == rows * config.data.sequence_length


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_page_on_fpdt_says_the_same(path: Path) -> None:
    text, page = path.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")
    plan = plan_of(path, text)
    assert plan.stream is not None
    chunks = plan.tokens // plan.stream.chunk_tokens
    cells = f"{plan.tokens:,} | {plan.world_size} | {chunks} | {amount(plan.tier_bytes)}"
    assert f"| `examples/{path.name}` | {cells} |" in page
    assert said(text, r"(torchrun [^\n]*)") in page
