"""Recurrent layers, which keep a state of all earlier tokens where attention keeps keys and values.

Mamba, the gated delta rule and short convolutions are of this kind. A state cannot be cut back to an earlier
token. So each scratch entry of a sequence has the states after it, and a commit keeps those of its last
token. States are never written to: a layer gets copies.

    pieces              the order in which a step's tokens go through such a layer
    layers              the model's own modules compute them, from states in the cache of transformers
    replay              a CPU kernel computes candidates from a state and the inputs since
    delta_rule          the kernel's arguments for modules with the gated delta rule
    state_space         the kernel's arguments for modules with Mamba-2's state space
    short_convolution   plain torch computes candidates of LFM2
    probing             what is found out about a module by running it
"""
