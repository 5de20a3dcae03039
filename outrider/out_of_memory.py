"""Tells errors for lack of memory, the machine's or a GPU's, from others. Imports no torch, whose errors of
this kind are RuntimeErrors."""

from __future__ import annotations

from outrider.protocol.errors import first_line

_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")
"""What torch says of CUDA, of the CPU, of CUDA's libraries, and of code in C++."""


def lacks_memory(error: Exception) -> bool:
    """True if an operation failed because there was no memory for it."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def problem_of(error: Exception) -> str:
    """What an error says in its first line, and what to do if there was no memory."""
    if not lacks_memory(error):
        return first_line(error)
    return (
        f"no memory is left ({first_line(error)}); lower kv_tokens, max_step_tokens or expansions, or end "
        "other processes"
    )
