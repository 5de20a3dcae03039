"""Makes the target that the flags name, and waits until it is ready."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from outrider import __version__
from outrider.cli.bench.flags import token_of
from outrider.cli.bench.grpc_target import GrpcTarget
from outrider.cli.bench.target import BenchTarget, Sampling
from outrider.cli.request import client_of
from outrider.client.retries import NEVER
from outrider.protocol.errors import ConfigError, InvalidRequest


@asynccontextmanager
async def reached(arguments: argparse.Namespace) -> AsyncGenerator[BenchTarget, None]:
    """A context manager that yields the target that the flags name.

    Raises:
        OutriderError: the target cannot be reached, or a flag of the connection is wrong.
    """
    sampling = Sampling(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, ignore_eos=arguments.ignore_eos
    )
    reach = _openai if arguments.openai else _grpc
    async with reach(arguments, sampling) as target:
        yield target


@asynccontextmanager
async def _grpc(arguments: argparse.Namespace, sampling: Sampling) -> AsyncGenerator[BenchTarget, None]:
    async with client_of(arguments, token_of(arguments), NEVER) as client:
        yield await GrpcTarget.reach(client, sampling, arguments.mode or "auto", arguments.model)


@asynccontextmanager
async def _openai(arguments: argparse.Namespace, sampling: Sampling) -> AsyncGenerator[BenchTarget, None]:
    import httpx2

    from outrider.cli.bench.openai_target import OpenAiSettings, OpenAiTarget

    settings = OpenAiSettings(
        url=arguments.openai,
        chat=arguments.chat,
        seconds=arguments.timeout,
        sampling=sampling,
        extra=arguments.extra_body,
    )
    async with httpx2.AsyncClient(
        base_url=arguments.openai,
        headers=_headers(token_of(arguments)),
        verify=_tls(arguments),
        timeout=None,  # the target has its own, for a whole request
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as http:
        yield await OpenAiTarget.reach(http, settings, arguments.model)


def _headers(token: str) -> dict[str, str]:
    headers = {"accept-encoding": "identity", "user-agent": f"outrider-bench/{__version__}"}
    if not (token.isascii() and token.isprintable()):
        raise InvalidRequest("--token", "must be printable ASCII")
    return headers | ({"authorization": f"Bearer {token}"} if token else {})


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext:
    authorities = arguments.tls_ca if arguments.tls_ca not in ("", "system") else None
    try:
        context = ssl.create_default_context(cafile=authorities)
        if arguments.tls_cert:
            context.load_cert_chain(arguments.tls_cert, arguments.tls_key or None)
    except OSError as error:
        raise ConfigError(f"--tls-ca, --tls-cert or --tls-key: cannot be used ({error})") from error
    return context
