"""What `make` installs is pinned with hashes, and in the smallest set that needs it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock

PROJECT = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())
FILES = sorted(lock.FOLDER.glob("*.txt"))
RESOLVED = """\
# a comment of pip-compile
engine-kit==2.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via outrider (pyproject.toml)
Shared_Kit==1.0 ; python_version < "4" \\
    --hash=sha256:cc
    # via
    #   engine-kit
    #   small-kit
small-kit==1.0 \\
    --hash=sha256:dd
    # via outrider (pyproject.toml)
torch==2.13.0 \\
    --hash=sha256:ee
    # via outrider (pyproject.toml)
only-torch==1.0 \\
    --hash=sha256:ff
    # via torch
nvidia-kit==1.0 \\
    --hash=sha256:00
    # via torch
triton==3.7 \\
    --hash=sha256:11
    # via
    #   outrider (pyproject.toml)
    #   torch
"""


def pins(name: str) -> dict[str, lock.Pin]:
    """The pins of a file and of those that it includes."""
    text = (lock.FOLDER / f"{name}.txt").read_text()
    found = lock.read(text)
    for other in re.findall(r"^-r (\w+)\.txt$", text, re.M):
        found |= pins(other)
    return found


def test_a_package_goes_with_the_first_that_needs_it() -> None:
    """One that two sets need is in the smaller one; torch is left out with its CUDA libraries, and what else
    it requires is not."""
    found = lock.split(lock.read(RESOLVED), {"small": ["small-kit"], "large": ["engine-kit", "torch"]})
    names = {name: [pin.name for pin in added] for name, added in found.items()}
    assert names == {"small": ["shared-kit", "small-kit"], "large": ["engine-kit", "only-torch"]}


def test_what_torch_brings_on_gpus_is_pinned_where_a_set_names_it() -> None:
    """Triton is for the tests; that torch requires it too does not put it among what serves."""
    wanted = {"engine": ["engine-kit", "torch"], "dev": ["small-kit", "triton"]}
    found = lock.split(lock.read(RESOLVED), wanted)
    assert [pin.name for pin in found["dev"]] == ["small-kit", "triton"]
    assert "triton" not in [pin.name for pin in found["engine"]]


def test_a_pin_keeps_its_marker_and_hashes() -> None:
    """Nothing of what pip reads is lost."""
    assert lock.read(RESOLVED)["shared-kit"].text.startswith(
        'Shared_Kit==1.0 ; python_version < "4" \\\n    --hash=sha256:cc\n'
    )


def test_a_pin_has_the_marker_that_the_project_gives_it() -> None:
    """Where a package has no files for a system, that system does not ask for it."""
    pins = lock.marked(lock.read(RESOLVED), {"dev": ["triton==3.7; sys_platform == 'linux'", "small-kit"]})
    assert pins["triton"].text.startswith('triton==3.7 ; sys_platform == "linux" \\\n    --hash=sha256:11\n')
    assert pins["small-kit"] == lock.read(RESOLVED)["small-kit"]


@pytest.mark.parametrize("name", lock.SETS)
def test_the_lock_has_what_the_project_names(name: str) -> None:
    """Every requirement of `pyproject.toml` is pinned to a version in its range, in the file of its set."""
    torch = Requirement((lock.FOLDER / "torch.txt").read_text().splitlines()[-1])
    versions = {one: re.search(r"==([^\s;]+)", pin.text)[1] for one, pin in pins(name).items()}
    versions["torch"] = str(torch.specifier).removeprefix("==")
    for text in lock.named(PROJECT)[name]:
        requirement = Requirement(text)
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_serve_every_machine(path: Path) -> None:
    """Every pin but torch's has hashes, and nothing says where to download from."""
    text = path.read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", text)
    assert all("--hash=sha256:" in pin.text for pin in lock.read(text).values()) or path.stem == "torch"


def test_the_demo_needs_no_test_tools() -> None:
    """What `make demo` installs is there to serve."""
    assert not pins("engine").keys() & {
        *("pytest", "mypy", "ruff", "matplotlib", "hypothesis", "scipy", "triton")
    }
