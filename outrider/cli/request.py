"""Flags of a generation request, and the request that they describe."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outrider.cli import values
from outrider.cli.files import read_file
from outrider.cli.settings import flag_of
from outrider.protocol.errors import InvalidRequest
from outrider.sockets import is_endpoint

if TYPE_CHECKING:
    from outrider.client.aio import AsyncClient
    from outrider.client.conversation import Message
    from outrider.client.request import Request
    from outrider.client.retries import Retries
    from outrider.client.survival import Broken

Number = int | float

SAMPLING: tuple[tuple[str, type[Number], str], ...] = (
    ("max_tokens", int, "most tokens to generate (default: up to the context length)"),
    ("temperature", float, "0 is greedy (default: the model's, else 0)"),
    ("top_p", float, "keep the smallest set of tokens with this probability"),
    ("top_k", int, "keep this many of the most likely tokens"),
    ("min_p", float, "keep tokens with this share of the best one's probability"),
    ("repetition_penalty", float, "divides the logits of tokens seen before"),
    ("presence_penalty", float, "subtracted from the logits of tokens generated before"),
    ("frequency_penalty", float, "subtracted for every time a token was generated"),
    ("seed", int, "seed of the sampling noise: the same request with it gives the same tokens"),
    ("min_tokens", int, "no stop token before this many tokens"),
)


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what to generate."""
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("prompt", nargs="?", help="text; - or no text reads standard input")
    prompt.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--token-ids", metavar="IDS", help="token ids, such as 1,15,27, instead of text")
    prompt.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    prompt.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sampling = parser.add_argument_group("sampling")
    for name, kind, text in SAMPLING:
        metavar = "N" if kind is int else "X"
        sampling.add_argument(flag_of(name), type=kind, metavar=metavar, help=text)
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable"
    )
    sampling.add_argument("--stop-token-ids", metavar="IDS", default="", help="stop at one of these tokens")
    sampling.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=X", help="add X to a logit; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    add_constraint_flags(parser)
    speculation = parser.add_argument_group("speculation (never changes the tokens)")
    speculation.add_argument(
        "--mode",
        choices=("auto", "sequential", "off"),
        default="auto",
        help="auto: drafts as far as they pay; sequential: draft and target in turns; off: the target alone",
    )
    speculation.add_argument("--max-nodes", type=int, metavar="N", help="most nodes of the candidate tree")
    speculation.add_argument("--max-depth", type=int, metavar="N", help="deepest candidate")
    speculation.add_argument(
        "--seconds-per-token", type=float, metavar="S", help="the pace that is needed under load"
    )
    speculation.add_argument("--prediction", metavar="FILE", help="a text that the answer will resemble")
    request = parser.add_argument_group("request")
    request.add_argument("--model", default="", metavar="NAME", help="model name; empty: the one served")
    request.add_argument("--task", default="", metavar="LABEL", help="traffic label for statistics")
    request.add_argument("--priority", type=int, default=0, metavar="N", help="higher is served first")


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that constrain the text."""
    group = parser.add_argument_group("constraint (one at most)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="JSON that the schema in a file admits")
    group.add_argument("--json-object", action="store_true", help="some JSON object")
    group.add_argument("--regex", metavar="REGEX", help="a match of a regular expression")
    group.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="one of these texts; repeatable"
    )
    group.add_argument("--grammar", metavar="FILE", help="what the grammar in a file derives: Lark or GBNF")


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the connection."""
    group = parser.add_argument_group("connection")
    add_endpoint_flag(group)
    group.add_argument(
        "--token",
        metavar="TOKEN",
        default=os.environ.get("OUTRIDER_TOKEN", ""),
        help="bearer token (better: environment OUTRIDER_TOKEN)",
    )
    add_transport_flags(group)


def add_endpoint_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag of the orchestrator's address."""
    group.add_argument(
        "--endpoint",
        type=endpoint_of,
        metavar="HOST:PORT",
        default=os.environ.get("OUTRIDER_ENDPOINT", "127.0.0.1:7700"),
        help="the orchestrator (environment OUTRIDER_ENDPOINT; default 127.0.0.1:7700)",
    )


