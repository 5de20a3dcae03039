"""Draws a timeline as SVG, alone or in an HTML page that loads nothing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from outrider.cli.timeline.bars import LANES, Placed, TimelineLayout, lay_out
from outrider.cli.timeline.style import PAGE, STYLE
from outrider.client.results import TimelineEvent

ROW = 24
"""Height of a bar's row in pixels."""
LANE_GAP = 18
LEFT = 92
"""Width in pixels of the lanes' names."""
RIGHT, TOP = 24, 34
"""Margins in pixels."""
DOT, MAX_DOTS = 4.0, 8
"""Radius in pixels of a dot for a token, and most dots below a step."""
STEP_PIXELS = 72
"""Width in pixels of the target's median forward, if the picture is then from MIN_WIDTH to MAX_WIDTH wide."""
MIN_WIDTH, MAX_WIDTH = 1000, 20_000
TICK_PIXELS = 90
"""Least distance in pixels between two marks of the time axis."""


def to_html(bars: Sequence[TimelineEvent]) -> str:
    """A self-contained page with the picture and its figures; the lanes' names stay while it scrolls."""
    canvas = _Canvas(lay_out(bars))
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(canvas.layout)
    )
    names = _svg(LEFT - 6, canvas.height, canvas.lanes())
    return PAGE.replace("@FACTS@", facts).replace("@NAMES@", names).replace("@SVG@", _picture(canvas))


def to_svg(bars: Sequence[TimelineEvent]) -> str:
    """Only the picture: lanes, step grid, committed tokens, axis and legend."""
    return _picture(_Canvas(lay_out(bars)))


def _picture(canvas: _Canvas) -> str:
    parts = (canvas.grid, canvas.lanes, canvas.ground, canvas.bars, canvas.tokens, canvas.legend)
    return _svg(canvas.width + LEFT + RIGHT, canvas.height, (text for part in parts for text in part()))


