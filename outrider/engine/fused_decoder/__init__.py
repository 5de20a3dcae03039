"""The description of decoders that run fused, the code that recognises them, and their forward on all
devices.

    decoder             the description: weights and settings, layer by layer
    recognise           makes it from a transformers model
    modules             finds a model's modules by their names
    known_norms         finds out what a norm computes; `turning`: how a layer rotates queries and keys
    mixture             the parts of a mixture of experts
    latent              latent attention (DeepSeek); `own_inputs`: inputs of each layer (Gemma 4)
    joining             one linear layer in place of several
    shares              how several processes share the modules
    forward             the loop over layers, with the operations of a device
    cpu_operations      the operations on CPUs, of which these are parts: `norm`, `rotation`, `activation`
    recorded_forward    repeats a forward on the CPU
"""

from outrider.engine.fused_decoder.decoder import FusedDecoder
from outrider.engine.fused_decoder.forward import FusedForward
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.recognise import fused_decoder

__all__ = ["FusedDecoder", "FusedForward", "NotFused", "fused_decoder"]
