"""Scripted verify and draft replicas on real gRPC servers, for tests of what talks to them.

The "target" is a function of all tokens so far and the seed, so every test knows the right continuation.
Replicas do as their public fields say at the time, and count what they see.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import grpc

from outrider.config import ServiceConfig
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.protocol import wire
from outrider.protocol.errors import InvalidRequest, OutriderError, StaleHandle
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart
from outrider.protocol.kv_wire import kv_part_from_pb, kv_part_to_pb
from outrider.protocol.messages import (
    MAX_STEP_NODES,
    FinishReason,
    KvHandle,
    ModelInfo,
    OpenDraft,
    Opened,
    OpenVerify,
    PromptFeatures,
    PromptLogprobs,
    StepTimes,
    TokenBlock,
    TokenLogprob,
    Verdict,
    VerifyPolicy,
)
from outrider.rpc.serving import GrpcServer
from outrider.speculation.candidate_tree import CandidateTree
from tests.hold import Hold
from verify_service.admission import Places
from verify_service.speculation.origins import step_nodes

VOCABULARY = 256
EOS = 255
INFO = ModelInfo(
    model="fake",
    vocabulary_hash="fake-vocabulary",
    vocabulary_size=VOCABULARY,
    context_length=512,
    eos_token_ids=(EOS,),
    max_sessions=64,
)

Context = grpc.aio.ServicerContext[Any, Any]


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """What the fake target says after `tokens`; never EOS, most often printable ASCII."""
    data = bytes(token % 256 for token in tokens[-8:]) + len(tokens).to_bytes(4, "little")
    digest = blake2b(data + seed.to_bytes(8, "little"), digest_size=2).digest()
    return 32 + int.from_bytes(digest, "little") % 95


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The first `count` tokens that the fake target generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class FakeReplica:
    """A server with one scripted service."""

    def __init__(self, service: str, info: ModelInfo) -> None:
        self.service = service
        self.info = info
        self.sessions = 0
        self.most_sessions = 0
        self.refuse: OutriderError | None = None
        """Raised at every open."""
        self.settings: dict[str, Any] = {}
        """More settings of its server, such as TLS files."""
        self.server: GrpcServer | None = None
        self.endpoint = ""

    async def start(self, port: int = 0) -> str:
        """Serve; returns the endpoint."""
        config = ServiceConfig(host="127.0.0.1", port=port, reflection=False, **self.settings)
        self.server = GrpcServer(config, [self.service], while_draining=["FetchKv"])
        self.register(self.server.server)
        await self.server.start()
        self.server.set_serving(True)
        self.endpoint = self.server.endpoint
        return self.endpoint

    async def kill(self) -> None:
        """Die at once: connections break."""
        if self.server is not None:
            await self.server.server.stop(0)
            self.server = None

    async def restart(self) -> None:
        """Come back at the same address as another incarnation."""
        self.info = replace(self.info, incarnation=f"{self.info.incarnation}+")
        await self.start(int(self.endpoint.rpartition(":")[2]))

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        raise AssertionError("a fake replica has a service")

    def enter(self) -> None:
        """A session was admitted."""
        if self.refuse is not None:
            raise self.refuse
        self.sessions += 1
        self.most_sessions = max(self.most_sessions, self.sessions)


@dataclass(slots=True)
class _VerifySession:
    opening: OpenVerify
    tree: CandidateTree
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    keep: bool = False
    move: bool = False


class FakeVerify(FakeReplica, verify_pb2_grpc.VerifyServiceServicer):
    """A verify replica; the target is `next_token`, walked over the candidates that have come."""

    def __init__(self, info: ModelInfo = INFO, patience: float = 0.02, **files: Any) -> None:
        super().__init__(
            "outrider.internal.v1.VerifyService",
            replace(info, replica="verify", incarnation=f"{id(self):x}"),
        )
        self.files = files
        """Fields of GetTokenizerResponse."""
        self.patience = patience
        """Longest wait for a ready block, in every policy but OFF."""
        self.openings: list[OpenVerify] = []
        self.blocks: list[TokenBlock] = []
        self.verdicts = 0
        self.verified = 0
        self.accepted = 0
        self.die_at_verdict: int | None = None
        """The stream breaks, once, instead of sending this verdict (counted over all sessions, from 0)."""
        self.end_at_verdict: int | None = None
        """The stream ends without a word there."""
        self.skew_at_verdict: int | None = None
        """A verdict with a wrong base length is sent there."""
        self.hold = Hold()
        """Of steps, by the verdicts of all sessions before them."""
        self.break_in_prompt: int | None = None
        """The stream breaks, once, before the log probability of this token of the prompt."""
        self.places = Places(info.max_sessions)
        self.handles: dict[str, list[int]] = {}
        self.moving = 0
        """Handles that are to be fetched at once."""
        self._handle_numbers = itertools.count()
        self.fetched = self.stored = 0
        self.before_pages: Callable[[], Awaitable[None]] | None = None
        """What happens in a FetchKv after the layout."""
        self.cached = 0
        self.ballast = 0
        """Alternatives in each log probability, to make messages large."""
        self.row = b"f"
        """Of features, for sessions that ask for them; empty: this replica tells none."""
        self.features_from = 1
        """Where those of the text begin."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: object, context: Context) -> Any:  # noqa: N802
        """See the proto."""
        info = replace(self.info, sessions=self.sessions + self.places.waiting)
        return verify_pb2.VerifyServiceGetModelInfoResponse(info=wire.model_info_to_pb(info))

    async def GetTokenizer(self, request: object, context: Context) -> Any:  # noqa: N802
        """See the proto."""
        return verify_pb2.GetTokenizerResponse(**self.files)

    async def drain(self) -> None:
        """Shut down as the real one does: when no session is left and no handle is to be fetched."""
        await self.server.drain(lambda: self.sessions + self.moving)

    async def FetchKv(self, request: Any, context: Context) -> None:  # noqa: N802
        """See the proto; the one page is the tokens."""
        tokens = self.handles.pop(request.kv_handle.id)
        try:
            await self._give(KvLayout("fake", "", "", 1, ""), context)
            if self.before_pages is not None:
                await self.before_pages()
            await self._give(KvPages(0, (bytes(tokens),), (b"digest",)), context)
            self.fetched += 1
        finally:
            self.moving -= 1

    async def _give(self, part: KvPart, context: Context) -> None:
        await context.write(verify_pb2.FetchKvResponse(part=kv_part_to_pb(part)))

    async def StoreKv(self, requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: N802
        """See the proto."""
        parts = [kv_part_from_pb(request.part) async for request in requests]
        if len(parts) < 3:  # the caller has gone
            raise InvalidRequest("part", "more must come")
        tokens, _, pages = parts
        if bytes(tokens.token_ids) != pages.contents[0]:
            raise InvalidRequest("part.pages", "are not those of the tokens")
        self.stored += 1
        return verify_pb2.StoreKvResponse(kv_handle=self._handle(list(tokens.token_ids)))

    async def Verify(self, requests: AsyncIterator[Any], context: Context) -> None:  # noqa: N802
        """See the proto."""
        first = await anext(aiter(requests), None)
        if first is None:  # the caller went before it said anything
            return
        opening = wire.open_verify_from_pb(first.open)
        await self.places.take(opening.priority)
        try:
            await self._serve(opening, requests, context)
        finally:
            self.places.free()

    async def _serve(self, opening: OpenVerify, requests: AsyncIterator[Any], context: Context) -> None:
        self.openings.append(opening)
        held = self._handle_tokens(opening)
        tokens = list(opening.token_ids) if opening.all_token_ids else [*held, *opening.token_ids]
        self.enter()
        session = _VerifySession(opening, CandidateTree(tokens, 1024))
        reader = asyncio.create_task(self._read(requests, session))
        try:
            opened = Opened("verify", self.info.incarnation, self.cached)
            await context.write(verify_pb2.VerifyResponse(opened=wire.opened_verify_to_pb(opened)))
            await self._tell_prompt(session, context)
            await self._tell_features(session, context)
            await self._steps(session, context)
            await session.closed.wait()
            await context.write(verify_pb2.VerifyResponse(closed=self._closed(session)))
        finally:
            self.sessions -= 1
            reader.cancel()

    def _handle_tokens(self, opening: OpenVerify) -> list[int]:
        if opening.kv_handle is None:
            return []
        if opening.kv_handle.id not in self.handles:
            raise StaleHandle("the lease has ended")
        return self.handles[opening.kv_handle.id]

    def _closed(self, session: _VerifySession) -> verify_pb2.VerifyClosed:
        if not session.keep:
            return verify_pb2.VerifyClosed()
        self.moving += session.move
        return verify_pb2.VerifyClosed(kv_handle=self._handle(session.tree.committed[:-1]))

    def _handle(self, tokens: list[int]) -> Any:
        id_ = f"kv-{next(self._handle_numbers)}"
        self.handles[id_] = tokens
        handle = KvHandle("verify", self.info.incarnation, id_, len(tokens), b"digest", 2**50)
        return wire.kv_handle_to_pb(handle)

    async def _tell_prompt(self, session: _VerifySession, context: Context) -> None:
        """The log probability of each token of the prompt is minus its position; one message for each."""
        opening = session.opening
        if opening.sampling.prompt_logprobs is None:
            return
        for position in range(opening.first_prompt_logprob, opening.prompt_length):
            if position == self.break_in_prompt:
                self.break_in_prompt = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
            told = TokenLogprob(session.tree.committed[position], -float(position))
            part = wire.prompt_logprobs_to_pb(PromptLogprobs(position, (told,)))
            await context.write(verify_pb2.VerifyResponse(prompt_logprobs=part))

    async def _tell_features(self, session: _VerifySession, context: Context) -> None:
        """The features of the text that the session was opened with."""
        if session.opening.feature_layers and self.row:
            count = session.tree.committed_length - self.features_from
            part = wire.prompt_features_to_pb(PromptFeatures(self.features_from, self.row * count))
            await context.write(verify_pb2.VerifyResponse(prompt_features=part))

    async def _read(self, requests: AsyncIterator[Any], session: _VerifySession) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "close":
                session.keep, session.move = message.close.keep, message.close.move
                break
            block = wire.block_from_pb(message.propose)
            self.blocks.append(block)
            session.tree.add(block)
            if block.ready:
                session.ready.set()
        session.closed.set()

    async def _steps(self, session: _VerifySession, context: Context) -> None:
        step, finish = session.opening.first_step, FinishReason.NONE
        while finish is FinishReason.NONE and not session.closed.is_set():
            if not await self.hold.passed(self.verdicts, session.closed):
                return
            if session.opening.policy is not VerifyPolicy.OFF and step > session.opening.first_step:
                await self._wait_ready(session)
            step += 1
            verdict = self._step(session, step)
            finish = verdict.finish_reason
            if self.verdicts == self.end_at_verdict:
                self.end_at_verdict = None
                session.closed.set()
                return
            if self.verdicts == self.die_at_verdict:
                self.die_at_verdict = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
            if self.verdicts == self.skew_at_verdict:
                self.skew_at_verdict = None
                verdict = replace(verdict, base_length=verdict.base_length + 1)
            self.verdicts += 1
            await context.write(verify_pb2.VerifyResponse(verdict=wire.verdict_to_pb(verdict)))

    async def _wait_ready(self, session: _VerifySession) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(session.ready.wait(), self.patience)
        session.ready.clear()

    def _step(self, session: _VerifySession, step: int) -> Verdict:
        """Walk the tree with the target's own tokens; one more is the bonus."""
        tree, params = session.tree, session.opening.sampling
        base, level, tokens, accepted = tree.committed_length, tree.children, list(tree.committed), 0
        generated = base - session.opening.prompt_length
        verified, finish = min(len(tree), MAX_STEP_NODES), FinishReason.NONE
        nodes = step_nodes(list(tree.nodes())) if session.opening.record_steps else None
        while True:
            token = next_token(tokens, params.seed)
            tokens.append(token)
            generated += 1
            if token in params.stop_token_ids and generated > params.min_tokens:
                finish = FinishReason.STOP
            elif params.max_tokens is not None and generated >= params.max_tokens:
                finish = FinishReason.LENGTH
            if finish is not FinishReason.NONE or token not in level:
                break
            level = level[token].children
            accepted += 1
        new = tokens[base:]
        tree.commit(new)
        self.verified += verified
        self.accepted += accepted
        top = ((0, -1.0),) * self.ballast
        wanted = new if params.logprobs is not None else []
        logprobs = tuple(TokenLogprob(token, -float(token), top) for token in wanted)
        times = StepTimes(
            forward_start_unix_nano=1_000_000_000 * step, queue_micros=10, forward_micros=100, sample_micros=5
        )
        verdict = Verdict(
            step, base, tuple(new), verified, accepted, accepted, accepted > 0, 0, 1, logprobs, times, finish
        )
        features = self.row * len(new) if session.opening.feature_layers else b""
        return replace(verdict, nodes=nodes, features=features)


@dataclass(slots=True)
class _Chain:
    """The draft's guess: committed tokens, then a chain of nodes up to `tip_id`."""

    tokens: list[int]
    committed: int
    tip_id: int | None
    next_id: int


class FakeDraft(FakeReplica, draft_pb2_grpc.DraftServiceServicer):
    """A draft replica; it knows the target and proposes right, wrong or malformed nodes as told."""

    def __init__(self, info: ModelInfo = INFO, depth: int = 4) -> None:
        super().__init__(
            "outrider.internal.v1.DraftService",
            replace(info, kind="model", replica="draft", incarnation=f"{id(self):x}"),
        )
        self.depth = depth
        self.behaviour = "right"
        """right, wrong, garbage (outside the vocabulary), columns (of unequal length), orphans (parents
        that are later nodes), repeated (node ids), picky (of what it is told), silent, or unopened."""
        self.openings: list[OpenDraft] = []
        self.verdicts: list[Verdict] = []
        self.features: list[PromptFeatures] = []
        self.blocks = 0
        self.expand_start_unix_nano = 5
        """When each block was begun, by the replica's clock."""
        self.die_at_block: int | None = None
        """The stream breaks, once, instead of sending this block (counted over all sessions, from 0)."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: object, context: Context) -> Any:  # noqa: N802
        """See the proto."""
        info = replace(self.info, sessions=self.sessions)
        return draft_pb2.DraftServiceGetModelInfoResponse(info=wire.model_info_to_pb(info))

    async def SetShadow(self, request: Any, context: Context) -> Any:  # noqa: N802
        """See the proto."""
        self.info = replace(self.info, shadow=request.shadow)
        return draft_pb2.SetShadowResponse(info=wire.model_info_to_pb(self.info))

    async def Draft(self, requests: AsyncIterator[Any], context: Context) -> None:  # noqa: N802
        """See the proto."""
        stream = aiter(requests)
        first = await anext(stream, None)
        if first is None:  # the caller went before it said anything
            return
        opening = wire.open_draft_from_pb(first.open)
        self.openings.append(opening)
        if opening.vocabulary_hash != INFO.vocabulary_hash:
            raise InvalidRequest("vocabulary_hash", "the test is wrong")
        self.enter()
        try:
            if self.behaviour == "unopened":
                await asyncio.Event().wait()
            opened = Opened("draft", self.info.incarnation, 0)
            await context.write(draft_pb2.DraftResponse(opened=wire.opened_draft_to_pb(opened)))
            await self._converse(stream, opening, context)
        finally:
            self.sessions -= 1

    async def _converse(self, stream: AsyncIterator[Any], opening: OpenDraft, context: Context) -> None:
        tokens = list(opening.token_ids)
        chain = _Chain(tokens, len(tokens), None, opening.first_node_id)
        await self._propose(chain, opening, context)
        async for message in stream:
            if message.WhichOneof("message") == "close":
                return
            if message.WhichOneof("message") == "prompt_features":
                self.features.append(wire.prompt_features_from_pb(message.prompt_features))
                continue
            verdict = wire.verdict_from_pb(message.verdict)
            self.verdicts.append(verdict)
            if self.behaviour == "picky":
                raise InvalidRequest("verdict.features", "is too short")
            self._commit(chain, verdict)
            await self._propose(chain, opening, context)

    def _commit(self, chain: _Chain, verdict: Verdict) -> None:
        assert verdict.base_length == chain.committed, "verdicts reach the draft without gaps"
        committed = [*chain.tokens[: chain.committed], *verdict.tokens]
        if chain.tokens[: len(committed)] != committed:
            chain.tokens, chain.tip_id = committed, None
        chain.committed = len(committed)

    async def _propose(self, chain: _Chain, opening: OpenDraft, context: Context) -> None:
        block = self._block(chain, opening.sampling.seed)
        if self.blocks == self.die_at_block:
            self.die_at_block = None
            await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
        self.blocks += 1
        if self.behaviour == "silent":
            return
        pb = wire.block_to_pb(block)
        if self.behaviour == "columns":
            del pb.parents[:]
        await context.write(draft_pb2.DraftResponse(block=pb))

    def _block(self, chain: _Chain, seed: int) -> TokenBlock:
        """The chain's next nodes, so that it reaches `depth` below the committed tokens."""
        first_id, parents, tokens = chain.next_id, [], []
        while len(chain.tokens) < chain.committed + self.depth:
            token = next_token(chain.tokens, seed) + (1 if self.behaviour == "wrong" else 0)
            parents.append(-len(chain.tokens) if chain.tip_id is None else chain.tip_id)
            tokens.append(token + VOCABULARY if self.behaviour == "garbage" else token)
            chain.tokens.append(token)
            chain.tip_id = chain.next_id
            chain.next_id += 1
        if self.behaviour == "orphans":
            parents = [parent + 1000 for parent in parents]
        if self.behaviour == "repeated":
            chain.next_id = first_id
        return TokenBlock(
            first_id,
            tuple(parents),
            tuple(tokens),
            (0.9,) * len(tokens),
            ready=True,
            base_length=chain.committed,
            expand_start_unix_nano=self.expand_start_unix_nano,
            expand_micros=7,
        )
