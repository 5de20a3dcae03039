"""The table and the JSON of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from outrider.cli.bench.figures import summarize
from outrider.cli.bench.outcomes import RequestOutcome
from outrider.cli.bench.report import LoadRun, record, table, without_token
from outrider.cli.bench.slo import parse_slo
from outrider.protocol.errors import Overloaded
from tests.unit.cli.bench.worlds import SERVED, outcome

COUNTS = {"steps": 4, "drafted": 12, "verified": 10, "accepted": 5, "acceptance_length": 2.25}


def run_of(
    outcomes: Sequence[RequestOutcome], requests: int | None = None, begun: int | None = None
) -> LoadRun:
    """A run with these requests."""
    slo = parse_slo("ttft=500ms")
    count = len(outcomes)
    return LoadRun(
        served=SERVED,
        setting="2 requests",
        requests=requests or count,
        begun=begun or count,
        outcomes=outcomes,
        summary=summarize(outcomes, slo),
        slo=slo,
    )


def test_the_table_has_all_figures() -> None:
    """Latencies in milliseconds, goodput with its bounds, acceptance where it is told."""
    one = outcome(0, deliveries=(0.25, 0.3), tokens=2, speculation=COUNTS, cached_tokens=4)
    lines = table(run_of([one])).splitlines()
    assert lines[0] == "gRPC here, model demo"
    rows = [" ".join(line.split()) for line in lines]
    assert "input tokens 10 4 of them cached" in rows
    assert "output tokens/s 6.7" in rows
    assert "goodput 100.0% within ttft <= 500 ms" in rows
    assert "time to first token 250.00 250.00 250.00 250.00 250.00" in rows
    assert "per output token 50.00 50.00 50.00 50.00 50.00" in rows
    assert "acceptance length 2.25 tokens per step, acceptance rate 50.0% of verified nodes" in rows
    assert "4 steps; 12 nodes from drafts; 10 verified, those of lookup included, 5 accepted" in rows


def test_what_is_not_known_has_no_row() -> None:
    """A server that tells no acceptance, a load without arrivals."""
    text = table(run_of([outcome()]))
    assert "acceptance" not in text
    assert "sent late" not in text
    assert "interrupted" not in text


def test_failures_are_counted_and_the_first_is_shown() -> None:
    """The first by time, with its number."""
    late = outcome(0, deliveries=(9.0,), error=Overloaded("full at nine"))
    early = outcome(7, deliveries=(1.0,), error=Overloaded("full at one"))
    text = table(run_of([late, early]))
    assert "failed: 2 OVERLOADED\nthe first, request 7: full at one" in text


def test_an_interrupted_run_says_what_is_missing() -> None:
    """Requests that were cut short, and those never sent."""
    assert "2 requests were cut short and 5 not sent" in table(run_of([outcome()], requests=8, begun=3))


def test_the_record_has_every_request() -> None:
    """In their order, in seconds from the first one, and JSON takes all of it."""
    second = outcome(1, sent=6.0, deliveries=(7.0, 7.5), tokens=2, due=5.5)
    first = outcome(0, sent=5.0, deliveries=(5.25,), error=Overloaded("full"), due=5.0)
    found = json.loads(json.dumps(record(run_of([second, first]), {"cpu": "x"}, ["outrider", "bench"], "1")))
    assert (found["command"], found["machine"], found["outrider"]) == ("outrider bench", {"cpu": "x"}, "1")
    assert found["slo_s"] == {"ttft": 0.5}
    assert found["summary"]["errors"] == {"OVERLOADED": 1}
    assert found["summary"]["ttft_s"]["p50"] == 1.0
    assert found["summary"]["duration_s"] == 2.5
    failed, done = found["requests"]
    assert failed["error"] == "OVERLOADED: full"
    assert (done["index"], done["sent_s"], done["late_s"], done["gaps_s"]) == (1, 1.0, 0.5, [0.5])
    assert (done["output_tokens"], done["good"], done["error"]) == (2, False, None)


def test_no_token_is_written_down() -> None:
    """The command line of a record can be shown to others."""
    command = ["outrider", "bench", "--token", "secret", "--token=secret", "--model", "m"]
    assert "secret" not in " ".join(without_token(command))
    assert without_token(command)[-2:] == ["--model", "m"]
