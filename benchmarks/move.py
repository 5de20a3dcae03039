"""Measures how long a session waits for its next token at another verify replica: moved, and computed again.

    python -m benchmarks.move

moved        its keys and values go from one replica to the other, through this process as through an
             orchestrator; then the session is opened there
recomputed   the session is opened there with its tokens alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import torch

from benchmarks import machine, pairs
from benchmarks.flags import command, json_file
from benchmarks.pairs import load_pair
from benchmarks.samples import Spread
from orchestrator.replicas.kv_relay import relay
from outrider.engine.cpu.backend import preferred
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.messages import KvHandle, OpenVerify, SamplingParams, VerifyPolicy
from outrider.protocol.wire import kv_handle_from_pb, open_verify_to_pb
from outrider.rpc.channels import open_channel
from scripts.child import ROOT, Child
from scripts.console import new_parser, progress, run
from scripts.local_services import START_SECONDS, serve

TRANSFER_SECONDS = 120.0
VOCABULARY = 256
"""Prompts are of the first tokens of the vocabulary; which they are does not matter here."""


def main() -> int:
    """Measure, print and write."""
    flags = parse()
    pair = load_pair(flags)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    progress("starting two verify replicas")
    with ExitStack() as stack:
        children = [_replica(flags, pair, name, stack) for name in ("owner", "receiver")]
        endpoints = [str(child.receive(START_SECONDS)["endpoint"]) for child in children]
        rows = asyncio.run(measure(endpoints, flags))
    about = machine.describe() | {"command": command("move"), "target": pair.name, "dtype": pair.dtype}
    print(machine.lines(about))
    print("\n".join(lines(rows)))
    flags.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 256, 512, 1000], help="tokens of contexts"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each replica")
    parser.add_argument("--cpus", nargs=2, default=["", ""], help="CPU list of each replica, such as 0 1")
    parser.add_argument("--out", type=json_file, default=ROOT / "out/move.json")
    return parser.parse_args()


def _replica(flags: argparse.Namespace, pair: pairs.Pair, name: str, stack: ExitStack) -> Child:
    cpus = flags.cpus[name == "receiver"]
    settings = {
        "model": pair.target,
        "dtype": pair.dtype,
        "device": "cpu",
        # By `auto` each would measure, and might choose other kernels than its peer.
        "cpu-backend": preferred(getattr(torch, pair.dtype)),
        "kv-tokens": 4 * max(flags.lengths) + 1024,
        "threads": flags.threads,
    } | ({"cpus": cpus} if cpus else {})
    words = [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    return serve(stack, flags.out.parent, "verify", f"move-{name}", *words, "--no-prefix-cache")


async def measure(endpoints: Sequence[str], flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways in turn, for every length and round."""
    owner, receiver = (open_channel(endpoint) for endpoint in endpoints)
    rows: list[dict[str, Any]] = []
    async with owner, receiver:
        await both_ways(owner, receiver, min(flags.lengths), 0)  # the first of all is slow
        for length in flags.lengths:
            for number in range(flags.rounds):
                rows.append(await both_ways(owner, receiver, length, number))
            progress(f"{length} tokens: {rows[-1]['moved_ms']:.1f} ms moved")
    return rows


async def both_ways(
    owner: grpc.aio.Channel, receiver: grpc.aio.Channel, length: int, number: int
) -> dict[str, Any]:
    """One session on the owner goes on at the receiver, twice."""
    draw = random.Random(length * 1000 + number)
    prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
    tokens, handle, _ = await session(owner, prompt, keep=True)
    assert handle is not None, "the owner keeps what it computed"
    start = time.perf_counter()
    moved = await relay(owner, receiver, handle, tokens[: handle.length], TRANSFER_SECONDS)
    transferred = time.perf_counter()
    with_keys, _, opened = await session(receiver, tokens, moved)
    end = time.perf_counter()
    without, _, _ = await session(receiver, tokens)
    recomputed = time.perf_counter()
    assert with_keys == without, "the next token is the same"
    return {
        "length": length,
        "cached": opened,
        "transfer_ms": (transferred - start) * 1e3,
        "moved_ms": (end - start) * 1e3,
        "recomputed_ms": (recomputed - end) * 1e3,
    }


async def session(
    channel: grpc.aio.Channel, tokens: Sequence[int], handle: KvHandle | None = None, keep: bool = False
) -> tuple[list[int], KvHandle | None, int]:
    """Compute tokens and choose one more: all of them, what is kept, and how many needed no computing."""
    stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
    opening = OpenVerify(
        request_id="move",
        model="",
        token_ids=tuple(tokens),
        prompt_length=len(tokens),
        sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        kv_handle=handle,
        all_token_ids=handle is not None,
        policy=VerifyPolicy.OFF,
    )
    call = stub.Verify()
    await call.write(verify_pb2.VerifyRequest(open=open_verify_to_pb(opening)))
    opened = (await call.read()).opened
    verdict = (await call.read()).verdict
    await call.write(verify_pb2.VerifyRequest(close=verify_pb2.CloseVerify(keep=keep, move=keep)))
    closed = (await call.read()).closed
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    kept = kv_handle_from_pb(closed.kv_handle) if keep else None
    return [*tokens, *verdict.tokens], kept, opened.cached_length


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Medians and quartiles over the rounds."""
    yield f"\n{'tokens':>8}{'moved, ms':>26}{'of it the transfer':>26}{'recomputed, ms':>26}"
    for length in dict.fromkeys(row["length"] for row in rows):
        mine = [row for row in rows if row["length"] == length]
        spreads = (
            Spread.of([row[name] for row in mine]) for name in ("moved_ms", "transfer_ms", "recomputed_ms")
        )
        cells = (f"{one.middle:.1f} [{one.low:.1f}, {one.high:.1f}]" for one in spreads)
        yield f"{length:8}" + "".join(f"{cell:>26}" for cell in cells)


if __name__ == "__main__":
    run(main)
