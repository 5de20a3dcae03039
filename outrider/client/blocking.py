"""The client for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Unpack

import grpc

from outrider.client import wire
from outrider.client.connection import Connection, RunningRequest
from outrider.client.conversation import Conversation
from outrider.client.event_wire import event_from_pb
from outrider.client.request import CallOptions, Prompt, Request, TokenizeOptions
from outrider.client.results import Collected, Event, Load, Model, ModelInfo, Result, Tokens
from outrider.rpc.channels import open_blocking_channel


class Client(Connection):
    """Calls an orchestrator. Opens its connection at the first call; `close` ends it. Threads may share one.

    Every method raises `OutriderError`: the service's own error, `Unavailable` when the service cannot be
    reached, `DeadlineExceeded` after the timeout, and `ConfigError` for a TLS file that cannot be used.
    """

    _channel: grpc.Channel | None = None
    _opening = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        with self._opening:
            self._cancel()
        if self._channel is not None:
            self._channel.close()

    def generate(self, prompt: Prompt | Request, **options: Unpack[CallOptions]) -> Result:
        """Continue a prompt to the end."""
        collected = Collected()
        with closing(self.stream(prompt, **options)) as events:
            for event in events:
                collected.add(event)
        return collected.result()

    def stream(
        self, prompt: Prompt | Request, **options: Unpack[CallOptions]
    ) -> Generator[Event, None, None]:
        """Yield the events of a request: per continuation one `Started`, its `Chunk`s, one `Complete`.

        When the connection or the orchestrator is lost, the events continue with the same tokens. Closing
        the generator cancels the request.
        """
        run = self._run(prompt, options)
        while (message := run.next_call()) is not None:
            pause = 0.0
            try:
                with closing(self._responses(run, message)) as responses:
                    for response in responses:
                        event = event_from_pb(response)
                        if event is not None and (event := run.survivor.take(event)) is not None:
                            yield event
                if (problem := run.survivor.stopped()) is not None:
                    pause = self._broke(run, problem)
            except grpc.RpcError as error:
                pause = self._broke(run, wire.explained(error, self.endpoint))
            time.sleep(pause)

    def tokenize(
        self,
        prompt: str | Conversation,
        *,
        timeout: float | None = None,
        token: str | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokens:
        """The token ids of a text or a conversation: by default those that `generate` continues."""
        message = wire.tokenize_to_pb(prompt, options)
        return wire.tokens_from_pb(self._ask("Tokenize", message, timeout, token))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
        token: str | None = None,
    ) -> str:
        """The text of token ids, without special tokens unless they are to be kept."""
        message = wire.detokenize_to_pb(token_ids, model, keep_special_tokens)
        return str((self._ask("Detokenize", message, timeout, token)).text)

    def models(self, *, timeout: float = 10.0, token: str | None = None) -> tuple[Model, ...]:
        """The models that a request may name."""
        return wire.models_from_pb(self._ask("ListModels", None, timeout, token))

    def model_info(self, *, timeout: float = 10.0, token: str | None = None) -> ModelInfo:
        """The model and service that answer."""
        return wire.info_from_pb(self._ask("GetModelInfo", None, timeout, token))

    def load(self, *, timeout: float = 10.0, token: str | None = None) -> Load:
        """How busy the orchestrator and its replicas are."""
        return wire.load_from_pb(self._ask("GetLoad", None, timeout, token))

    def _ask(self, method: str, message: Any, timeout: float | None, token: str | None) -> Any:
        """Call a method that has one answer, without retries; None as `message` sends an empty one."""
        seconds, metadata = self._called(timeout, token)
        call = getattr(wire.stub(self._connected()), method)
        try:
            return call(message or wire.empty_request(method), timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            raise wire.explained(error, self.endpoint) from error

    def _responses(self, run: RunningRequest, message: Any) -> Generator[Any, None, None]:
        with self._channel_for(run) as channel:
            with self._opening:  # `close` comes either before the call or finds it
                self._check_open()
                call = wire.stub(channel).Generate(message, timeout=run.left, metadata=run.metadata)
                self._calls.add(call)
            try:
                yield from call
            finally:
                self._calls.discard(call)
                call.cancel()

    @contextmanager
    def _channel_for(self, run: RunningRequest) -> Generator[grpc.Channel, None, None]:
        """The open connection for the first attempt; each later one gets its own, which may reach another
        address."""
        if run.first:
            run.first = False
            yield self._connected()
            return
        with open_blocking_channel(self.endpoint, certificates=self._certificates) as channel:
            yield channel

    def _connected(self) -> grpc.Channel:
        with self._opening:
            self._check_open()
            if self._channel is None:
                self._channel = open_blocking_channel(self.endpoint, certificates=self._certificates)
            return self._channel
