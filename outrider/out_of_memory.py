"""Tells errors for lack of memory, the machine's or a GPU's, from others. Imports no torch, whose errors of
this kind are RuntimeErrors."""

from __future__ import annotations

_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""What torch says of CUDA, of the CPU, and of CUDA's libraries."""


def lacks_memory(error: Exception) -> bool:
    """True if an operation failed because there was no memory for it."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
