"""The rate limit: buckets under a clock of the test, who counts as one client, and the status of the call."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest

from orchestrator.request.rate_limit import OTHERS, RateLimit, client_of
from outrider.protocol.errors import Overloaded, RateLimited
from tests.clock import Clock
from tests.fakes import FakeVerify
from tests.unit.orchestrator.rig import Rig, request


def taken(limit: RateLimit, client: str, tries: int = 1) -> int:
    """How many of so many requests pass."""
    passed = 0
    for _ in range(tries):
        try:
            limit.take(client)
            passed += 1
        except RateLimited:
            pass
    return passed


def test_a_burst_then_the_rate() -> None:
    """A rested client has the burst at once, then one request per period, and another client its own."""
    clock = Clock()
    limit = RateLimit(2.0, 3, clock)
    assert taken(limit, "a", 10) == 3
    assert taken(limit, "b", 10) == 3
    clock.now += 0.5
    assert taken(limit, "a", 10) == 1
    clock.now += 1.0
    assert taken(limit, "a", 10) == 2
    clock.now += 100.0
    assert taken(limit, "a", 10) == 3


def test_the_refusal_says_when_to_come_again() -> None:
    """Exactly then there is room, and refused requests cost nothing."""
    clock = Clock()
    limit = RateLimit(0.5, 1, clock)
    limit.take("a")
    for _ in range(5):
        with pytest.raises(RateLimited, match=r"more than 0\.5 requests per second") as caught:
            limit.take("a")
        assert caught.value.retry_after == pytest.approx(2.0)
    clock.now += 2.0
    assert taken(limit, "a", 2) == 1


def test_in_the_long_run_the_rate_holds() -> None:
    """However requests are spread, no window passes more than the burst and the rate allow."""
    clock, draw = Clock(), random.Random(7)
    limit = RateLimit(3.0, 5, clock)
    passed: list[float] = []
    for _ in range(3000):
        clock.now += draw.choice((0.0, 0.01, 0.2, 1.5))
        passed += [clock.now] * taken(limit, "a")
    for index, begin in enumerate(passed):
        for width in (1.0, 10.0):
            within = sum(1 for when in passed[index : index + 60] if when <= begin + width)
            assert within <= 5 + 3.0 * width + 1e-6


def test_zero_is_no_limit() -> None:
    """And nobody is remembered."""
    limit = RateLimit(0.0, 1)
    assert taken(limit, "a", 1000) == 1000
    assert len(limit) == 0


def test_clients_are_bounded() -> None:
    """Whoever is full again makes room; while nobody is, newcomers share one bucket and cannot escape the
    limit by being many."""
    clock = Clock()
    limit = RateLimit(1.0, 2, clock, max_clients=10)
    assert sum(taken(limit, f"a{number}", 5) for number in range(10)) == 20
    assert sum(taken(limit, f"b{number}", 5) for number in range(1000)) == 2
    assert len(limit) == 11
    assert taken(limit, OTHERS) == 0
    clock.now += 2.0
    assert sum(taken(limit, f"c{number}", 5) for number in range(9)) == 18
    assert len(limit) <= 11


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:4711", "address 10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4711", "address 2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:1", "address 2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", "address 10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "address fe80::/64"),
        ("unix:", "address unix"),
        ("ipv4:nonsense", "address ipv4"),
        ("", "address "),
    ],
)
def test_an_address_is_a_host_or_a_network(peer: str, client: str) -> None:
    """Another port is the same client, and so is another address of the same IPv6 network."""
    assert client_of(b"", peer) == client


def test_a_token_is_one_client_wherever_it_calls_from() -> None:
    """And two tokens from one address are two."""
    assert client_of(b"\x01", "ipv4:10.0.0.7:1") == client_of(b"\x01", "ipv4:10.0.0.8:1")
    assert client_of(b"\x01", "ipv4:10.0.0.7:1") != client_of(b"\x02", "ipv4:10.0.0.7:1")


async def test_callers_are_told_when_to_come_again() -> None:
    """RESOURCE_EXHAUSTED with RetryInfo and a reason of its own; an unchecked token is no identity."""
    async with Rig(FakeVerify(), client_rate=0.001, client_burst=2) as rig:
        await rig.generate(max_tokens=1)
        await rig.generate(max_tokens=1)
        with pytest.raises(Overloaded) as caught:
            await rig.generate(max_tokens=1)
        assert isinstance(caught.value, RateLimited)
        assert 900 < (caught.value.retry_after or 0) <= 1000
        call = rig.stub.Generate(request(max_tokens=1), metadata=(("authorization", "Bearer x"),))
        with pytest.raises(Exception, match="more than"):
            await call.read()
        assert rig.metric("requests_rejected_total", reason="RATE_LIMITED") == 2
        assert rig.orchestrator.running() == 0


async def test_tokens_that_were_checked_are_told_apart(tmp_path: Path) -> None:
    """Where tokens are demanded, callers from one address do not share a bucket."""
    (tmp_path / "tokens").write_text("a\nb")
    settings = {"client_rate": 0.001, "client_burst": 1, "auth_tokens_file": str(tmp_path / "tokens")}
    async with Rig(FakeVerify(), **settings) as rig:
        for token, passes in (("a", True), ("a", False), ("b", True), ("b", False)):
            metadata = (("authorization", f"Bearer {token}"),)
            call = rig.stub.Generate(request(max_tokens=1), metadata=metadata)
            if passes:
                assert [response async for response in call]
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                    await call.read()
