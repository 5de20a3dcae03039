"""Which replica is used next, and which is kept out for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.replicas.pool import LOST_PROBES, Replicas, ReplicaState, Reservation
from outrider.protocol.errors import (
    DeadlineExceeded,
    Draining,
    Flood,
    InternalError,
    InvalidRequest,
    MismatchedPair,
    OutOfPages,
    OutriderError,
    Overloaded,
    StaleHandle,
    Unavailable,
)
from outrider.protocol.messages import ModelInfo


def ignore(error: OutriderError) -> None:
    """A session that does not care."""


def info(sessions: int = 0, incarnation: str = "") -> ModelInfo:
    """What a replica with room for ten sessions says."""
    return ModelInfo("m", "h", 10, 10, incarnation=incarnation, max_sessions=10, sessions=sessions)


def pool(*endpoints: str) -> Replicas:
    """Replicas that answered their first probe; the breaker opens at 2 failures for 5 seconds."""
    replicas = Replicas(2, 5.0)
    replicas.set_endpoints(endpoints)
    for endpoint in endpoints:
        replicas.seen(endpoint, info(), True)
    return replicas


def reserve(replicas: Replicas, now: float = 0.0, **options: Any) -> Reservation:
    """A reservation that must be had."""
    found = replicas.reserve(now, ignore, **options)
    assert found is not None
    return found


def state(replicas: Replicas, endpoint: str, now: float = 0.0) -> ReplicaState:
    """The state of one replica."""
    replica = replicas.find(endpoint)
    assert replica is not None
    return replicas.state(replica, now)


def test_replicas_are_used_once_a_probe_was_answered() -> None:
    """A new endpoint is unknown, a silent one down, a draining one draining; none of them is used."""
    replicas = Replicas(2, 5.0)
    replicas.set_endpoints(["a"])
    assert state(replicas, "a") is ReplicaState.UNKNOWN
    replicas.missed("a", Unavailable("nobody"))
    assert state(replicas, "a") is ReplicaState.DOWN
    replicas.seen("a", info(), serving=False)
    assert state(replicas, "a") is ReplicaState.DRAINING
    replicas.seen("a", info(), True, mismatch="other vocabulary")
    assert state(replicas, "a") is ReplicaState.MISMATCHED
    assert replicas.reserve(0.0, ignore) is None
    replicas.seen("a", info(), True)
    assert reserve(replicas).replica.endpoint == "a"


def test_a_session_gets_a_draft_of_another_model_beside_the_one_it_has() -> None:
    """A second replica of the same where there is no other model, and never the same replica twice."""
    replicas = pool("a", "b", "c")
    replicas.seen("c", replace(info(), model="other"), True)
    for _ in range(3):
        assert reserve(replicas, beside=["a"]).replica.endpoint == "c"
    assert reserve(replicas, beside=["a", "c"]).replica.endpoint == "b"
    assert replicas.reserve(0.0, ignore, beside=["a", "b", "c"]) is None


def test_least_loaded_replica_is_chosen() -> None:
    """Sessions of others, as probed, and our own since then both count."""
    replicas = pool("a", "b")
    replicas.seen("a", info(sessions=3), True)
    assert [reserve(replicas, tokens=(n,)).replica.endpoint for n in range(6)] == [
        "b",
        "b",
        "b",
        "a",
        "b",
        "a",
    ]


def test_prompts_with_the_same_beginning_go_to_the_same_replica() -> None:
    """The replica that has a prompt's pages is preferred while it is not much busier than the others."""
    replicas = pool("a", "b")
    assert reserve(replicas, tokens=range(100)).replica.endpoint == "a"
    chosen = [reserve(replicas, tokens=range(80)).replica.endpoint for _ in range(4)]
    assert chosen == ["a", "a", "b", "b"]


def test_avoided_replica_is_the_last_resort() -> None:
    """The replica that just failed is used only when there is no other."""
    assert reserve(pool("a", "b"), avoid="a").replica.endpoint == "b"
    assert reserve(pool("a"), avoid="a").replica.endpoint == "a"


def test_preferred_replica_wins_while_it_can_be_used() -> None:
    """A replica that holds the keys and values is used even when busier, but not when it is down."""
    replicas = pool("a", "b")
    replicas.seen("b", info(sessions=9), True)
    assert reserve(replicas, prefer="b").replica.endpoint == "b"
    replicas.missed("b", Unavailable("gone"))
    assert reserve(replicas, prefer="b").replica.endpoint == "a"


