"""Draws the findings as one SVG: tokens per second by load, and how far chains are right. Pure; nothing is
loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

from outrider.cli.advise.findings import Findings
from outrider.cli.advise.options import WITHOUT
from outrider.cli.timeline.picture import nice

WIDTH, HEIGHT = 420.0, 260.0
"""Size of a panel's plot, in pixels."""
LEFT, TOP, GAP = 64.0, 44.0, 90.0
ROW = 20.0
TICKS = 5
COLOURS = 8
"""Colours of lines; further lines begin with the first again."""
STYLE = """
svg.advise {
  --ink:#1c2330; --soft:#68707f; --line:#e3e6ec; --paper:#ffffff;
  background:var(--paper); font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
}
@media (prefers-color-scheme: dark) {
  svg.advise { --ink:#e8ebf2; --soft:#98a1b3; --line:#2b3242; --paper:#141923; }
}
.advise text { fill:var(--ink); }
.advise text.soft { fill:var(--soft); }
.advise text.title { font-weight:600; }
.advise .grid { stroke:var(--line); }
.advise .curve { fill:none; stroke-width:2; }
.advise .c0 { stroke:#68707f; stroke-dasharray:5 4; } .advise .c1 { stroke:#4a5fd0; }
.advise .c2 { stroke:#17907f; } .advise .c3 { stroke:#d9603b; } .advise .c4 { stroke:#c58a1c; }
.advise .c5 { stroke:#8f4bb8; } .advise .c6 { stroke:#2c9c4b; } .advise .c7 { stroke:#c2447f; }
"""


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve: its name, its place among the colours, and its points in the units of its panel."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Panel:
    """One plot; points of `lines` are scaled to `widest` and `highest`."""

    title: str
    x_title: str
    left: float
    lines: Sequence[_Line]
    ticks: Sequence[tuple[float, str]]
    """Along the x axis."""
    highest: float
    step: float
    """Between the ticks of the y axis."""
    percent: bool = False

    def parts(self) -> Iterator[str]:
        """The panel's elements."""
        yield _text(self.left, TOP - 20, self.title, "title")
        yield from self._axes()
        for line in self.lines:
            yield from self._curve(line)

    def _axes(self) -> Iterator[str]:
        for count in range(int(self.highest / self.step + 1e-9) + 1):
            value = count * self.step
            y = self._y(value)
            yield f'<path class="grid" d="M{self.left:.1f} {y:.1f}h{WIDTH:.1f}"/>'
            label = f"{value:.0%}" if self.percent else f"{value:g}"
            yield _text(self.left - 8, y + 4, label, "soft", "end")
        for place, label in self.ticks:
            yield _text(self._x(place), TOP + HEIGHT + 18, label, "soft", "middle")
        yield _text(self.left + WIDTH / 2, TOP + HEIGHT + 36, self.x_title, "soft", "middle")

    def _curve(self, line: _Line) -> Iterator[str]:
        places = [(self._x(x), self._y(y)) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        if path:
            yield f'<path class="curve c{line.colour}" d="M{path}"><title>{escape(line.name)}</title></path>'
        for (x, y), (_, value) in zip(places, line.points, strict=True):
            shown = f"{value:.0%}" if self.percent else f"{value:.4g}"
            yield f'<circle class="curve c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
            yield f"<title>{escape(line.name)}: {shown}</title></circle>"

    def _x(self, place: float) -> float:
        first, last = self.ticks[0][0], self.ticks[-1][0]
        return self.left + WIDTH * ((place - first) / (last - first) if last > first else 0.5)

    def _y(self, value: float) -> float:
        return TOP + HEIGHT * (1.0 - value / self.highest)


def to_svg(findings: Findings) -> str:
    """The picture."""
    panels = (_rates(findings), _chains(findings))
    names = [WITHOUT.name, *(one.option.name for one in findings.candidates)]
    height = TOP + HEIGHT + 60 + ROW * len(names)
    width = LEFT + 2 * WIDTH + GAP + 24
    body = [part for panel in panels for part in panel.parts()]
    body += [part for index, name in enumerate(names) for part in _legend(index, name)]
    return (
        f'<svg class="advise" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Drafts of {escape(findings.target)}">'
        f"<style>{STYLE}</style>{''.join(body)}</svg>\n"
    )


def _rates(findings: Findings) -> _Panel:
    all_rates = [findings.without, *(one.rates for one in findings.candidates)]
    names = [WITHOUT.name, *(one.option.name for one in findings.candidates)]
    lines = [
        _Line(name, index % COLOURS, [(log2(rate.sessions), rate.tokens_per_second) for rate in rates])
        for index, (name, rates) in enumerate(zip(names, all_rates, strict=True))
    ]
    most = max(value for line in lines for _, value in line.points)
    step = nice(most / TICKS)
    ticks = [(log2(rate.sessions), str(rate.sessions)) for rate in findings.without]
    highest = step * -(-most // step)
    return _Panel("expected tokens per second", "sessions at once", LEFT, lines, ticks, highest, step)


def _chains(findings: Findings) -> _Panel:
    lines = [
        _Line(one.option.name, index % COLOURS, list(enumerate(one.acceptance(findings.tasks), 1)))
        for index, one in enumerate(findings.candidates, 1)
    ]
    longest = max((len(line.points) for line in lines), default=0)
    ticks = [(float(place), str(place)) for place in range(1, max(longest, 1) + 1)]
    left = LEFT + WIDTH + GAP
    return _Panel(
        *("chains whose first n tokens are all right", "n", left, lines, ticks, 1.0, 0.2), percent=True
    )


def _legend(index: int, name: str) -> Iterator[str]:
    y = TOP + HEIGHT + 62 + ROW * index
    yield f'<path class="curve c{index % COLOURS}" d="M{LEFT:.1f} {y - 4:.1f}h28"/>'
    yield _text(LEFT + 38, y, name)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
