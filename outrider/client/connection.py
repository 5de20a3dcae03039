"""The part that both clients share: the address, the options, and requests that are running."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from outrider.client import wire
from outrider.client.request import CALL, CallOptions, Prompt, Request, request_of
from outrider.client.retries import Attempts, Retries
from outrider.client.survival import Broken, Survivor
from outrider.protocol.errors import DeadlineExceeded, InvalidRequest, OutriderError, Unavailable
from outrider.rpc.reloading import Reloaded
from outrider.rpc.tls import Certificates, client_certificates

ENDPOINT = "127.0.0.1:7700"
TIMEOUT_SECONDS = 600.0
LONGEST_SECONDS = 365 * 86400.0
"""Longest timeout, in seconds, to which others are cut: gRPC treats one of centuries as already over."""


class Connection:
    """The settings of a client.

    `endpoint` is `host:port`, or another name that gRPC resolves, such as `dns:name:7700` or
    `ipv4:10.0.0.1:7700,10.0.0.2:7700`, whose addresses take the calls in turn. `token` is a bearer token.
    `timeout` bounds a request in seconds, all its attempts together. `tls_ca` names a file with authorities,
    or `system`, and turns TLS on; `tls_cert` and `tls_key` are for mutual TLS; `certificates`, which
    several can share, replace these files. `on_broken` is called with every failure after which the client
    retries.
    """

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        *,
        token: str = "",
        timeout: float = TIMEOUT_SECONDS,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        certificates: Reloaded[Certificates] | None = None,
        retries: Retries | None = None,
        on_broken: Callable[[Broken], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._token = token
        self._timeout = checked_timeout(timeout)
        self._tls_files = (tls_ca, tls_cert, tls_key)
        if certificates is not None:
            self._certificates = certificates
        self._retries = retries or Retries()
        self._on_broken = on_broken or (lambda broken: None)
        self._calls: set[Any] = set()
        """The calls that `close` has to cancel."""
        self._closed = False

    @cached_property
    def _certificates(self) -> Reloaded[Certificates] | None:
        """Those of every connection: while renewed files cannot be used, the last ones stay in use."""
        return client_certificates(*self._tls_files, names="tls")

    def _cancel(self) -> None:
        """Let no call begin, and cancel those that run."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the client has been closed; open another one")

    def _broke(self, run: RunningRequest, error: OutriderError) -> float:
        """Seconds to wait before the next attempt at a request whose stream broke.

        Raises:
            OutriderError: there is none, because of `error` or because the client has been closed.
        """
        if run.survivor.next_request() is not None:
            self._check_open()
        return run.survivor.broke(error, run.left)

    def _run(self, prompt: Prompt | Request, options: CallOptions) -> RunningRequest:
        given: Any = dict(options)
        call = {name: given.pop(name) for name in CALL if name in given}
        survivor = Survivor(request_of(prompt, given), Attempts(self._retries), self._on_broken)
        seconds, metadata = self._called(**call)
        return RunningRequest(survivor, metadata, time.monotonic() + seconds)

    def _called(
        self,
        timeout: float | None = None,
        token: str | None = None,
        request_id: str = "",
        traceparent: str = "",
    ) -> tuple[float, tuple[tuple[str, str], ...]]:
        """Seconds and metadata of a call; None stands for the client's own."""
        seconds = self._timeout if timeout is None else checked_timeout(timeout)
        return seconds, wire.metadata_of(self._token if token is None else token, request_id, traceparent)


class RunningRequest:
    """A request that is in progress."""

    def __init__(self, survivor: Survivor, metadata: tuple[tuple[str, str], ...], deadline: float) -> None:
        self.survivor = survivor
        self.metadata = metadata
        self._deadline = deadline
        self.first = True
        """True before the first attempt, which uses the open connection; later ones open a new one."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def next_call(self) -> Any:
        """The next message to send, or None at the end.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        request = self.survivor.next_request()
        if request is None:
            return None
        if self.left <= 0:
            raise DeadlineExceeded("the time was over before the end of the text; raise the timeout")
        return wire.request_to_pb(request)


def checked_timeout(seconds: float) -> float:
    """The timeout if it is valid, cut to at most a year.

    Raises:
        InvalidRequest: the timeout is not above 0, or not finite.
    """
    if not 0.0 < seconds < math.inf:
        raise InvalidRequest("timeout", f"must be a number of seconds above 0, not {seconds}")
    return min(seconds, LONGEST_SECONDS)
