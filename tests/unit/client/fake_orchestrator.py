"""A fake orchestrator: answers with known tokens, breaks when told to, keeps what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.rpc_errors import DETAILS_KEY, code_of, details_of
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2

TEXT = {11: "one ", 12: "two ", 13: "three"}
SEED = 2**64 - 1


VERSION = "9d54aa30"
"""Which weights of the model it has."""


class FakeOrchestrator(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every request with the tokens of `texts` that it does not have yet; keeps what it was asked."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.texts = TEXT
        """The tokens of its answers and their texts."""
        self.prompt_end = ""
        """The end of its prompts."""
        self.answers = threading.Event()
        """Set: it answers."""
        self.answers.set()
        self.asked, self.over = threading.Event(), threading.Event()
        """A request has come; a call has ended, whoever ended it."""
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.error: OutriderError | None = None
        self.spells = True
        """Its model has a tokenizer."""
        self.begins = True
        """Sends `Started`; orchestrators of before do not."""
        self.breaks: list[tuple[int, grpc.StatusCode | OutriderError]] = []
        """The next streams end with these statuses or errors instead of bringing more than so many tokens."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        self._take(request, context)
        indices = range(request.sampling.n or 1)
        for index in indices[: len(indices) if self.begins else 0]:
            yield generation_pb2.GenerateResponse(started=_started(request, index, self.prompt_end))
        for entry in _prompt_logprobs(request):
            yield generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(prompt_logprobs=[entry]))
        room, status = self.breaks.pop(0) if self.breaks else (len(self.texts), None)
        for token in [token for token in self.texts if token not in request.resume_token_ids][:room]:
            for index in indices:
                chunk = generation_pb2.Chunk(index=index, text=self.texts[token], token_ids=[token])
                if request.record_steps:
                    chunk.origins.append(tokens_pb2.TOKEN_ORIGIN_DRAFT)
                    chunk.step.CopyFrom(_step(token))
                yield generation_pb2.GenerateResponse(chunk=chunk)
        if isinstance(status, OutriderError):
            fail(context, status)
        if status is not None:
            context.abort(status, "gone")
        for index in indices:
            yield generation_pb2.GenerateResponse(complete=_complete(request, index))

    def GetModelInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto."""
        self.metadata.append(dict(context.invocation_metadata()))
        defaults = tokens_pb2.SamplingParams(temperature=0.6, top_k=20)
        target = tokens_pb2.ModelInfo(
            model="demo", context_length=64, vocabulary_size=100, sampling_defaults=defaults
        )
        return generation_pb2.GetModelInfoResponse(target=target, text_prompts=True, verify_replicas=1)

    def GetLoad(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto."""
        self._take(request, context)
        return generation_pb2.GetLoadResponse(running=2, places=8, free_places=6, tokens_per_second=12.5)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto."""
        self._take(request, context)
        models = [generation_pb2.Model(name="demo", context_length=64, vocabulary_size=100)]
        return generation_pb2.ListModelsResponse(models=models)

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto: one token for each character, the number of the character."""
        self._take(request, context)
        text = request.text or "".join(message.content for message in request.chat.messages)
        ids = [ord(sign) for sign in text]
        return generation_pb2.TokenizeResponse(token_ids=ids, count=len(ids), context_length=64)

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto; the inverse."""
        self._take(request, context)
        if not self.spells:
            fail(context, InvalidRequest("token_ids", "the model came without a tokenizer"))
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def _take(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        context.add_callback(self.over.set)
        self.asked.set()
        self.metadata.append(dict(context.invocation_metadata()))
        self.answers.wait()
        if self.error is not None:
            fail(context, self.error)


def fail(context: grpc.ServicerContext, error: OutriderError) -> None:
    """End a call with an error."""
    context.set_trailing_metadata(((DETAILS_KEY, details_of(error)),))
    context.abort(code_of(error), str(error))


def _prompt_logprobs(request: Any) -> list[tokens_pb2.TokenLogprob]:
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    return [tokens_pb2.TokenLogprob(token=token, logprob=-float(token)) for token in range(3)]


def _started(request: Any, index: int, prompt_end: str) -> generation_pb2.Started:
    seed = request.sampling.seed if request.sampling.HasField("seed") else SEED
    return generation_pb2.Started(
        index=index,
        request_id="r",
        seed=(seed + index) % 2**64,
        model="demo",
        prompt_tokens=3,
        model_version=VERSION,
        prompt_end=prompt_end,
    )


def _bar() -> generation_pb2.TimelineEvent:
    return generation_pb2.TimelineEvent(
        lane=generation_pb2.TimelineEvent.LANE_VERIFY,
        start_unix_nano=10**18,
        duration_micros=500,
        name="forward",
        step=1,
        nodes=4,
        accepted=1,
    )


def _step(token: int) -> generation_pb2.StepDetail:
    """A draft's node that was chosen, and below it lookup's that was not."""
    drafted = generation_pb2.StepNode(
        token=token, spelling=TEXT[token].encode(), origin=tokens_pb2.TOKEN_ORIGIN_DRAFT, accepted=True
    )
    found = generation_pb2.StepNode(token=7, parent=0, origin=tokens_pb2.TOKEN_ORIGIN_LOOKUP)
    return generation_pb2.StepDetail(
        step=token - 10, nodes=[drafted, found], bonus=99, bonus_spelling=b"\xff", timeline=[_bar()]
    )


def _complete(request: Any, index: int) -> generation_pb2.Complete:
    return generation_pb2.Complete(
        index=index,
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
        usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=3),
        speculation=generation_pb2.SpeculationStats(
            steps=1,
            hits=1,
            acceptance_length=2.0,
            accepted_histogram=[0, 1],
            decode_micros=200,
            decode_busy_micros=190,
        ),
        seed=SEED,
        model="demo",
        timeline=[_bar()] if request.record_timeline else [],
    )


@contextmanager
def serving(
    fake: FakeOrchestrator, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[FakeOrchestrator, str]]:
    """The fake behind an endpoint; with credentials, over TLS."""
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    address = f"127.0.0.1:{port}"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield fake, f"127.0.0.1:{port}"
    finally:
        server.stop(None)
