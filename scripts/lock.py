"""Writes `requirements/`: a version and the hashes of all its files for everything that pip installs.

    make lock                        keeps the versions that are there and fit pyproject.toml
    make lock LOCK=--upgrade         takes the newest; LOCK='--upgrade-package numpy' of one package

`pip-compile` resolves the project with all extras at once. Each package then goes into the file of the first
set that needs it, and each file includes those of the sets before it. torch stays outside: its pin is
`requirements/torch.txt`, and what comes with some builds of it for GPUs is left to it, unless a set names it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.child import ROOT

FOLDER = ROOT / "requirements"
LEFT_OUT = re.compile(r"pip$|torch$")
"""pip comes with the virtual environment."""
FOR_GPUS = re.compile(r"triton$|nvidia-|cuda-")
"""What builds of torch for GPUs bring."""


@dataclass(frozen=True, slots=True)
class Set:
    """One file of pins."""

    contents: str
    includes: tuple[str, ...] = ()


SETS = {
    "build": Set("What builds the wheel."),
    "orchestrator": Set("What the orchestrator needs."),
    "gateway": Set("What the HTTP gateway needs.", ("orchestrator",)),
    "engine": Set("What the other services and `make demo` need, with torch.txt.", ("build", "gateway")),
    "dev": Set("What `make test` needs.", ("engine",)),
}
"""By file, smallest first."""
HEADER = "# {contents} Written by `make lock`, with Python {python}.\n"
OPTIONS = (
    *("--quiet", "--generate-hashes", "--strip-extras", "--allow-unsafe", "--no-header"),
    *("--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"),
    *("--all-extras", "--constraint", "requirements/torch.txt"),
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One package as `pip-compile` writes it."""

    name: str
    text: str
    wanted_by: frozenset[str]
    """Packages that require it; the project itself among them."""


def read(text: str) -> dict[str, Pin]:
    """The pins of a requirements file, by canonical name."""
    blocks = re.findall(r"^\w\S*==.*(?:\n[ ]+.*)*", text, re.M)
    return {pin.name: pin for pin in map(_pin, blocks)}


def split(pins: Mapping[str, Pin], wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Pin]]:
    """The pins that each set adds to the sets before it.

    `wanted` has the packages that each set names itself. What only they require goes with them, but for what
    torch requires on GPUs.
    """
    placed = {name for name in pins if LEFT_OUT.match(name)}
    found: dict[str, list[Pin]] = {}
    for name, roots in wanted.items():
        needed = _with_requirements(pins, roots)
        added = {one for one in needed if one in roots or not FOR_GPUS.match(one)} - placed
        placed |= added
        found[name] = [pins[one] for one in sorted(added)]
    return found


def named(project: Mapping[str, Any]) -> dict[str, list[str]]:
    """The requirements that `pyproject.toml` names, by set."""
    extras = project["project"]["optional-dependencies"]
    return {
        "build": project["build-system"]["requires"],
        "orchestrator": project["project"]["dependencies"],
        "gateway": extras["gateway"],
        "engine": extras["engine"],
        "dev": extras["dev"],
    }


def marked(pins: Mapping[str, Pin], requirements: Mapping[str, Sequence[str]]) -> dict[str, Pin]:
    """The pins with the markers of the project's own requirements, which `pip-compile` loses in extras."""
    found = dict(pins)
    for each in map(Requirement, (text for one in requirements.values() for text in one)):
        name = canonicalize_name(each.name)
        if each.marker is not None and name in pins and ";" not in pins[name].text.splitlines()[0]:
            text = re.sub(r"^(\S+)", rf"\1 ; {each.marker}", pins[name].text)
            found[name] = replace(pins[name], text=text)
    return found


def _pin(block: str) -> Pin:
    head, _, via = block.partition("# via")
    requirers = (line.strip(" #").split(" ")[0] for line in via.splitlines())
    return Pin(
        canonicalize_name(head.split("==")[0]),
        block,
        frozenset(canonicalize_name(one) for one in requirers if one),
    )


def _with_requirements(pins: Mapping[str, Pin], roots: Iterable[str]) -> set[str]:
    found, new = set(), set(roots) & pins.keys()
    while new:
        found |= new
        new = {pin.name for pin in pins.values() if pin.wanted_by & new} - found
    return found


def _resolve(arguments: Sequence[str]) -> str:
    """What `pip-compile` finds; it keeps versions that stand in its output file already."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "all.txt"
        output.write_text("\n".join(pin.text for pin in _present()))
        command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, *arguments]
        subprocess.run([*command, "--output-file", str(output), "pyproject.toml"], cwd=ROOT, check=True)
        return output.read_text()


def _present() -> list[Pin]:
    files = (path.read_text() for path in FOLDER.glob("*.txt"))
    return [pin for text in files for pin in read(text).values()]


def main(arguments: Sequence[str]) -> None:
    """Resolve and write."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {
        name: [canonicalize_name(Requirement(one).name) for one in requirements]
        for name, requirements in named(project).items()
    }
    pins = marked(read(_resolve(arguments)), named(project))
    sets = split(pins, wanted)
    for name, pins in sets.items():
        header = HEADER.format(contents=SETS[name].contents, python="{}.{}".format(*sys.version_info))
        lines = [f"-r {other}.txt" for other in SETS[name].includes] + [pin.text for pin in pins]
        (FOLDER / f"{name}.txt").write_text(header + "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
