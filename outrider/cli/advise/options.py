"""The drafts that are compared, named as `outrider up` names them, and the command that uses one. Pure."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from outrider.cli.up.plan import LOOKUP, NONE
from outrider.config import VerifyConfig
from outrider.engine.kv.capacity import DEFAULT_TOKENS
from outrider.protocol.errors import ConfigError

FULL = "full"


@dataclass(frozen=True, slots=True)
class DraftOption:
    """One draft, or none."""

    draft: str
    """A folder or hub id, lookup or none."""
    skip_layers: str = ""
    weights: str = FULL

    @property
    def is_model(self) -> bool:
        """Whether there is a model to load."""
        return self.draft not in (LOOKUP, NONE)

    @property
    def name(self) -> str:
        """The name of the option in tables."""
        without = f" without {self.skip_layers}" if self.skip_layers else ""
        return self.draft + without + (f", {self.weights}" if self.weights != FULL else "")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `outrider up` that choose this option."""
        skipped = ("--draft-skip-layers", self.skip_layers) if self.skip_layers else ()
        rounded = ("--draft-weights", self.weights) if self.weights != FULL else ()
        return ("--draft", self.draft, *skipped, *rounded)


WITHOUT = DraftOption(NONE)
"""The target without a draft, with which all drafts are compared."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the services must have room for: sessions at once, and tokens of each."""

    sessions: int
    tokens: int

    @property
    def settings(self) -> list[str]:
        """Environment variables, as NAME=VALUE, for limits that the services' defaults do not reach."""
        fields = VerifyConfig.model_fields
        kv_tokens = self.sessions * (self.tokens + fields["max_nodes"].default)
        defaults = {"max_sessions": fields["max_sessions"].default, "kv_tokens": DEFAULT_TOKENS}
        wanted = {"max_sessions": self.sessions, "kv_tokens": kv_tokens}
        return [
            f"OUTRIDER_{service}_{name.upper()}={value}"
            for name, value in wanted.items()
            if value > defaults[name]
            for service in ("VERIFY", "DRAFT")
        ]


def draft_options(arguments: argparse.Namespace) -> list[DraftOption]:
    """Each draft that the flags name; `none` is always compared and need not be named.

    Raises:
        ConfigError: layers are to be skipped and the target is not one of the drafts, or no draft is named.
    """
    if arguments.draft_skip_layers and arguments.target not in arguments.draft:
        raise ConfigError(
            "--draft-skip-layers: only the target can do without layers where it is its own draft; "
            f"add --draft {arguments.target}"
        )
    found = dict.fromkeys(option for draft in arguments.draft for option in _options(draft, arguments))
    if not found:
        raise ConfigError("--draft: name a draft besides none, such as lookup or a folder")
    return list(found)


def command(target: str, option: DraftOption, dtype: str, room: Room) -> str:
    """The command line that serves the target with this option."""
    arithmetic = ("--dtype", dtype) if dtype != "auto" else ()
    words = ["outrider", "up", "--target", target, *option.flags, *arithmetic, "--device", "cpu"]
    return " ".join([*room.settings, shlex.join(words)])


def _options(draft: str, arguments: argparse.Namespace) -> list[DraftOption]:
    if draft == NONE:
        return []
    if draft == LOOKUP:
        return [DraftOption(LOOKUP)]
    skips = arguments.draft_skip_layers if draft == arguments.target else ()
    return [DraftOption(draft, skipped, arguments.draft_weights) for skipped in skips or ("",)]
