"""Times of machines."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import ConfigError
from simulator.cli import find_profile
from simulator.modelled import BANDWIDTH, FLOPS, LLAMA_8B, PAIRS
from simulator.profile import Profile, interpolate

POINTS = ((1, 1.0), (3, 2.0), (7, 4.0))


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0), (11, 6.0)])
def test_times_are_straight_between_points_and_go_on_beyond(tokens, seconds):
    """The last two points say how."""
    assert interpolate(POINTS, tokens) == seconds


def test_sampling_takes_time_only_when_it_happens():
    """At temperature 0 it does not."""
    profile = find_profile("widened")
    greedy, sampled = (profile.target_times(temperature).forward(4, 1) for temperature in (0.0, 0.7))
    assert sampled == pytest.approx(greedy + profile.target_sampling)


@pytest.mark.parametrize("name", PAIRS)
def test_modelled_machines_say_so(name):
    """A figure from a data sheet must never pass for a measured one."""
    assert find_profile(name).origin == "modelled"


def test_a_modelled_step_is_bound_by_bytes_then_by_arithmetic():
    """One token reads all weights; a thousand compute longer than that."""
    profile = find_profile("h100-8b-1b")
    read = 2 * LLAMA_8B.parameters / BANDWIDTH
    assert interpolate(profile.target_forward, 1) == pytest.approx(read + LLAMA_8B.fixed)
    assert interpolate(profile.target_forward, 1024) == pytest.approx(
        2 * LLAMA_8B.parameters * 1024 / FLOPS + LLAMA_8B.fixed
    )


def test_an_unknown_profile_is_refused_with_what_there_is():
    """The message names the others."""
    with pytest.raises(ConfigError, match="widened"):
        find_profile("no-such-machine")


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", r"is no profile \(Invalid JSON"), ("{}", r"is no profile \(name: Field required")],
)
def test_a_file_that_is_no_profile_is_one_sentence(tmp_path, content, said):
    """It names the first field that is wrong."""
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        Profile.read(path)
