"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Unpack

import grpc

from outrider.client import wire
from outrider.client.connection import Connection, RunningRequest
from outrider.client.conversation import Conversation
from outrider.client.event_wire import event_from_pb
from outrider.client.request import CallOptions, Prompt, Request, TokenizeOptions
from outrider.client.results import Collected, Event, Load, Model, ModelInfo, Result, Tokens
from outrider.rpc.channels import open_channel


class AsyncClient(Connection):
    """Calls an orchestrator from an event loop. Opens its connection at the first call; `close` ends it.

    Every method raises `OutriderError`: the service's own error, `Unavailable` when the service cannot be
    reached, `DeadlineExceeded` after the timeout, and `ConfigError` for a TLS file that cannot be used.
    """

    _channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._cancel()  # gRPC itself finds only calls that a task awaits directly
        if self._channel is not None:
            await self._channel.close()

    async def generate(self, prompt: Prompt | Request, **options: Unpack[CallOptions]) -> Result:
        """Continue a prompt to the end."""
        collected = Collected()
        async with aclosing(self.stream(prompt, **options)) as events:
            async for event in events:
                collected.add(event)
        return collected.result()

    async def stream(
        self, prompt: Prompt | Request, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request: per continuation one `Started`, its `Chunk`s, one `Complete`.

        When the connection or the orchestrator is lost, the events continue with the same tokens. Closing
        the generator cancels the request.
        """
        run = self._run(prompt, options)
        while (message := run.next_call()) is not None:
            pause = 0.0
            try:
                async with aclosing(self._responses(run, message)) as responses:
                    async for response in responses:
                        event = event_from_pb(response)
                        if event is not None and (event := run.survivor.take(event)) is not None:
                            yield event
                if (problem := run.survivor.stopped()) is not None:
                    pause = self._broke(run, problem)
            except grpc.RpcError as error:
                pause = self._broke(run, wire.explained(error, self.endpoint))
            await asyncio.sleep(pause)

    async def tokenize(
        self,
        prompt: str | Conversation,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - gRPC keeps it
        token: str | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokens:
        """The token ids of a text or a conversation: by default those that `generate` continues."""
        message = wire.tokenize_to_pb(prompt, options)
        return wire.tokens_from_pb(await self._ask("Tokenize", message, timeout, token))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - gRPC keeps it
        token: str | None = None,
    ) -> str:
        """The text of token ids, without special tokens unless they are to be kept."""
        message = wire.detokenize_to_pb(token_ids, model, keep_special_tokens)
        return str((await self._ask("Detokenize", message, timeout, token)).text)

    async def models(self, *, timeout: float = 10.0, token: str | None = None) -> tuple[Model, ...]:  # noqa: ASYNC109
        """The models that a request may name."""
        return wire.models_from_pb(await self._ask("ListModels", None, timeout, token))

    async def model_info(self, *, timeout: float = 10.0, token: str | None = None) -> ModelInfo:  # noqa: ASYNC109
        """The model and service that answer."""
        return wire.info_from_pb(await self._ask("GetModelInfo", None, timeout, token))

    async def load(self, *, timeout: float = 10.0, token: str | None = None) -> Load:  # noqa: ASYNC109
        """How busy the orchestrator and its replicas are."""
        return wire.load_from_pb(await self._ask("GetLoad", None, timeout, token))

    async def _ask(self, method: str, message: Any, timeout: float | None, token: str | None) -> Any:  # noqa: ASYNC109
        """Call a method that has one answer, without retries; None as `message` sends an empty one."""
        seconds, metadata = self._called(timeout, token)
        call = getattr(wire.stub(self._connected()), method)
        try:
            request = message or wire.empty_request(method)
            with self._running(call(request, timeout=seconds, metadata=metadata)) as begun:
                return await begun
        except grpc.RpcError as error:
            raise wire.explained(error, self.endpoint) from error

    async def _responses(self, run: RunningRequest, message: Any) -> AsyncGenerator[Any, None]:
        async with self._channel_for(run) as channel:
            self._check_open()
            call = wire.stub(channel).Generate(message, timeout=run.left, metadata=run.metadata)
            with self._running(call):
                async for response in call:
                    yield response

    @contextmanager
    def _running(self, call: Any) -> Generator[Any, None, None]:
        """A call that `close` cancels, which is no cancellation of the task that awaits it."""
        self._calls.add(call)
        try:
            yield call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.CANCELLED, nothing, nothing, "the client was closed"
            ) from None
        finally:
            self._calls.discard(call)
            call.cancel()

    @asynccontextmanager
    async def _channel_for(self, run: RunningRequest) -> AsyncGenerator[grpc.aio.Channel, None]:
        """The open connection for the first attempt; each later one gets its own, which may reach another
        address."""
        if run.first:
            run.first = False
            yield self._connected()
            return
        async with open_channel(self.endpoint, certificates=self._certificates) as channel:
            yield channel

    def _connected(self) -> grpc.aio.Channel:
        self._check_open()
        if self._channel is None:
            self._channel = open_channel(self.endpoint, certificates=self._certificates)
        return self._channel
