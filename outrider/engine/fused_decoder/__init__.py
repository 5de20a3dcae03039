"""The description of decoders that run fused, the code that recognises them, and their forward on all
devices."""

from outrider.engine.fused_decoder.decoder import FusedDecoder
from outrider.engine.fused_decoder.forward import FusedForward
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.recognise import fused_decoder

__all__ = ["FusedDecoder", "FusedForward", "NotFused", "fused_decoder"]
