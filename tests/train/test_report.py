"""The report of runs of every fate: one step, ten thousand, failed at once; self-contained, and safe to open."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from freight.data.documents import InMemoryDocuments, make_document
from freight.data.pack.document_rows import DocumentRows
from freight.train.data_facts import data_facts
from freight.train.metrics import MetricLog
from freight.train.report import flattened, highlighted_yaml, listed, write_report
from freight.train.run_folder import RunStatus, add_warning, write_json, write_plan, write_status

VOID = {"meta", "br", "img", "link", "hr", "input"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Checks that tags close, and collects what a browser would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "action") or name[:2] == "on"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data


def make_run(
    folder: Path, steps: int, *, state: str = "finished", message: str = "", bad: tuple[int, ...] = ()
) -> Path:
    log = MetricLog(folder, tensorboard=False)
    log.write(0, {"eval/loss": 2.0, "eval/loss/chat": 2.0, "eval/loss/code": 2.1})
    for step in range(1, steps + 1):
        log.write(
            step,
            {
                "train/loss": 1 + 1 / step,
                "train/grad_norm": math.nan if step in bad else 0.5,
                "train/lr": 1e-4 * step / steps,
                "train/epoch": step / steps,
                "train/tokens": 100 * step,
                "perf/tokens_per_second": 400.0 + step % 25,
                "perf/mfu": 0.41,
                "memory/peak_bytes": 3.2 * 2**30,
            },
        )
    log.write(steps, {"eval/loss": 1.5, "eval/loss/chat": 1.5, "eval/loss/code": 1.4})
    log.close()
    documents = [make_document(range(n), [True] * n) for n in range(2, 40)]
    rows = DocumentRows(InMemoryDocuments(documents, {"skipped": {"too_long": 3}}), "first_fit_decreasing", 64)
    write_json(folder / "data.json", data_facts(rows))
    write_json(
        folder / "environment.json",
        {"freight": "0.1.0", "cpu": {"name": "a processor", "cores": 2}, "packages": {"torch": "2.13.0"}},
    )
    (folder / "config.yaml").write_text("train:\n  steps: 10\n")
    write_plan(folder, ["one row per microbatch"])
    write_status(folder, RunStatus(state, message, steps, steps))  # type: ignore[arg-type]
    return folder


def read(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_shows_the_key_numbers(tmp_path: Path) -> None:
    page = read(make_run(tmp_path / "demo", 50))
    for words in (
        "2.000 → 1.500",
        "25.0% lower; perplexity 7.39 → 4.48",
        "412",
        "50",
        "1.00 epochs, 5,000 tokens",
        "3.2 GiB",
        "41%",
        "too_long",
        "one row per microbatch",
        "packages.torch",
        "finished",
        "a processor, 2 cores",
        "Held-out loss by source",
    ):
        assert words in page.words, words


@pytest.mark.parametrize("steps", [1, 2, 39, 10_000])
def test_is_one_file_without_scripts_for_any_number_of_steps(tmp_path: Path, steps: int) -> None:
    page = read(make_run(tmp_path / "run", steps))
    assert page.fetched == []
    assert not {"script", "link", "img", "iframe", "object", "foreignobject"} & set(page.tags)
    assert page.tags.count("figure") == 9
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import", text)
    assert len(text) < 1_000_000
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_the_mixture_of_sources_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    data = json.loads((folder / "data.json").read_text())
    assert "Mixture of sources" not in read(folder).words
    data["mixture"] = [{"name": "special", "documents": 36, "share": 0.75, "taken": 154}]
    write_json(folder / "data.json", data)
    page = read(folder)
    for words in ("Mixture of sources", "special", "75.00%", "154", "4.28"):
        assert words in page.words, words


def test_a_stream_without_facts_has_a_page_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    write_json(folder / "data.json", {})
    assert "Packing efficiency" not in read(folder).words


def test_an_empty_folder_has_a_page_too(tmp_path: Path) -> None:
    assert "No step has finished yet" in read(tmp_path).words


def test_a_failure_says_why(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "run", 9, state="failed", message="gradients were not finite in 3 steps", bad=(7, 8, 9)
    )
    page = read(folder)
    assert "failed" in page.words
    assert "gradients were not finite in 3 steps" in page.words
    assert "Nothing was updated at step 7, 8, 9" in page.words


def test_only_nonfinite_numbers(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, tensorboard=False)
    log.write(1, {"train/loss": math.nan, "train/grad_norm": math.nan, "train/lr": 0.0, "perf/mfu": math.inf})
    log.close()
    assert "Learning rate" in read(tmp_path).words


def test_text_from_outside_stays_text(tmp_path: Path) -> None:
    evil = "</style><script>alert(1)</script>"
    folder = make_run(tmp_path / "run", 2, state="failed", message=evil)
    add_warning(folder, evil, step=2)
    write_plan(folder, [evil])
    (folder / "config.yaml").write_text(f"model: {evil}\n{evil}\n")
    write_json(folder / "environment.json", {evil: evil})
    log = MetricLog(folder, tensorboard=False, resumed_step=2)
    log.write(2, {f"eval/loss/{evil}": 1.0})
    log.close()
    page = read(folder)
    assert "script" not in page.tags
    assert page.words.count("alert(1)") >= 7


def test_a_run_overtakes_its_old_page_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(make_run(tmp_path / "run", 2))
    before = path.read_text()

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path / "run")
    assert path.read_text() == before


def test_long_lists_are_cut() -> None:
    assert listed([3, 17]) == "3, 17"
    assert listed(range(1, 31)).endswith("23, 24 and 6 more")


def test_yaml_keys_are_marked_and_values_are_not() -> None:
    assert highlighted_yaml("a:\n  - b_c: x: <y>\n# d: e") == "<b>a</b>:\n  - <b>b_c</b>: x: &lt;y&gt;\n# d: e"


def test_nested_facts_are_flattened() -> None:
    assert flattened({"a": {"b": [1, 2], "c": None}, "d": []}) == [("a.b", "1, 2"), ("a.c", "-"), ("d", "-")]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("steps", [1, 10_000])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it(tmp_path: Path, steps: int, dark: bool) -> None:
    page = write_report(make_run(tmp_path / "run", steps))
    picture = tmp_path / "report.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1000", f"--screenshot={picture}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run([*command, page.as_uri()], check=True, timeout=90, capture_output=True)
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    corner = float(pixels[:20, :20].mean())
    assert corner < 0.2 if dark else corner > 0.9
    saturation = pixels.max(axis=2) - pixels.min(axis=2)
    assert 0.001 < float((saturation > 0.3).mean()) < 0.3
