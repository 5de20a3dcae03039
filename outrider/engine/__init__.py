"""Runs any decoder-only transformers model over paged keys and values."""

import os

# Torch then asks for huge pages for tensors of 2 MB and more: reading weights takes fewer lookups of
# addresses. It reads this at its first tensor, so it has to be set before.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
