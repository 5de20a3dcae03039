"""Keys and values pass through the orchestrator unread, and every failure ends both calls."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.replicas import kv_relay
from orchestrator.replicas.kv_relay import relay
from outrider.config import ServiceConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import InternalError, OutOfPages, OutriderError, StaleHandle, Unavailable
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens
from outrider.protocol.kv_wire import kv_part_from_pb, kv_part_to_pb
from outrider.protocol.messages import KvHandle
from outrider.protocol.wire import kv_handle_from_pb, kv_handle_to_pb
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer

SERVICE = "outrider.internal.v1.VerifyService"
HANDLE = KvHandle("a", "life", "id", 3, b"digest", 5)
STORED = KvHandle("b", "other life", "other id", 3, b"digest", 6)
TOKENS = (7, 8, 9)
PARTS: tuple[KvPart, ...] = (
    KvLayout("w", "a", "d", 2, "s"),
    KvPages(0, (b"one",), (b"1",)),
    KvPages(1, (b"two" * 100_000,), (b"2",)),
)
Write = Callable[[KvPart], Awaitable[None]]


async def give_all(write: Write) -> None:
    """A sound owner."""
    for part in PARTS:
        await write(part)


class Replica(verify_pb2_grpc.VerifyServiceServicer):
    """Both ends, as told."""

    def __init__(self) -> None:
        self.give: Callable[[Write], Awaitable[None]] = give_all
        self.take: Callable[[], Awaitable[None]] | None = None
        """Called after each part."""
        self.asked: list[KvHandle] = []
        self.taken: list[KvPart] = []
        self.running = 0

    async def FetchKv(self, request: Any, context: Any) -> None:  # noqa: N802
        """See the proto."""
        self.asked.append(kv_handle_from_pb(request.kv_handle))

        async def write(part: KvPart) -> None:
            await context.write(verify_pb2.FetchKvResponse(part=kv_part_to_pb(part)))

        self.running += 1
        try:
            await self.give(write)
        finally:
            self.running -= 1

    async def StoreKv(self, requests: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """See the proto."""
        self.running += 1
        try:
            async for request in requests:
                self.taken.append(kv_part_from_pb(request.part))
                if self.take is not None:
                    await self.take()
        finally:
            self.running -= 1
        return verify_pb2.StoreKvResponse(kv_handle=kv_handle_to_pb(STORED))


@asynccontextmanager
async def between_two() -> AsyncIterator[tuple[Replica, Callable[[], Awaitable[KvHandle]]]]:
    """A replica that is owner and receiver, and what relays; nothing runs afterwards."""
    replica = Replica()
    server = GrpcServer(ServiceConfig(host="127.0.0.1", port=0), [SERVICE])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(replica, server.server)
    await server.start()
    server.set_serving(True)
    async with asyncio.timeout(30):
        async with open_channel(server.endpoint) as owner, open_channel(server.endpoint) as receiver:
            yield replica, lambda: relay(owner, receiver, HANDLE, TOKENS, 20.0)
            while replica.running:  # noqa: ASYNC110 - the server ends its calls by itself
                await asyncio.sleep(0.002)
        await server.stop()


async def test_all_parts_pass_in_order() -> None:
    """The tokens, then whatever the owner says, and back comes the receiver's handle."""
    async with between_two() as (replica, move):
        assert await move() == STORED
        assert replica.asked == [HANDLE]
        assert replica.taken == [KvTokens(TOKENS), *PARTS]


