"""The Dockerfile, without an engine that could build it: what it names exists, and what it leaves is small,
unprivileged and able to run every container of the manifests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from outrider.cli.main import _parser
from tests.k8s.dockerfile import Stage, inherited, last_list, read
from tests.k8s.manifests import COLLECTOR, OVERLAYS, ROOT, WORKLOADS, of_kind, overlay

FILE = ROOT / "docker/Dockerfile"
STAGES = read(FILE)
IMAGES = ("orchestrator", "engine", "demo")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COPIES = [
    (stage, words[:-1])
    for stage in STAGES.values()
    for words in (text.split() for text in stage.arguments("COPY"))
]


def test_the_linter_has_no_complaint() -> None:
    """Hadolint finds nothing, in the Dockerfile or in the shell of its steps."""
    command = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    assert command, "install the extra dev, which brings hadolint"
    done = subprocess.run([command, str(FILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("stage", "sources"), COPIES)
def test_copied_files_exist_and_are_sent(stage: Stage, sources: list[str]) -> None:
    """Every COPY takes what is in the tree and is let through by .dockerignore, or an earlier stage."""
    if sources[0].startswith("--from="):
        assert sources[0].removeprefix("--from=") in STAGES
        return
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(Path(source).is_relative_to(path) for path in sent), source


def test_every_package_is_copied() -> None:
    """The stage that builds the wheel has all the packages that the project installs, and what its metadata
    names."""
    copied = {source for stage, sources in COPIES if stage.name == "package" for source in sources}
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", PROJECT["project"]["readme"]} <= copied


def test_requirements_are_locked() -> None:
    """pip installs wheels alone, or files of requirements that it checks by their hashes; torch has none and
    comes last."""
    steps = [text for stage in STAGES.values() for text in stage.arguments("RUN")]
    parts = [part for step in steps for part in step.split(" && ")]
    installs = [part for part in parts if re.search(r"pip (--python \S+ )?install", part)]
    files = {
        file: part for part in installs for file in re.findall(r"--requirement requirements/(\w+)", part)
    }
    assert files.keys() == {"build", "gateway", "engine", "torch"}
    assert list(files)[-1] == "torch"
    assert all("--require-hashes --no-deps" in part for file, part in files.items() if file != "torch")
    assert all("--no-deps" in part for part in installs if part != files["torch"])


def test_the_base_is_one_pinned_release() -> None:
    """Every stage is built on one image with an exact version, which the project supports."""
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
    (tag,) = re.findall(r"^ARG BASE=python:(\S+)$", FILE.read_text(), re.M)
    assert bases == {"${BASE}"}
    version = re.fullmatch(r"(\d+)\.(\d+)\.\d+-slim-\w+", tag)
    assert version
    assert (int(version[1]), int(version[2])) >= (3, 11)


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_as_nobody(image: str) -> None:
    """The last user is a number, not root's, the one that the manifests run as; SIGTERM stops the process."""
    user, group = map(int, inherited(STAGES, image, "USER")[-1].split(":"))
    contexts = [
        one["spec"]["template"]["spec"]["securityContext"]
        for one in of_kind(overlay("gpu"), *WORKLOADS).values()
    ]
    assert {(context["runAsUser"], context["runAsGroup"]) for context in contexts} == {(user, group)}
    assert user > 0
    assert inherited(STAGES, image, "STOPSIGNAL") == ["SIGTERM"]


@pytest.mark.parametrize("image", IMAGES)
def test_no_build_tools_are_left(image: str) -> None:
    """pip and its friends are removed; only the image whose kernels Triton compiles has a compiler."""
    steps = inherited(STAGES, image, "RUN")
    assert any("pip uninstall --yes pip setuptools wheel" in step for step in steps)
    assert all(
        "--without-pip" in step
        for stage in STAGES.values()
        for step in stage.arguments("RUN")
        if "venv" in step
    )
    assert any("gcc" in step for step in steps) == (image == "engine")


def test_the_orchestrators_image_has_no_torch() -> None:
    """What it copies was built from its own requirements, which do not name torch."""
    (copy,) = STAGES["orchestrator"].arguments("COPY")
    built = copy.split()[0].removeprefix("--from=")
    steps = " ".join(inherited(STAGES, built, "RUN"))
    assert re.findall(r"requirements/(\w+)", steps) == ["gateway"]
    for name in ("gateway", "orchestrator"):
        assert "torch==" not in (ROOT / f"requirements/{name}.txt").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_the_entry_point_is_the_command(image: str) -> None:
    """ENTRYPOINT is a script that the project installs and its function can be imported; CMD parses."""
    (script,) = last_list(STAGES, image, "ENTRYPOINT")
    module, _, function = PROJECT["project"]["scripts"][script].partition(":")
    assert callable(getattr(import_module(module), function))
    command = last_list(STAGES, image, "CMD")
    if "--help" not in command:
        _parser().parse_args(command)


def test_every_image_of_the_manifests_is_built() -> None:
    """Each image that a pod names is a target of the Dockerfile, titled so."""
    names = {
        container["image"].partition(":")[0]
        for name in OVERLAYS
        for workload, one in of_kind(overlay(name), *WORKLOADS).items()
        if workload != COLLECTOR
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    assert names == {f"outrider-{image}" for image in IMAGES}
    for image in IMAGES:
        labels = " ".join(inherited(STAGES, image, "LABEL"))
        assert f'org.opencontainers.image.title="outrider-{image}"' in labels
        assert f'org.opencontainers.image.version="{PROJECT["project"]["version"]}"' in labels