def test_breaker_opens_after_failures_in_a_row() -> None:
    """A success in between starts the count anew; open, the replica is left alone."""
    replicas = pool("a")
    first = reserve(replicas)
    replicas.failed(first, InternalError("bad block"), 0.0)
    replicas.succeeded(first)
    replicas.failed(first, InternalError("bad block"), 0.0)
    assert state(replicas, "a") is ReplicaState.USABLE
    replicas.failed(first, InternalError("bad block"), 1.0)
    assert state(replicas, "a", 5.9) is ReplicaState.BROKEN
    assert replicas.next_change(5.9) == 6.0
    assert replicas.reserve(5.9, ignore) is None


def test_one_flood_opens_the_breaker() -> None:
    """Who sends more than it may is kept out at once, whatever it did well before."""
    replicas = pool("a")
    flooded = reserve(replicas)
    replicas.succeeded(flooded)
    replicas.failed(flooded, Flood("too many blocks"), 1.0)
    assert state(replicas, "a", 5.9) is ReplicaState.BROKEN


def test_half_open_breaker_lets_one_session_try() -> None:
    """After the pause one session tries; its failure opens the breaker again, its success closes it."""
    replicas = pool("a")
    for _ in range(2):
        replicas.failed(reserve(replicas), InternalError("bad block"), 0.0)
    trial = reserve(replicas, 5.0)
    assert replicas.reserve(5.0, ignore) is None
    replicas.failed(trial, InternalError("bad block"), 6.0)
    replicas.release(trial)
    assert replicas.reserve(10.9, ignore) is None
    trial = reserve(replicas, 11.0)
    replicas.succeeded(trial)
    replicas.release(trial)
    assert replicas.next_change(11.0) is None
    reserve(replicas, 11.0)
    reserve(replicas, 11.0)


def test_trial_without_an_outcome_frees_the_breaker() -> None:
    """A trial session that ends for its own reasons lets another one try."""
    replicas = pool("a")
    for _ in range(2):
        replicas.failed(reserve(replicas), InternalError("bad block"), 0.0)
    replicas.release(reserve(replicas, 5.0))
    reserve(replicas, 5.0)


def test_new_incarnation_is_judged_afresh() -> None:
    """A restarted replica starts with a closed breaker; the sessions of its old process are told, and their
    reports do not count."""
    lost: list[str] = []
    replicas, made = pool("a"), {}
    for incarnation in ("1", "2", ""):
        found = replicas.reserve(0.0, lambda error, incarnation=incarnation: lost.append(incarnation))
        assert found is not None
        found.incarnation = incarnation
        made[incarnation] = found
    for _ in range(2):
        replicas.failed(made[""], InternalError("bad block"), 0.0)
    replicas.seen("a", info(incarnation="2"), True)
    assert state(replicas, "a", 0.1) is ReplicaState.USABLE
    assert lost == ["1"]
    for _ in range(5):
        replicas.failed(made["1"], Unavailable("it was restarted"), 0.2)
    assert state(replicas, "a", 0.3) is ReplicaState.USABLE


def test_a_replica_is_blamed_whatever_it_calls_itself() -> None:
    """A stream may name another incarnation than the probes found; only a replaced process is not blamed."""
    replicas = pool("a")
    replicas.seen("a", info(incarnation="1"), True)
    found = reserve(replicas)
    found.incarnation = "2"
    for _ in range(2):
        replicas.failed(found, InternalError("bad block"), 0.0)
    assert state(replicas, "a", 0.1) is ReplicaState.BROKEN


def test_a_process_that_is_listed_twice_is_used_once() -> None:
    """As long as it answers at the first endpoint; a process that does not say which it is stays used."""
    replicas = pool("a", "b")
    assert len(replicas.usable(0.0)) == 2
    for endpoint in ("a", "b", "a"):
        replicas.seen(endpoint, info(incarnation="1"), True)
    assert [replica.endpoint for replica in replicas.usable(0.0)] == ["a"]
    replicas.missed("a", Unavailable("no route"))
    replicas.seen("b", info(incarnation="1"), True)
    assert [replica.endpoint for replica in replicas.usable(0.0)] == ["b"]
    replicas.seen("a", info(incarnation="2"), True)
    assert len(replicas.usable(0.0)) == 2


