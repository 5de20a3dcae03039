"""Compiles the CPU's kernels for the processor at hand, and keeps the result for the next start.

Importing a module with kernels imports numba and compiles them, or loads them from the cache. So such a
module is imported only where its kernels are used. Importing this one does not load numba.

The cache holds machine code that numba unpickles, so it lies in a folder that belongs only to this user: in
`$XDG_CACHE_HOME/outrider`, or `~/.cache/outrider`. Where no such folder can be made, as on a read-only file
system, every start compiles. numba itself tells processors and its own versions apart. The folder's name has
a digest of the sources, because numba notices changes only in a kernel's own file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

__all__ = ["address_of", "available", "inlined", "kernel"]

Int32: TypeAlias = Any
Int64: TypeAlias = Any
UInt64: TypeAlias = Any
Float32: TypeAlias = Any
Float64: TypeAlias = Any
"""A number in a kernel, which the type checker does not distinguish from Python's."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PACKAGE = Path(__file__).parents[3]
_SOURCES = ("engine/cpu/kernels", "sampling", "sampling/kernels")
"""Folders of the package whose functions and constants end up in compiled code."""
_addresses: dict[Callable[..., None], int] = {}
"""Addresses of the kernels that are `for_kernels`."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_OPTIONS = {"fastmath": False, "error_model": "numpy"}
"""Each operation is rounded by itself, in the order written. A division by zero gives inf or NaN."""

log = logging.getLogger(__name__)
_numba_settings = threading.Lock()


@cache
def available() -> bool:
    """True when this installation has a numba that runs with its numpy. What a kernel needs of the processor
    is checked elsewhere.
    """
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        _numba()
    except ImportError as error:
        log.warning("no kernels for CPUs are compiled: %s", error)
        return False
    return True


def kernel(
    signature: str, *, keeps_lock: bool = False, for_kernels: bool = False
) -> Callable[[_Function], _Function]:
    """Compile a function at once for arguments of these types, for example "void(float32[:, ::1], int64)".

    Called with other types it raises TypeError. It gives up the interpreter's lock while it runs, so that
    other threads go on; `keeps_lock` is for calls so short that getting the lock back takes longer. One that
    is `for_kernels` has an `address_of`.

    Raises:
        TypeError: the function encloses more than numbers and names. numba tells other objects apart by
            process, so each start would compile the kernel and keep it once more.
    """

    def compiled(function: _Function) -> _Function:
        _check_enclosed(function)
        made = loaded(function)
        if for_kernels:
            _addresses[made] = _address_of(made)
        return made

    def loaded(function: _Function) -> _Function:
        options = {**_OPTIONS, "nogil": not keeps_lock, "no_cfunc_wrapper": not for_kernels}
        folder = _folder()
        if folder is not None:
            try:
                return _njit(function, signature, folder, options)
            except Exception as error:  # what numba raises for files that it cannot read or write
                log.warning("kernel %s is not cached in %s: %s", function.__name__, folder, error)
        return _njit(function, signature, None, options)

    return compiled


def _check_enclosed(function: _Function) -> None:
    enclosed = inspect.getclosurevars(function).nonlocals
    if others := [name for name, value in enclosed.items() if not isinstance(value, int | float | str)]:
        names = ", ".join(others)
        raise TypeError(f"kernel {function.__name__} encloses {names}; give it numbers and names only")


def address_of(compiled: Callable[..., None]) -> int:
    """The address by which other kernels call a kernel that is `for_kernels`, as C would. It is good as long
    as the kernel is kept."""
    return _addresses[compiled]


def _address_of(compiled: Callable[..., None]) -> int:
    """Look up an address by the kernel's name in machine code. Kernels that were compiled in different
    processes may share a name, which then means the kernel that was loaded last. So this is called before the
    next one is loaded.
    """
    (found,) = cast(Any, compiled).overloads.values()
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name))


def inlined(function: _Function) -> _Function:
    """A part of kernels, compiled into each that calls it, for the types that it is called with."""
    part: _Function = _numba().njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    return part


def cache_folder(environment: Mapping[str, str], digest: str) -> Path | None:
    """Create and return the folder for compiled kernels; return None where no safe folder can be made."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "outrider" / f"kernels-{digest}"
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        log.info("kernels are compiled at every start: no cache in %s: %s", folder, error.strerror)
        return None
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not os.access(folder, os.W_OK):
        log.warning(
            "kernels are compiled at every start: %s must belong to and be writable by you alone", folder
        )
        return None
    return folder


@cache
def _folder() -> Path | None:
    return cache_folder(os.environ, _digest())


def _njit(function: _Function, signature: str, folder: Path | None, options: Mapping[str, Any]) -> _Function:
    numba = _numba()
    if folder is None:
        uncached: _Function = numba.njit(signature, **options)(function)
        return uncached
    compiled: _Function = _kept(folder, function, signature, options)
    return compiled


def _kept(folder: Path, function: _Function, signature: str, options: Mapping[str, Any]) -> Any:
    """A function that is compiled, or loaded from the folder. Damaged files are replaced."""
    cached = _checked(_cached_in(folder, function, options))
    try:
        cached.compile(signature)
    except OSError:
        raise
    except Exception as error:  # whatever their bytes lead to
        log.warning("kernel %s is compiled again: its files in %s: %s", function.__name__, folder, error)
        cached._cache.flush()
        cached = _checked(_cached_in(folder, function, options))
        cached.compile(signature)
    cached.disable_compile()
    return cached


def _checked(cached: Any) -> Any:
    """Have numba end its files with a digest, and check it: damaged machine code would end the process.

    Files also get names of their own. numba counts those in an index that kernels from one function share,
    so two processes that compile at once would write different kernels to the same file.
    """
    cache_file = cached._cache._cache_file
    dump, numbered = cache_file._dump, cache_file._data_name

    def signed(value: object) -> bytes:
        data: bytes = dump(value)
        return data + hashlib.sha256(data).digest()

    def load(name: str) -> Any:
        data = Path(cache_file._data_path(name)).read_bytes()
        if data[-_DIGEST_BYTES:] != hashlib.sha256(data[:-_DIGEST_BYTES]).digest():
            raise ValueError("they are damaged")
        return pickle.loads(data)

    cache_file._dump, cache_file._load_data = signed, load
    cache_file._data_name = lambda number: f"{uuid.uuid4().hex}.{numbered(number)}"
    return cached


def _cached_in(folder: Path, function: _Function, options: Mapping[str, Any]) -> Any:
    """A function that numba will keep in this folder once it is compiled.

    numba reads the folder from settings of the process, so one thread at a time changes them. Compiling does
    not hold that lock: it may import modules, whose locks may be held by a thread that waits for this one.
    """
    numba = _numba()
    config = numba.config
    with _numba_settings:
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(folder), "UserProvidedCacheLocator"
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def _numba() -> Any:
    return importlib.import_module("numba")  # it has no types


@cache
def _digest() -> str:
    """Return the digest of all sources whose content is compiled into kernels."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        for path in sorted((_PACKAGE / name).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
