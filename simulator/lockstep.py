"""The baseline on one device: an engine that in turns drafts a chain for its whole batch and verifies it.

This is what co-located engines do: k draft forwards over all sessions, then one target forward over k + 1
tokens of each. The best k for the load is found by trying all, which favours the baseline: in a real engine
it is set beforehand. Of the services only the recorded texts are used; a session's part of a step costs the
same host time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.messages import StepTimes, Verdict
from simulator.clients import ServedRequest, Texts
from simulator.devices import StepTotals
from simulator.profile import Profile
from simulator.topology import Load
from simulator.traces import Corpus, Script

CHAINS = (0, 1, 2, 3, 4, 5, 6, 8)


@dataclass(slots=True)
class LockstepRun:
    """The results of one length of chain."""

    chain: int
    served: list[ServedRequest]
    target: StepTotals
    draft: StepTotals


def run_lockstep(profile: Profile, corpus: Corpus, load: Load, sessions: int) -> LockstepRun:
    """Run `sessions` sessions in a closed loop with each length of chain; return the fastest run."""
    runs = [_Engine(profile, load, chain).run(Texts(corpus, load), sessions) for chain in CHAINS]
    return min(runs, key=lambda run: max(served.ended for served in run.served))


class _Engine:
    def __init__(self, profile: Profile, load: Load, chain: int) -> None:
        self._target = profile.target_times(load.temperature)
        self._draft = profile.draft_times(load.temperature)
        self._load = load
        self._chain = chain
        self._run = LockstepRun(chain, [], StepTotals(), StepTotals())
        self._now = 0.0

    def run(self, texts: Texts, sessions: int) -> LockstepRun:
        """Run all requests to their end; when one ends, the next takes its place."""
        left = sessions * (self._load.rounds - 1)
        running = [self._open(texts.next()) for _ in range(sessions)]
        while running:
            self._prefill([script for script, served in running if not served.tokens])
            self._round(running)
            for place, (_, served) in enumerate(running):
                if served.complete:
                    self._run.served.append(served)
                    if left:
                        left -= 1
                        running[place] = self._open(texts.next())
            running = [pair for pair in running if not pair[1].complete]
        return self._run

    def _open(self, script: Script) -> tuple[Script, ServedRequest]:
        return script, ServedRequest(self._now, script.generated)

    def _prefill(self, scripts: Sequence[Script]) -> None:
        tokens = sum(script.prompt_length - 1 for script in scripts)
        if tokens:
            self._now += self._target.forward(tokens, len(scripts)) + self._draft.forward(
                tokens, len(scripts)
            )

    def _round(self, running: Sequence[tuple[Script, ServedRequest]]) -> None:
        """k draft forwards, one target forward, and every session's tokens."""
        count = len(running)
        for _ in range(self._chain):
            seconds = self._draft.forward(count, count)
            self._run.draft.add(count, count, seconds)
            self._now += seconds + self._draft.step
        seconds = self._target.forward(count * (self._chain + 1), count)
        self._run.target.add(count * (self._chain + 1), count, seconds)
        self._now += seconds + self._target.step + self._target.session * count
        for script, served in running:
            self._commit(script, served, seconds)

    def _commit(self, script: Script, served: ServedRequest, seconds: float) -> None:
        start = len(served.tokens)
        accepted = 0
        while accepted < self._chain and start + accepted < len(script.guesses) - 1:
            if script.guesses[start + accepted].rank:
                break
            accepted += 1
        tokens = script.generated[start : start + accepted + 1]
        verdict = Verdict(
            step=served.statistics.steps + 1,
            base_length=script.prompt_length + start,
            tokens=tokens,
            verified=self._chain,
            accepted=accepted,
            times=StepTimes(forward_micros=round(seconds * 1e6)),
        )
        served.statistics.add_verdict(verdict, self._now)
        served.read(self._now, verdict)
