"""Small SVG pictures: rectangles and words, one colour table, the same bytes every time.

A picture brings its own background and follows the reader's colour scheme, so it can be read in light and dark pages
alike. Tones are numbers; what they mean is said by a legend.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

# By tone: fill in light, fill in dark. Neighbours differ in lightness too.
TONES = (("#2b6cb0", "#63a4e8"), ("#e2a33b", "#c98a1e"), ("#2f9e7f", "#4cc3a0"), ("#a23b72", "#d76aa3"))
_COLOURS = {
    "paper": ("#ffffff", "#161b22"),
    "ink": ("#1f2933", "#e6edf3"),
    "quiet": ("#5b6672", "#9aa7b4"),
    "empty": ("#edf0f3", "#262d36"),
}


class Picture:
    """A picture in the making.

    Args:
        width: Pixels.
        height: Pixels.
        title: What it shows, for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, tone: int | None, *, note: str = "") -> None:
        """A rectangle.

        Args:
            x: Left.
            y: Top.
            width: Pixels.
            height: Pixels.
            tone: Number of the colour; None = empty.
            note: Shown while the pointer rests on it.
        """
        kind = "empty" if tone is None else f"t{tone}"
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        inside = f"><title>{escape(note)}</title></rect>" if note else "/>"
        self._parts.append(f'<rect class="{kind}" {size}{inside}')

    def words(
        self, x: float, y: float, text: str, *, kind: str = "ink", size: float = 12, anchor: str = "start"
    ) -> None:
        """A line of text.

        Args:
            x: Where it is anchored.
            y: Its base line.
            text: What it says.
            kind: `ink`, `quiet`, `strong`, or `paper` on a coloured box.
            size: Pixels.
            anchor: `start`, `middle` or `end`.
        """
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A thin line."""
        self._parts.append(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>')

    def legend(self, x: float, y: float, entries: list[tuple[int | None, str]], *, step: float = 92) -> None:
        """What tones mean, side by side."""
        for number, (tone, text) in enumerate(entries):
            self.box(x + number * step, y - 10, 11, 11, tone)
            self.words(x + number * step + 16, y, text)

    def write(self, path: Path) -> None:
        """Save it."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
        paper = '<rect class="paper" width="100%" height="100%" rx="6"/>'
        lines = [head, f"<title>{escape(self.title)}</title>", f"<style>{_style()}</style>", paper, *self._parts]
        path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


def _style() -> str:
    light, dark = (_rules(scheme) for scheme in (0, 1))
    return f".strong{{font-weight:bold}}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _rules(scheme: int) -> str:
    colours = {name: pair[scheme] for name, pair in _COLOURS.items()}
    colours |= {f"t{tone}": pair[scheme] for tone, pair in enumerate(TONES)}
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    return f"{fills}.strong{{fill:{colours['ink']}}}line{{stroke:{colours['quiet']}}}"
