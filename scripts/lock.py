"""Writes `requirements/`: for each package that pip installs, a version and the hashes of its files.

    make lock                        keeps present versions that fit pyproject.toml
    make lock LOCK=--upgrade         takes the newest; LOCK='--upgrade-package numpy' only for one package

`pip-compile` resolves the project with all extras at once. Each package then goes into the file of the first
set that needs it, and each file includes those of the sets before it. torch is left out, since its pin is in
`requirements/torch.txt`. So are the packages that its builds for GPUs require, unless a set names them.
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
from scripts.console import new_parser

FOLDER = ROOT / "requirements"
LEFT_OUT = re.compile(r"pip$|torch$")
"""Packages that are not pinned; pip comes with the virtual environment."""
FOR_GPUS = re.compile(r"triton$|nvidia-|cuda-")
"""Packages that builds of torch for GPUs require."""


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
"""The sets by file name, smallest first."""
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
    """Packages that require it; one may be the project itself."""


def read(text: str) -> dict[str, Pin]:
    """The pins of a requirements file, by canonical name."""
    blocks = re.findall(r"^\w\S*==.*(?:\n[ ]+.*)*", text, re.M)
    return {pin.name: pin for pin in map(_pin, blocks)}


def split(pins: Mapping[str, Pin], wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Pin]]:
    """The pins that each set adds to the sets before it.

    `wanted` has the packages that each set names itself. Their requirements go with them, except those of
    torch on GPUs.
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
    """The output of `pip-compile`, which keeps versions that are in its output file already."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "all.txt"
        output.write_text("\n".join(pin.text for pin in _present()))
        command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, *arguments]
        subprocess.run([*command, "--output-file", str(output), "pyproject.toml"], cwd=ROOT, check=True)
        return output.read_text()


def _present() -> list[Pin]:
    files = (path.read_text() for path in FOLDER.glob("*.txt"))
    return [pin for text in files for pin in read(text).values()]


def main() -> None:
    """Resolve and write; flags other than --help go to `pip-compile`."""
    _, arguments = new_parser(__doc__).parse_known_args()
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
    main()
