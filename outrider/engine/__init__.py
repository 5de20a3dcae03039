"""Runs any decoder-only transformers model over paged keys and values.

loading          from a folder or hub id to a `loaded_model` that is checked
make_runner      chooses the runner of a loaded model
runner, step     one forward over many sequences: `step` plans it, `runner` carries it out
kv               which pages hold which keys and values
attention        attention over pages; `mixed_attention`: of layers that differ in their heads
fused_decoder    the description of decoders of known kinds, and their forward
cpu, gpu         the products and kernels of a device
linears          which layers `cpu`, `gpu` and `quantization` replace
quantization     weights of 4 or 8 bits
recurrent        layers that keep states in place of keys and values
parallel         one model in several processes
heads            drafts of one layer that read the target's `features`
threads          how many threads compute
"""

import os

# With this, torch asks for huge pages for tensors of 2 MB and more: reading weights takes fewer lookups of
# addresses. Torch reads the variable at its first tensor, so it has to be set before.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