async def failing(
    expected: type[OutriderError],
    give: Callable[[Write], Awaitable[None]] = give_all,
    take: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """A move that must end so."""
    async with between_two() as (replica, move):
        replica.give, replica.take = give, take
        with pytest.raises(expected):
            await move()


async def raising(error: OutriderError) -> None:
    """Refuse."""
    raise error


async def test_an_owner_that_refuses() -> None:
    """Its reason is told."""
    await failing(StaleHandle, give=lambda _: raising(StaleHandle("gone")))


async def test_an_owner_that_fails_in_the_middle() -> None:
    """After some parts."""

    async def give(write: Write) -> None:
        await write(PARTS[0])
        raise InternalError("broken")

    await failing(InternalError, give=give)


async def test_a_receiver_that_refuses() -> None:
    """Before it has read all. Its reason is told, although a part may be on its way."""
    await failing(OutOfPages, take=lambda: raising(OutOfPages("full")))


async def test_a_receiver_that_refuses_an_endless_owner() -> None:
    """The owner's call ends with it. Its reason is told, although a part is on its way."""

    async def give(write: Write) -> None:
        while True:
            await write(PARTS[2])

    await failing(OutOfPages, give=give, take=lambda: raising(OutOfPages("full")))


async def test_a_receiver_that_refuses_while_the_owner_is_silent() -> None:
    """Nobody waits for the owner's next part."""

    async def give(write: Write) -> None:
        await asyncio.Event().wait()

    await failing(OutOfPages, give=give, take=lambda: raising(OutOfPages("full")))


async def test_silence_ends_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the owner, and of the receiver; neither need be dead."""
    monkeypatch.setattr(kv_relay, "QUIET_SECONDS", 0.1)

    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    await failing(Unavailable, give=silent)
    await failing(Unavailable, take=silent)


async def test_who_is_cancelled_leaves_no_call() -> None:
    """The session ended meanwhile."""
    async with between_two() as (replica, move):
        begun = asyncio.Event()

        async def give(write: Write) -> None:
            begun.set()
            await asyncio.Event().wait()

        replica.give = give
        moving = asyncio.ensure_future(move())
        await begun.wait()
        await cancelled(moving)


def test_a_failure_while_the_caller_is_cancelled_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it any more, and it is no fault of this process."""
    moves, reported = list[asyncio.Future[KvHandle]](), list[Any]()

    async def fail(*_: object) -> KvHandle:
        moves.pop().cancel()
        raise Unavailable("gone")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with open_channel("127.0.0.1:1") as owner, open_channel("127.0.0.1:1") as receiver:
            moves.append(asyncio.ensure_future(relay(owner, receiver, HANDLE, TOKENS, 20.0)))
            await asyncio.wait(moves)

    monkeypatch.setattr(kv_relay, "_copy", fail)
    asyncio.run(run())
    gc.collect()
    assert not moves
    assert not reported


async def test_who_is_cancelled_before_there_is_a_connection() -> None:
    """Another process has accepted it, and says nothing."""
    accepted = asyncio.Event()
    async with await asyncio.start_server(lambda *_: accepted.set(), "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_channel(endpoint) as owner, open_channel(endpoint) as receiver:
            moving = asyncio.ensure_future(relay(owner, receiver, HANDLE, TOKENS, 20.0))
            await accepted.wait()
            await cancelled(moving)


async def cancelled(moving: asyncio.Future[KvHandle]) -> None:
    """Cancel a move, and see it end. It is not awaited: a timeout of the test would look like its end."""
    moving.cancel()
    await asyncio.wait({moving}, timeout=10.0)
    assert moving.cancelled()


async def test_an_owner_that_cannot_be_reached() -> None:
    """A dead process refuses the connection."""
    async with open_channel("127.0.0.1:1") as owner, open_channel("127.0.0.1:1") as receiver:
        with pytest.raises(Unavailable):
            await relay(owner, receiver, HANDLE, TOKENS, 5.0)


def test_large_parts_need_no_parsing() -> None:
    """What the owner sends is, byte for byte, what the receiver reads: the two messages have one form."""
    part = kv_part_to_pb(PARTS[2])
    sent = verify_pb2.FetchKvResponse(part=part).SerializeToString()
    assert verify_pb2.StoreKvRequest.FromString(sent).part == part
