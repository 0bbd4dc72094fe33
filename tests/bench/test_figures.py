"""The figures of the documentation are those that the program draws, and they show what it does."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from freight.bench.context_figures import RING_TOKENS, ring_pairs
from freight.bench.figures import FIGURES, run
from freight.bench.stream_figure import stream_passes
from freight.errors import ConfigError
from freight.ops.layout import SequenceLayout

DOCS = Path(__file__).parents[2] / "docs" / "figures"


def test_the_docs_show_what_is_drawn_today(tmp_path: Path) -> None:
    result = run({"output": str(tmp_path / "new")})
    for name in FIGURES:
        drawn = Path(result[name]).read_bytes()
        assert drawn == (DOCS / f"{name}.svg").read_bytes(), f"{name}: run `freight bench figures`"
        picture = ElementTree.fromstring(drawn)
        assert float(picture.attrib["width"]) < 900 and b"prefers-color-scheme:dark" in drawn


def test_words_stay_inside_the_pictures() -> None:
    for name in FIGURES:
        picture = ElementTree.parse(DOCS / f"{name}.svg").getroot()
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for text in picture.iter("{http://www.w3.org/2000/svg}text"):
            length = 0.52 * float(text.attrib["font-size"]) * len(text.text or "")
            start = float(text.attrib["x"]) - {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]] * length
            assert start >= 0 and start + length <= width and float(text.attrib["y"]) < height, (name, text.text)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_computes_every_visible_pair_once(ranks: int) -> None:
    layout = SequenceLayout("zigzag_document", RING_TOKENS, ranks)
    pairs = [pair for rank in range(ranks) for step in range(ranks) for pair in ring_pairs(layout, rank, step)]
    assert sorted(pairs) == [(query, key) for query in range(RING_TOKENS) for key in range(query + 1)]


def test_a_stream_reads_keys_while_they_are_there() -> None:
    forward, backward = stream_passes()
    assert sorted(forward.parts) == sorted(backward.parts) and len(set(forward.parts)) == len(forward.parts)
    for seen in (forward, backward):
        for turn, (_, block) in enumerate(seen.parts):
            assert turn < seen.freed[block]
    rows = [row for row, _ in forward.parts]
    assert rows == sorted(rows) and [row for row, _ in backward.parts] == sorted(rows, reverse=True)
    assert forward.row_freed == {block: max(row for row, b in forward.parts if b == block) for block in range(8)}
    assert backward.row_freed == {block: block for block in range(8)}


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`output`.*Name a folder"):
        run({"output": str(tmp_path / "file")})