def add_transport_flags(group: argparse._ArgumentGroup, seconds: float = 600.0) -> None:
    """Add the flags of the timeout and of TLS."""
    group.add_argument(
        "--timeout", type=values.seconds, default=seconds, metavar="SECONDS", help=f"default {seconds:g}"
    )
    group.add_argument(
        "--tls-ca", default="", metavar="FILE", help="PEM authorities, or system; turns TLS on"
    )
    group.add_argument("--tls-cert", default="", metavar="FILE", help="PEM client certificate")
    group.add_argument("--tls-key", default="", metavar="FILE", help="PEM private key of --tls-cert")


def client_of(
    arguments: argparse.Namespace,
    token: str,
    retries: Retries,
    on_broken: Callable[[Broken], None] | None = None,
) -> AsyncClient:
    """A client of the orchestrator that the flags name."""
    from outrider.client.aio import AsyncClient

    return AsyncClient(
        arguments.endpoint,
        token=token,
        timeout=arguments.timeout,
        retries=retries,
        on_broken=on_broken,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )


def request_of(arguments: argparse.Namespace, record_timeline: bool) -> Request:
    """The request that the flags describe.

    Raises:
        InvalidRequest: a flag does not parse, or there is no prompt.
    """
    from outrider.client.request import Request

    flags = vars(arguments)
    given: Any = {field.name: flags[field.name] for field in fields(Request) if field.name in flags}
    given |= {
        "prompt": _prompt(arguments),
        "stop_token_ids": _ids("--stop-token-ids", arguments.stop_token_ids),
        "logit_bias": dict(_bias(item) for item in arguments.logit_bias),
        "ignore_eos": arguments.ignore_eos or None,
        "json_schema": _content("--json-schema", arguments.json_schema),
        "json_object": arguments.json_object or None,
        "grammar": _content("--grammar", arguments.grammar),
        "prediction": _content("--prediction", arguments.prediction) or "",
        "record_timeline": record_timeline,
    }
    return Request(**given)


def _prompt(arguments: argparse.Namespace) -> str | tuple[int, ...] | tuple[Message, ...]:
    _check_prompt(arguments)
    if arguments.token_ids is not None:
        return tuple(_ids("--token-ids", arguments.token_ids))
    text = _text(arguments)
    if not arguments.chat:
        return text
    from outrider.client.conversation import Message

    system = [Message("system", arguments.system)] if arguments.system else []
    return (*system, Message("user", text))


def _check_prompt(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect next to others."""
    prompts = {"--token-ids": arguments.token_ids, "--file": arguments.file, "prompt": arguments.prompt}
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"does not go with {given[0]}; leave one of them out")
    if arguments.chat and arguments.token_ids is not None:
        raise InvalidRequest("--chat", "does not go with --token-ids; leave one of them out")
    if arguments.system and not arguments.chat:
        raise InvalidRequest("--system", "needs --chat")


def _text(arguments: argparse.Namespace) -> str:
    if (content := _content("--file", arguments.file)) is not None:
        return content
    if arguments.prompt not in (None, "-"):
        return str(arguments.prompt)
    if arguments.prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "give a text, --file, --token-ids, or pipe it in")
    text = _piped()
    if not text:
        raise InvalidRequest("prompt", "standard input is empty; give a text, --file or --token-ids")
    return text


def _piped() -> str:
    """Standard input, in UTF-8 as files are, whatever the terminal's encoding is."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "standard input is no text in UTF-8; pipe in another") from None


def _content(flag: str, path: str | None) -> str | None:
    """The text of a file, if one is named."""
    return None if path is None else read_file(flag, path)


def _ids(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(flag, f"must be numbers such as 1,15,27, not {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidRequest("--logit-bias", f"must be ID=X such as 42=-1.5, not {text!r}") from None


def endpoint_of(text: str) -> str:
    """An address that gRPC can resolve: `host:port`, or with a scheme such as
    `ipv4:host:port,host:port`."""
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT of the gRPC service, not {text!r}; bench has --openai for HTTP"
        )
    if not (text.isprintable() and is_endpoint(text)):  # half characters are not printable
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {text!r}")
    return text