def test_unavailable_replica_is_not_used_before_the_next_probe() -> None:
    """A broken stream is enough to try elsewhere; the probe that follows decides."""
    replicas = pool("a")
    replicas.failed(reserve(replicas), Unavailable("socket closed"), 0.0)
    assert state(replicas, "a") is ReplicaState.DOWN
    replicas.seen("a", info(), True)
    assert state(replicas, "a") is ReplicaState.USABLE


def test_sessions_are_lost_after_some_missed_probes() -> None:
    """A partitioned replica loses its sessions, once, when several probes in a row got no answer."""
    lost: list[OutriderError] = []
    replicas = pool("a")
    replicas.reserve(0.0, lost.append)
    for _ in range(LOST_PROBES - 1):
        replicas.missed("a", Unavailable("no answer"))
    assert lost == []
    for _ in range(3):
        replicas.missed("a", Unavailable("no answer"))
    assert len(lost) == 1


def test_a_replica_that_stands_still_is_lost() -> None:
    """Its probes run out of time; to its sessions this is the loss of a replica, not a fault of their own."""
    lost: list[OutriderError] = []
    replicas = pool("a")
    reservation = replicas.reserve(0.0, lost.append)
    assert reservation is not None
    for _ in range(LOST_PROBES):
        replicas.missed("a", DeadlineExceeded("no answer"))
    assert isinstance(lost[0], Unavailable)
    replicas.failed(reservation, lost[0], 0.0)
    assert reservation.replica.failures == 1


def test_full_replica_is_left_alone_as_long_as_it_asked() -> None:
    """A replica without room is not broken; others are preferred until it may have room."""
    replicas = pool("a", "b")
    full = reserve(replicas, tokens=(1,))
    assert full.replica.endpoint == "a"
    replicas.failed(full, Overloaded("full", 3.0), 0.0)
    replicas.release(full)
    assert reserve(replicas, 1.0, tokens=(2,)).replica.endpoint == "b"
    assert reserve(replicas, 1.0, avoid="b").replica.endpoint == "b"
    assert replicas.next_change(1.0) == 3.0
    assert state(replicas, "a", 1.0) is ReplicaState.USABLE
    assert reserve(replicas, 3.0, tokens=(3,)).replica.endpoint == "a"


def test_a_session_that_fits_no_pages_keeps_no_other_out() -> None:
    """Out of pages is said of one session; the replica takes others."""
    replicas = pool("a")
    replicas.failed(reserve(replicas), OutOfPages("too long", 3.0), 0.0)
    assert reserve(replicas, 0.0).replica.endpoint == "a"


def test_a_replica_without_room_is_chosen_last() -> None:
    """Neither pages nor an earlier turn make a session wait where another replica has room."""
    replicas = pool("a", "b")
    for _ in range(20):
        reserve(replicas, tokens=(1,), prefer="a")
    assert sorted(len(replica.reservations) for replica in replicas) == [10, 10]


def test_room_is_what_others_leave_and_a_place_in_their_line() -> None:
    """Alone we have all sessions; beside others, what they leave and one more, so that our turn comes."""
    replicas = pool("a")
    replica = replicas.find("a")
    assert replica is not None
    assert replica.room == 10
    reservations = [reserve(replicas) for _ in range(3)]
    replicas.seen("a", info(sessions=3), True)
    assert replica.room == 10
    replicas.seen("a", info(sessions=3 + 4), True)
    assert replica.room == 10 - 4 + 1
    replicas.seen("a", info(sessions=3 + 9), True)
    assert replica.room == 1 + 1
    for ours in reservations:
        ours.incarnation = "1"
    assert replica.room == 3 + 1


def test_refused_pairing_takes_the_replica_out() -> None:
    """A replica that says its vocabulary differs is not asked again before the next probe."""
    replicas = pool("a")
    replicas.failed(reserve(replicas), MismatchedPair("other vocabulary"), 0.0)
    assert state(replicas, "a") is ReplicaState.MISMATCHED
    assert replicas.count(ReplicaState.MISMATCHED, 0.0) == 1


