"""Runs any decoder-only transformers model over paged keys and values."""

import os

# torch then asks for huge pages for tensors of 2 MB and more, which the kernels read up to a quarter faster.
# It reads this at its first tensor, so it has to be set before.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
