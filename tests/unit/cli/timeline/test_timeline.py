"""The timeline: laid out without overlaps, saved and read back, drawn self-contained."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cli.timeline.bars import LANES, lay_out, to_trace
from outrider.cli.timeline.picture import to_html, to_svg
from outrider.client import TimelineEvent

MS = 1_000_000
START = 1_763_000_000_000 * MS


def bar(lane: str, name: str, start_ns: int, duration_us: int, **counts: int) -> TimelineEvent:
    """One thing that took time."""
    return TimelineEvent(lane=lane, name=name, start_ns=start_ns, duration_us=duration_us, **counts)


BARS = [
    bar("draft", "block", START, 4_000, step=1, nodes=6),
    bar("wire", "block", START + 4 * MS, 1_000, step=1, nodes=6),
    bar("wire", "block", START + 4 * MS + 1, 1_000, step=1, nodes=2),
    bar("verify", "forward", START + 5 * MS, 20_000, step=1, nodes=8, accepted=3),
    bar("wire", "verdict", START + 25 * MS, 1_000, step=1),
    bar("verify", "forward", START + 27 * MS, 20_000, step=2, nodes=8, accepted=20),
]
bars = st.lists(
    st.builds(
        TimelineEvent,
        lane=st.sampled_from(LANES),
        name=st.text(max_size=5),
        start_ns=st.integers(START, START + 100 * MS),
        duration_us=st.integers(0, 30_000),
        step=st.integers(0, 5),
        nodes=st.integers(0, 50),
        accepted=st.integers(0, 30),
    ),
    max_size=20,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(bars)
def test_bars_of_a_row_never_overlap(given_bars: list[TimelineEvent]) -> None:
    """Whatever ran at once is drawn in different rows, and every bar is drawn."""
    layout = lay_out(given_bars)
    assert len(layout.placed) == len(given_bars)
    for lane in LANES:
        for row in range(layout.rows[lane]):
            line = [placed for placed in layout.of(lane) if placed.row == row]
            for before, after in pairwise(line):
                assert before.end_ms <= after.start_ms


def test_a_trace_has_named_threads_whose_bars_never_overlap() -> None:
    """Perfetto shows a track for each row of draft, wire and verify, with times in microseconds."""
    events = to_trace(BARS)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(dict.fromkeys(names.values())) == list(LANES)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(BARS)
    assert (slices[0]["ts"], slices[0]["dur"]) == (START / 1000, 4_000)
    for tid, lane in names.items():
        track = [event for event in slices if event["tid"] == tid]
        assert {event["cat"] for event in track} == {lane}
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.001


def test_busy_share_counts_overlaps_once() -> None:
    """Two messages at once keep the wire as busy as one."""
    layout = lay_out(BARS)
    assert layout.total_ms == 47.0
    assert layout.busy_share("verify") == pytest.approx(40 / 47)
    assert layout.busy_share("wire") == pytest.approx(2.000001 / 47, rel=1e-3)


def test_the_picture_shows_what_happened() -> None:
    """One bar per thing with a tooltip, a dot per accepted token, a number per step."""
    svg = ElementTree.fromstring(to_svg(BARS))
    space = "{http://www.w3.org/2000/svg}"
    rectangles = [node for node in svg.iter(f"{space}rect") if node.get("class", "").startswith("bar ")]
    assert len(rectangles) == len(BARS)
    titles = [node.findtext(f"{space}title") for node in rectangles]
    assert "verify: forward\n5.00 ms, for 20.00 ms\nstep 1\n8 nodes\n3 accepted + 1 bonus" in titles
    circles = [node.get("class") for node in svg.iter(f"{space}circle")]
    assert circles.count("accepted") == 3 + 8 + 1  # eight at most of a step, and one in the legend
    texts = {"".join(node.itertext()) for node in svg.iter(f"{space}text")}
    assert {"draft", "wire", "verify", "committed", "ms", "1", "2", "21"} <= texts


def test_the_page_loads_nothing() -> None:
    """The HTML can be mailed: no script, no link, no address but the SVG namespace."""
    page = to_html(BARS)
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")
    for forbidden in ("<script", "<link", "src=", "@import", "url("):
        assert forbidden not in page


def test_names_are_escaped() -> None:
    """A name from the wire is text, never markup."""
    assert "<b>" not in to_html([bar("wire", "<b>&", START, 90_000)])


def test_no_bars_is_an_empty_picture() -> None:
    """Nothing to draw is no crash."""
    ElementTree.fromstring(to_svg([]))