def test_endpoints_come_and_go() -> None:
    """A removed replica is returned and not used; its sessions are not touched."""
    lost: list[OutriderError] = []
    replicas = pool("a", "b")
    replicas.reserve(0.0, lost.append, prefer="a")
    (gone,) = replicas.set_endpoints(["b", "c"])
    assert (gone.endpoint, len(gone.reservations), lost) == ("a", 1, [])
    assert [replica.endpoint for replica in replicas] == ["b", "c"]
    replicas.seen("a", info(), True)
    replicas.missed("a", Unavailable("gone"))
    assert replicas.find("a") is None


def test_a_replica_comes_back_with_its_sessions_and_is_probed_first() -> None:
    """What its last probe said may be old, and its sessions hear if it was restarted meanwhile."""
    lost: list[OutriderError] = []
    replicas = pool("a")
    reservation = replicas.reserve(0.0, lost.append)
    assert reservation is not None
    reservation.incarnation = "before"
    (gone,) = replicas.set_endpoints([])
    replicas.restore(gone)
    assert state(replicas, "a") is ReplicaState.DOWN
    replicas.seen("a", replace(info(), incarnation="after"), True)
    assert state(replicas, "a") is ReplicaState.USABLE
    assert len(lost) == 1


def moved(replicas: Replicas) -> list[OutriderError]:
    """What sessions of the replica `a` hear when up to three of them are to move."""
    heard: list[OutriderError] = []
    replica = replicas.find("a")
    assert replica is not None
    replica.reservations = {Reservation(replica, heard.append) for _ in replica.reservations}
    replicas.move(replica, 0.0, 3)
    return heard


def test_sessions_move_a_few_at_a_time() -> None:
    """Each costs the replica that gets it a prefill."""
    replicas = pool("a", "b")
    for _ in range(5):
        reserve(replicas, prefer="a")
    replicas.refused("a")
    assert [type(error) for error in moved(replicas)] == [Draining] * 3


def test_sessions_stay_where_nobody_else_is() -> None:
    """A replica that drains is better than none."""
    replicas = pool("a", "b")
    reserve(replicas, prefer="a")
    replicas.refused("a")
    replicas.missed("b", Unavailable("gone"))
    assert moved(replicas) == []


def test_a_drain_is_no_failure() -> None:
    """Neither the probes that are refused nor the sessions that leave count against the replica."""
    replicas = pool("a", "b")
    one = reserve(replicas, prefer="a")
    for _ in range(2 * LOST_PROBES):
        replicas.refused("a")
    assert state(replicas, "a") is ReplicaState.DRAINING
    replicas.failed(one, Draining("going"), 0.0)
    assert one.replica.failures == 0
    replicas.seen("a", info(), True)
    assert state(replicas, "a") is ReplicaState.USABLE


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("not read"), InvalidRequest("choice", "no"), StaleHandle("old")]
)
def test_faults_of_the_caller_do_not_count_against_the_replica(error: OutriderError) -> None:
    """A request that is wrong, or whose caller does not read, leaves its replica to the others."""
    replicas = pool("a")
    for _ in range(9):
        replicas.failed(reserve(replicas), error, 0.0)
    assert state(replicas, "a") is ReplicaState.USABLE


def test_a_replica_that_loads_is_not_waited_for() -> None:
    """It answers, and does not say what it will serve: as good as down until it does."""
    replicas = Replicas(2, 5.0)
    replicas.set_endpoints(["a"])
    replicas.refused("a")
    assert state(replicas, "a") is ReplicaState.DOWN


def test_a_shadow_is_not_reserved_and_its_sessions_move() -> None:
    """A draft that becomes one is left as if it drained; without another one, its sessions stay."""
    replicas, told = pool("a", "b"), list[OutriderError]()
    assert replicas.reserve(0.0, told.append, prefer="a") is not None
    replicas.seen("a", replace(info(), shadow=True), True)
    shadow = replicas.find("a")
    assert shadow is not None
    assert state(replicas, "a") is ReplicaState.SHADOW
    assert reserve(replicas, prefer="a").replica.endpoint == "b"
    replicas.move(shadow, 0.0, 8)
    assert [type(error) for error in told] == [Draining]
    replicas.missed("b", Unavailable("nobody"))
    assert replicas.reserve(0.0, ignore) is None
    replicas.move(shadow, 0.0, 8)
    assert len(told) == 1
    replicas.seen("a", info(), True)
    assert reserve(replicas).replica.endpoint == "a"
