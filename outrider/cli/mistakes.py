"""Explains a mistyped command line in a sentence that names the correction. Pure."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from outrider.protocol.errors import InvalidRequest, OutriderError

FLAGS = {
    "text": "prompt",
    "token_ids.ids": "--token-ids",
    "chat.messages": "prompt",
    "chat": "--chat",
    "token": "--token",
    "priority": "--priority",
    "task": "--task",
}
"""Names of a request's fields on the command line; those within GROUPS are flags of the same name."""
CLIENT_FILES = re.compile(r"\btls_(ca|cert|key)\b")
GROUPS = re.compile(r"^(sampling|speculation)\.")
LIKENESS = 0.75
"""Least similarity, as `difflib` measures it, at which a known flag is suggested; 1 is equal."""
REWORDED = (
    (r"argument (.+?): invalid int value: (.*)", r"\1: must be a whole number, not \2"),
    (r"argument (.+?): invalid float value: (.*)", r"\1: must be a number, not \2"),
    (r"argument (.+?): invalid choice: (.*) \(choose from (.*)\)", r"\1: \2 is none of \3"),
    (r"argument (.+?): not allowed with argument (.*)", r"\1: does not go with \2; leave one of them out"),
    (r"argument (.+?): ignored explicit argument (.*)", r"\1: takes no value; leave \2 out"),
    (r"argument (.+?): expected (?:at least )?one argument", r"\1: give it a value"),
    (r"one of the arguments (\S+) (\S+) is required", r"give \1 or \2"),
    (r"the following arguments are required: (.*)", r"give \1; --help explains it"),
    (r"argument (.*)", r"\1"),
)
"""Sentences of `argparse`, and those of this command for them; the first that fits."""


def unknown_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str], unknown: Sequence[str]
) -> str:
    """A sentence about the arguments that the command does not take, with the flag that may be meant."""
    command = _command(parser, arguments)
    first = unknown[0].partition("=")[0]
    if not first.startswith("-"):
        text = any(action.dest == "prompt" and not action.option_strings for action in command._actions)
        hint = "put a text of several words in quotes" if text else "leave it out, or put a flag before it"
        return f"{first!r} is more than {command.prog} takes; {hint}"
    known = _flags(command)
    if first in known:
        place = "before `--`" if "--" in arguments else f"after `{command.prog}`"
        return f"{first} is at the wrong place; put it {place}"
    near = difflib.get_close_matches(first, known, 1, LIKENESS)
    meant = f"did you mean {near[0]}?" if near else f"`{command.prog} --help` lists them"
    return f"{first} is no flag of {command.prog}; {meant}"


def in_plain_words(message: str) -> str:
    """A message of `argparse` in the words of the other mistakes."""
    for pattern, words in REWORDED:
        if found := re.fullmatch(pattern, message, re.DOTALL):
            return found.expand(words)
    return message


def in_flags(error: OutriderError, arguments: argparse.Namespace) -> str:
    """The text of an error, with flags in place of the fields or settings that it names."""
    said = str(error)
    if {"timeout", "tls_ca"} <= vars(arguments).keys():  # a client's flags; services have settings
        said = CLIENT_FILES.sub(r"--tls-\1", said)
    if not isinstance(error, InvalidRequest) or not error.field or not said.startswith(error.field):
        return said
    name = GROUPS.sub("", error.field)
    if name != error.field:
        flag = f"--{name.replace('_', '-')}"
    else:
        field, bracket, index = name.partition("[")
        flag = FLAGS.get(field, field) + bracket + index
    return flag + said.removeprefix(error.field)


def _command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the innermost command that the arguments name."""
    for word in arguments:
        below = _subcommands(parser)
        if word in below:
            parser = below[word]
    return parser


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]
