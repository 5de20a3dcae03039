"""Replaces a draft's weights while it serves, when its folder has new files or is a link that points
elsewhere now.

The new weights are loaded on a separate thread while the old ones serve, and replace them between two
forwards. Sessions keep their trees; their keys and values are computed again. Weights that cannot be used are
refused, and the old ones stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from draft_service.drafters.base import Drafter
from draft_service.engine import DraftEngine
from draft_service.files import Seen, files_of
from draft_service.servicer import DraftServicer
from outrider.process import in_thread
from outrider.protocol.errors import ConfigError, OutriderError
from outrider.protocol.messages import ModelInfo
from outrider.rpc.reloading import WATCH_SECONDS
from outrider.telemetry.instruments import DraftInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
FILES = "draft_weights"
"""Name of these files in metrics."""


class Watched:
    """Finds out when files are new and complete: two checks in a row must see the same files."""

    def __init__(self, seen: Seen) -> None:
        self._tried = self._last = seen

    def is_new(self, seen: Seen) -> bool:
        """True if the files that were seen should be loaded; the same files are tried only once."""
        settled = bool(seen) and seen == self._last and seen != self._tried
        self._last = seen
        if settled:
            self._tried = seen
        return settled


@dataclass(frozen=True, slots=True)
class WeightExchange:
    """Watches the weights of one replica. `load` makes a drafter with the weights in the folder, and
    blocks."""

    model: str
    drafter: Any
    """The drafter at work; it has a method `exchange`."""
    load: Callable[[], tuple[Drafter, ModelInfo]]
    loaded: Seen
    """The files as they were before the drafter at work was loaded."""
    engine: DraftEngine
    servicer: DraftServicer
    instruments: DraftInstruments

    async def run(self) -> None:
        """Watch the folder until cancelled."""
        watched = Watched(self.loaded)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if watched.is_new(await asyncio.to_thread(files_of, self.model)):
                await self.take_up()

    async def take_up(self) -> None:
        """Load the weights in the folder and exchange them, if they can be used."""
        old = self.servicer.info
        try:
            fresh, info = await in_thread(self.load)
            check_exchange(old, info)
        except Exception as error:  # whatever is wrong with the files, the replica continues
            known = isinstance(error, OutriderError)
            logger.error(
                "new weights cannot be used; keeping the old ones", error=str(error), exc_info=not known
            )
            self.instruments.files.refused(FILES)
            return
        if info.version == old.version:
            return
        self.engine.exchange(lambda: self.drafter.exchange(fresh))
        self.servicer.info = replace(
            self.servicer.info,
            model=info.model,
            version=info.version,
            context_length=info.context_length,
            dtype=info.dtype,
            arithmetic=info.arithmetic,
            arithmetic_reason=info.arithmetic_reason,
        )
        self.instruments.weights(info.version)
        logger.info("new weights taken up", version=info.version, before=old.version)


def check_exchange(old: ModelInfo, new: ModelInfo) -> None:
    """Check that sessions of the old weights can go on with the new ones.

    Raises:
        ConfigError: they cannot.
    """
    if new.kind != old.kind:
        raise ConfigError(
            f"model: the new weights are a draft of kind {new.kind}; start another replica with them"
        )
    if (new.vocabulary_hash, new.vocabulary_size) != (old.vocabulary_hash, old.vocabulary_size):
        raise ConfigError("model: the new weights have another vocabulary; start another replica with them")
    if new.context_length < old.context_length:
        raise ConfigError(
            f"model: the new weights have a context of {new.context_length} tokens, below "
            f"{old.context_length}; start another replica with them"
        )