def _svg(width: float, height: int, parts: Iterable[str]) -> str:
    return (
        f'<svg class="timeline" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img" aria-label="Timeline of one request">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


class _Canvas:
    """Where things go, in pixels."""

    def __init__(self, layout: TimelineLayout) -> None:
        self.layout = layout
        self.forwards = layout.of("verify")
        self.width = _width(layout)
        self.scale = self.width / layout.total_ms if layout.total_ms else 1.0
        self.tops: dict[str, int] = {}
        y = TOP
        for lane in LANES:
            self.tops[lane] = y
            y += layout.rows[lane] * ROW + LANE_GAP
        self.tokens_top = y
        most = max((min(placed.bar.accepted, MAX_DOTS) for placed in self.forwards), default=0)
        self.axis = y + int(2 * DOT * (most + 1)) + 26
        self.height = self.axis + 62

    def x(self, milliseconds: float) -> float:
        return LEFT + milliseconds * self.scale

    def grid(self) -> Iterator[str]:
        """A line where each verify step begins, its number above, and the time axis below."""
        ends = [placed.start_ms for placed in self.forwards[1:]] + [self.layout.total_ms]
        for index, (placed, end) in enumerate(zip(self.forwards, ends, strict=False)):
            x = self.x(placed.start_ms)
            if index % 2 == 0:
                yield _rect("stripe", x, TOP - 8, self.x(end) - x, self.axis - TOP + 8) + "</rect>"
            yield _line(x, TOP - 8, self.axis)
            yield _text(x + 3, TOP - 14, str(placed.bar.step), "soft")
        step = nice(self.layout.total_ms * TICK_PIXELS / self.width)
        for tick in range(int(self.layout.total_ms / step) + 1):
            x = self.x(tick * step)
            yield _line(x, self.axis, self.axis + 5)
            yield _text(x, self.axis + 18, f"{tick * step:g}", "soft", "middle")

    def lanes(self) -> Iterator[str]:
        """The lanes' names at the left."""
        for lane in LANES:
            middle = self.tops[lane] + self.layout.rows[lane] * ROW / 2 + 4
            yield _text(LEFT - 12, middle, lane, "lane", "end")
        yield _text(LEFT - 12, (self.tokens_top + self.axis) / 2 + 8, "committed", "lane", "end")
        yield _text(LEFT - 12, TOP - 14, "step", "soft", "end")
        yield _text(LEFT - 12, self.axis + 18, "ms", "soft", "end")

    def ground(self) -> Iterator[str]:
        """The line that the committed tokens stand on."""
        yield f'<path class="grid" d="M{LEFT} {self.axis}H{LEFT + self.width:.1f}"/>'

    def bars(self) -> Iterator[str]:
        """One rectangle per bar, with a tooltip and, where there is room, a label."""
        for placed in self.layout.placed:
            bar = placed.bar
            x, y = self.x(placed.start_ms), self.tops[bar.lane] + placed.row * ROW
            width = max(1.5, self.x(placed.end_ms) - x)
            title = f"<title>{escape(_tooltip(placed))}</title></rect>"
            yield _rect(f"bar {bar.lane}", x, y, width, ROW - 5, rounded=True) + title
            label = _nodes(bar) or bar.name
            if width > 7 * len(label):
                yield _text(x + width / 2, y + 13, label, "label", "middle")

    def tokens(self) -> Iterator[str]:
        """Below each step's end, a dot per accepted token and a ring for the bonus token."""
        for placed in self.forwards:
            x, y = self.x(placed.end_ms), self.axis - 8.0
            for _ in range(min(placed.bar.accepted, MAX_DOTS)):
                yield f'<circle class="accepted" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>'
                y -= 2 * DOT
            yield f'<circle class="bonus" cx="{x:.1f}" cy="{y:.1f}" r="{DOT - 1}"/>'
            if placed.bar.accepted > MAX_DOTS:
                yield _text(x + 7, y + 4, f"{placed.bar.accepted + 1}", "soft")

    def legend(self) -> Iterator[str]:
        """What the colours mean."""
        x, y = float(LEFT), self.axis + 44
        for lane, meaning in zip(
            LANES, ("draft forward", "on the way or waiting", "target forward"), strict=True
        ):
            yield _rect(lane, x, y - 10, 18, 11, rounded=True) + "</rect>"
            yield _text(x + 24, y, meaning)
            x += 50 + 6.2 * len(meaning)
        yield f'<circle class="accepted" cx="{x:.0f}" cy="{y - 4}" r="{DOT}"/>' + _text(
            x + 10, y, "accepted token"
        )
        x += 120
        yield f'<circle class="bonus" cx="{x:.0f}" cy="{y - 4}" r="{DOT - 1}"/>' + _text(
            x + 10, y, "bonus token"
        )


def _facts(layout: TimelineLayout) -> list[tuple[str, str]]:
    steps = layout.of("verify")
    committed = sum(placed.bar.accepted + 1 for placed in steps)
    facts = [("time", f"{layout.total_ms:.0f} ms"), ("verify steps", str(len(steps)))]
    if steps:
        facts.append(("tokens per step", f"{committed / len(steps):.2f}"))
        facts.append(("median target forward", f"{median(p.end_ms - p.start_ms for p in steps):.1f} ms"))
    facts.append(("target busy", f"{layout.busy_share('verify'):.0%}"))
    facts.append(("draft busy", f"{layout.busy_share('draft'):.0%}"))
    return facts


def _width(layout: TimelineLayout) -> float:
    """A width at which the median forward of the target is readable."""
    forwards = [placed.end_ms - placed.start_ms for placed in layout.of("verify")]
    typical = median(forwards) if forwards else 0.0
    wanted = layout.total_ms / typical * STEP_PIXELS if typical > 0 else 0.0
    return min(max(wanted, MIN_WIDTH), MAX_WIDTH)


def nice(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not below `rough`."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _tooltip(placed: Placed) -> str:
    bar = placed.bar
    lines = [
        f"{bar.lane}: {bar.name}",
        f"{placed.start_ms:.2f} ms, for {placed.end_ms - placed.start_ms:.2f} ms",
    ]
    if bar.step:
        lines.append(f"step {bar.step}")
    if bar.nodes:
        lines.append(_nodes(bar))
    if bar.lane == "verify":
        lines.append(f"{bar.accepted} accepted + 1 bonus")
    return "\n".join(lines)


def _rect(kind: str, x: float, y: float, width: float, height: float, rounded: bool = False) -> str:
    """An opened rectangle, so that a tooltip can go inside."""
    size = f'x="{x:.1f}" y="{y:.0f}" width="{max(width, 0.0):.1f}" height="{height:.0f}"'
    return f'<rect class="{kind}" {size} rx="{3 if rounded else 0}">'


def _nodes(bar: TimelineEvent) -> str:
    return "" if not bar.nodes else "1 node" if bar.nodes == 1 else f"{bar.nodes} nodes"


def _line(x: float, top: float, bottom: float) -> str:
    return f'<path class="grid" d="M{x:.1f} {top:.0f}V{bottom:.0f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
