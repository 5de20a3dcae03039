"""An orchestrator whose answers are given: for what is made of a model's text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2

MODEL = "target"


class ScriptedOrchestrator(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each request with the next text, a few signs at a time; keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.requests: list[generation_pb2.GenerateRequest] = []

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        self.requests.append(request)
        text, size = self.answers.pop(0), 3
        yield generation_pb2.GenerateResponse(
            started=generation_pb2.Started(request_id="r", seed=1, model=MODEL, prompt_tokens=3)
        )
        for number, at in enumerate(range(0, len(text), size)):
            chunk = generation_pb2.Chunk(text=text[at : at + size], token_ids=[number])
            yield generation_pb2.GenerateResponse(chunk=chunk)
        usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=-(-len(text) // size))
        reason = tokens_pb2.FINISH_REASON_STOP
        complete = generation_pb2.Complete(finish_reason=reason, usage=usage, model=MODEL, request_id="r")
        yield generation_pb2.GenerateResponse(complete=complete)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """See the proto."""
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(name=MODEL)])


def serve(scripted: ScriptedOrchestrator) -> tuple[grpc.Server, str]:
    """The server, and its endpoint."""
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"
