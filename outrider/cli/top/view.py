"""Draws a frame on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.top.frame import Frame, ReplicaRow, Task

UNKNOWN = "\N{EN DASH}"
LEFT = 1
"""Columns at the left that hold words; the others hold numbers."""


def view(frame: Frame) -> RenderableType:
    """The whole frame: first the summary, then its parts."""
    parts: list[RenderableType] = [_summary(frame)]
    if frame.tasks:
        parts += [
            "",
            _table(("task", "tokens/s", "tokens/step", "accepted", "hits"), map(_task, frame.tasks)),
        ]
    if frame.replicas:
        head = ("replica", "sessions", "tokens/s", "step", "efficiency", "KV pages", "KV")
        parts += ["", _table(head, map(_replica, frame.replicas))]
    if frame.problems:
        parts += ["", *(Text(f"{where} {why}", style="red") for where, why in sorted(frame.problems.items()))]
    return Group(*parts)


def _summary(frame: Frame) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, said in _facts(frame):
        table.add_row(Text(name, style="bold"), said)
    return table


def _facts(frame: Frame) -> Iterable[tuple[str, str]]:
    requests, pool = frame.requests, frame.pool
    if requests is not None:
        each = (
            f"{_number(requests.finished, 1)} finished and {_number(requests.refused, 1)} refused each second"
        )
        yield "requests", f"{requests.running:.0f} running, {requests.waiting:.0f} waiting; {each}"
        yield "tokens/s", _number(requests.tokens, 0)
        later = f", 95 % within {_millis(requests.first_token_95)}"
        yield "first token", f"{_millis(requests.first_token)} median{later}"
    yield "pipeline", f"{_share(frame.efficiency)} efficient"
    for kind, states in frame.states.items():
        if states:
            yield f"{kind} replicas", ", ".join(f"{count:.0f} {state}" for state, count in states.items())
    if pool is not None:
        sessions = f"{pool.wanted:.0f} sessions want a draft, {pool.waiting:.0f} of them wait"
        yield "draft pool", f"{sessions}; room for {pool.slots:.0f}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < LEFT else "right", header_style="bold", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _task(task: Task) -> tuple[str, ...]:
    name = "(no label)" if task.name == "none" else task.name
    return name, _number(task.tokens, 0), _number(task.per_step, 2), _share(task.accepted), _share(task.hits)


def _replica(replica: ReplicaRow) -> tuple[str, ...]:
    used = replica.pages_used / replica.pages if replica.pages else None
    return (
        f"{replica.kind} {replica.address.removeprefix('http://').removesuffix('/metrics')}",
        f"{replica.sessions:.0f} of {replica.limit:.0f}",
        _number(replica.tokens, 0),
        _millis(replica.step),
        _share(replica.efficiency),
        f"{replica.pages_used:.0f} of {replica.pages:.0f}" if replica.pages else UNKNOWN,
        _share(used),
    )


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _millis(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1000 * seconds:.1f} ms"
