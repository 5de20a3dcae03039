"""A forward of our own for the common decoder layer; see `outrider.engine.lean.forward`."""

from outrider.engine.lean.attention import LeanAttention
from outrider.engine.lean.decoder import LeanDecoder
from outrider.engine.lean.forward import LeanForward
from outrider.engine.lean.recognise import NotLean, lean_decoder

__all__ = ["LeanAttention", "LeanDecoder", "LeanForward", "NotLean", "lean_decoder"]
