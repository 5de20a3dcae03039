"""Kernels are compiled once for their types and kept where nobody else can replace them."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.engine.cpu.kernels import compiling

SOURCE = """
from outrider.engine.cpu.kernels.compiling import inlined, kernel

@inlined
def twice(value):
    return value + value

@kernel("float64(float64[::1])")
def total(values):
    found = 0.0
    for value in values:
        found += twice(value)
    return found
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where caches go."""
    folder = compiling.cache_folder({"XDG_CACHE_HOME": str(tmp_path / "cache")}, "test")
    monkeypatch.setattr(compiling, "_folder", lambda: folder)
    return tmp_path / "cache"


@pytest.fixture
def kernels(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module with one kernel."""
    pytest.importorskip("numba")
    (tmp_path / "kernels_of_this_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("kernels_of_this_test")
    del sys.modules["kernels_of_this_test"]


def test_a_kernel_takes_the_types_of_its_signature_alone(kernels: ModuleType) -> None:
    """Another type is an error, never a second compilation in the middle of a request."""
    assert kernels.total(np.arange(4.0)) == 12.0
    with pytest.raises(TypeError, match="float32"):
        kernels.total(np.ones(4, np.float32))


SEVERAL = """
from outrider.engine.cpu.kernels.compiling import kernel

def made(number):
    @kernel("void(intp, intp, intp)", for_kernels=True)
    def write(address, part, member):
        if number < part:
            raise ValueError
    return write
"""


def test_kernels_of_one_name_have_addresses_of_their_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that differ in what they enclose, and were compiled in different processes, share a name."""
    bytecode = pytest.importorskip("numba.core.bytecode")
    (tmp_path / "several_kernels.py").write_text(SEVERAL)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("several_kernels").made
    found = []
    for number in range(3):
        # A process counts its functions, and the number is a part of their names.
        monkeypatch.setattr(bytecode.FunctionIdentity, "_unique_ids", itertools.count(1000))
        found.append((made(number), number))
    addresses = [compiling.address_of(kernel) for kernel, _ in found]
    names = {next(iter(kernel.overloads.values())).fndesc.llvm_cfunc_wrapper_name for kernel, _ in found}
    assert len(names) == 1
    assert len(set(addresses)) == 3
    assert addresses == [compiling.address_of(kernel) for kernel, _ in found]


def test_a_compiled_kernel_is_kept(kernels: ModuleType, home: Path) -> None:
    """The next start finds the machine code."""
    assert len(list(home.rglob("*.nbc"))) == 1


def test_a_kernel_that_no_other_process_would_find_is_refused(home: Path) -> None:
    """numba looks a kernel up by what it encloses: objects differ in the next process."""
    pytest.importorskip("numba")
    twice = compiling.inlined(lambda value: value + value)

    def total(value):
        return twice(value)

    with pytest.raises(TypeError, match="total encloses twice"):
        compiling.kernel("int64(int64)")(total)


@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: bytes(len(data)), lambda data: one_bit(data)])
@pytest.mark.parametrize("broken", ["nbi", "nbc"])
def test_a_damaged_cache_is_replaced(
    kernels: ModuleType,
    home: Path,
    broken: str,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a crash or a disk left of the files stops no start, and the start after that finds good ones."""
    for path in home.rglob(f"*.{broken}"):
        path.write_bytes(damage(path.read_bytes()))
    assert importlib.reload(kernels).total(np.arange(4.0)) == 12.0
    caplog.clear()
    kept = {path: path.stat().st_mtime_ns for path in home.rglob("*.nb?")}
    assert importlib.reload(kernels).total(np.arange(4.0)) == 12.0
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*.nb?")} == kept
    assert not caplog.records


def one_bit(data: bytes) -> bytes:
    """The data with another bit in its middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_without_a_cache_kernels_are_compiled(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute the same."""
    monkeypatch.setattr(compiling, "_folder", lambda: None)
    assert importlib.reload(kernels).total(np.arange(4.0)) == 12.0


def test_a_cache_that_cannot_be_written_stops_no_start(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that is gone, a disk that is full."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiling, "_folder", lambda: tmp_path / "file")
    assert importlib.reload(kernels).total(np.arange(4.0)) == 12.0
    assert not list(tmp_path.glob("__pycache__/*.nb?"))


@pytest.mark.parametrize("home", ["relative", "/proc/none", __file__])
def test_there_is_no_cache_where_no_folder_can_be(home: str) -> None:
    """A read-only file system, a home that is a file, a user without a home."""
    assert compiling.cache_folder({"XDG_CACHE_HOME": home}, "sources") is None


def test_a_folder_that_others_can_write_to_is_no_cache(tmp_path: Path) -> None:
    """Whoever can put a file there could run code here."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = compiling.cache_folder(environment, "sources")
    assert folder is not None
    folder.chmod(0o777)
    assert compiling.cache_folder(environment, "sources") is None


def test_other_sources_have_another_cache(tmp_path: Path) -> None:
    """A function that a kernel calls may lie in another file."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    folders = {compiling.cache_folder(environment, digest) for digest in ("old", "new")}
    assert len(folders) == 2


def test_threads_that_compile_at_once_keep_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends meanwhile takes no setting away; else a cache would go where the process stands."""
    config = SimpleNamespace(CACHE_DIR="", CACHE_LOCATOR_CLASSES="")
    second_inside, first_done, seen = threading.Event(), threading.Event(), {}

    def njit(**options: Any) -> Any:
        def decorate(function: str) -> str:
            if function == "first":
                second.start()
                second_inside.wait(0.1)
            else:
                second_inside.set()
                first_done.wait(10)
            seen[function] = config.CACHE_DIR
            return function

        return decorate

    monkeypatch.setattr(compiling, "_numba", lambda: SimpleNamespace(config=config, njit=njit))
    second = threading.Thread(target=compiling._cached_in, args=(Path("/kept"), "second", {}))
    compiling._cached_in(Path("/kept"), "first", {})
    first_done.set()
    second.join()
    assert (seen, config.CACHE_DIR) == ({"first": "/kept", "second": "/kept"}, "")


def test_a_numba_that_does_not_take_its_numpy_is_none(monkeypatch, caplog):
    """It says so when it is imported; services start without it, and the log has the reason."""

    def refuse() -> None:
        raise ImportError("Numba needs NumPy 2.4 or less")

    compiling.available.cache_clear()
    monkeypatch.setattr(compiling, "_numba", refuse)
    assert not compiling.available()
    assert "Numba needs NumPy 2.4 or less" in caplog.text
    compiling.available.cache_clear()


def test_processes_that_compile_at_once_keep_their_own_code(tmp_path: Path) -> None:
    """numba names files by their number in an index; two that read it at once get the same number."""

    def constant(number: int) -> Any:
        def read() -> int:
            return number

        return compiling._checked(compiling._cached_in(tmp_path, read, compiling._OPTIONS))

    first, second = constant(1), constant(2)
    file, other = first._cache._cache_file, second._cache._cache_file
    other._load_index = dict
    save = file._save_data

    def save_late(name: str, data: object) -> None:
        second.compile("int64()")
        save(name, data)

    file._save_data = save_late
    first.compile("int64()")
    found = constant(2)
    found.compile("int64()")
    assert found() == 2
