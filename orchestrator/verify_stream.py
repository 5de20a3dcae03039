"""What a session knows of its verify stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.allowance import Allowance
from outrider.protocol.messages import PromptFeatures


@dataclass(slots=True)
class VerifyStream:
    """The session's present verify stream; it may not be open yet."""

    stream: int
    opened: bool = False
    endpoint: str = ""
    room: Allowance = field(default_factory=Allowance.full)
    """How many blocks and nodes the replica still takes before its next verdict. It ends the stream of
    whoever sends more."""
    features_to: int = 0
    """Position of the last features that came."""

    def takes(self, part: PromptFeatures, length: int) -> bool:
        """Take in features of a text of `length` tokens; False when they do not follow the last ones."""
        if not self.opened or not self.features_to < part.position <= length:
            return False
        self.features_to = part.position
        return True
