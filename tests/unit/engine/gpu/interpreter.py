"""Triton's interpreter in less time: what it would find out again for every operation is kept.

What kernels compute stays the same, as `bfloat16.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def hasten() -> None:
    """Replace what makes types and shapes, and what looks them up. Such a process does nothing else."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    # Each sum and product of integers is computed a second time in 64 bits and compared, for an assertion
    # that `device_assert` drops unless the interpreter debugs.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    core.block_type.__init__ = _kept(core.block_type.__init__)
    core.tensor.__init__ = _with_kept_shapes(core.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _unless_alike(TritonSemantic.broadcast_impl_value)


def _by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Every operation asks for numpy's type, for which the interpreter makes a table each time."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    return found


def _once(patch: Callable[..., Any], scope: Callable[[], Any]) -> Callable[..., Any]:
    """Before every call of a function within a kernel the interpreter goes through all of Triton's language,
    to replace what it has replaced already. This leaves it replaced.
    """
    known: set[Any] = set()

    def patched(function: Any) -> Any:
        if function not in known:
            known.add(function)
            patch(function)
        return scope()

    return patched


def _kept(make: Callable[..., None]) -> Callable[..., None]:
    """A type of blocks is made by every operation, and checked; there are few that differ."""
    known: dict[Any, dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = vars(self)
        vars(self).update(known[key])

    return made


def _with_kept_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """A tensor wraps every size of its shape, and their product. Here tensors of equal shapes share them."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[sizes]

    return made


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one shape stay as they are, which takes a comparison of every size to find out."""

    def result(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    return result
