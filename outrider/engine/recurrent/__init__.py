"""Recurrent layers: they keep a state of all earlier tokens where attention keeps keys and values.

Mamba, the gated delta rule and short convolutions are of this kind. A state cannot be cut back to an earlier
token, so each scratch entry of a sequence has the states behind it, and a commit keeps those of its last
token. States are never written to: a layer gets copies.

    pieces              the order in which a step's tokens go through such a layer
    layers              the model's own modules compute them, from states in the cache of transformers
    replay              a kernel of CPUs computes candidates from a state and the inputs since
    delta_rule          that of modules with the gated delta rule
    state_space         that of modules with Mamba-2's state space
    short_convolution   plain torch computes those of LFM2
    probing             what is found out about a module by running it
"""
