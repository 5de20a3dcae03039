"""A machine and a pair whose every time is known."""

from __future__ import annotations

import json

import pytest

from outrider.speculation.acceptance import BUCKETS
from simulator.profile import HostTimes, Profile
from simulator.traces import CANDIDATES, NO_RANK, Guess, Trace, encode

FREE = HostTimes(send=0, receive=0, wake=0, verify_session=0, draft_step=0, draft_verdict=0)
SURE = BUCKETS // 2 - 1
"""Bucket of the highest confidence."""
PERFECT = Guess(0, (SURE,) + (0,) * (CANDIDATES - 1))
USELESS = Guess(NO_RANK, (0,) * CANDIDATES)


@pytest.fixture
def make_profile(tmp_path):
    """A profile whose texts repeat one guess; times in seconds."""

    def make(
        guess=PERFECT, *, host=FREE, target=((1, 0.010), (512, 0.010)), draft=((1, 0.001), (512, 0.001))
    ):
        tokens = tuple(
            (7 * place * place + 3 * place) % 4001 for place in range(300)
        )  # hardly repeats itself
        trace = Trace((1, 2, 3), tokens, 1, (guess,) * len(tokens))
        path = tmp_path / "traces.json"
        path.write_text(json.dumps({"vocabulary_size": 4096, "traces": {"0.0": [encode(trace)]}}))
        return Profile(
            name="known",
            origin="modelled",
            note="",
            traces=str(path),
            cores="own",
            target_forward=target,
            draft_forward=draft,
            host=host,
        )

    return make
