"""The overlays that `outrider plan` prints: they render, are valid, and set what was planned."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from outrider.cli.main import main
from tests.k8s.manifests import K8S, NAMESPACE, ROOT, Manifests, container, pod, render
from tests.k8s.test_against_code import quantity, settings
from tests.k8s.test_rendered import VERSIONS, check, check_namespace

PAIR = ("--target", str(ROOT / "models/demo/target"), "--draft", str(ROOT / "models/demo/draft"))


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[str, Manifests]:
    """What the command prints, and what a cluster would get of it."""
    assert main(["plan", *PAIR, *flags]) == 0
    text = capsys.readouterr().out
    beside = re.sub(
        r"  - (\.\./\S+)",
        lambda found: (
            f"  - {os.path.relpath((K8S / 'overlays/mine' / found[1]).resolve(), folder.resolve())}"
        ),
        text,
    )
    (folder / "kustomization.yaml").write_text(beside)
    return text, render(folder)


@pytest.mark.parametrize("flags", [("--gpu", "h100"), ("--gpu", "cpu", "--bandwidth", "40"), ("--gpu", "l4")])
def test_an_overlay_is_valid(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every kind of device; the services take its settings."""
    _, manifests = planned(capsys, tmp_path, *flags, "--context", "512", "--sessions", "7")
    check_namespace(manifests, NAMESPACE)
    for manifest in manifests:
        check(manifest, VERSIONS[-1])
    for service in ("verify", "draft"):
        config = settings(manifests, service)
        assert config.context_length == 512
        assert config.max_sessions == 7
        assert config.kv_tokens >= 7 * 512
        assert config.device == ("auto" if "cpu" in flags else "cuda")
        assert quantity(container(manifests, service)["resources"]["limits"]["memory"]) > 2**31
    assert settings(manifests, "verify").served_name == "target"


def test_pods_go_to_the_planned_kind_of_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the label that GPU feature discovery gives it."""
    _, manifests = planned(capsys, tmp_path, "--gpu", "l40s")
    for service in ("verify", "draft"):
        assert pod(manifests, service)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}


def test_the_figures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As comments before the overlay: sizes, what fits, the least time of a step, and how many replicas."""
    text, _ = planned(capsys, tmp_path, "--gpu", "h100", "--sessions", "30000")
    figures = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert "h100: 80 GB, 3,350 GB/s" in figures
    assert re.search(r"target target: [\d.]+ M weights in bfloat16", figures)
    assert "tokens of keys and values (3,072 bytes each)" in figures
    assert "a step takes at least" in figures
    assert "scale --replicas 3 statefulset/verify" in figures


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--gpu", "h1000"), "outrider: --gpu: 'h1000' is not known; use one of a10"),
        (("--gpu", "l4", "--context", "4096"), "outrider: --context: 4096 is more than the 2048 of 'target'"),
        (("--gpu", "cpu", "--memory", "0.01"), "outrider: --gpu: the weights of 'target' take"),
        (("--gpu", "cpu", "--kv-dtype", "fp8"), "outrider: --kv-dtype: fp8 takes a GPU"),
        (("--gpu", "cpu", "--draft-kv-dtype", "fp8"), "outrider: --draft-kv-dtype: fp8 takes a GPU"),
        (("--gpu", "l4", "--draft", "draft"), "outrider: --draft: given several times; plan with one"),
    ],
)
def test_what_cannot_be_planned(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is one sentence, and status 2."""
    assert main(["plan", *PAIR, *flags]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_lookup_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no weights whose memory could be planned."""
    target = PAIR[PAIR.index("--target") + 1]
    assert main(["plan", "--target", target, "--draft", "lookup", "--gpu", "l4"]) == 2
    assert capsys.readouterr().err.startswith("outrider: --draft: 'lookup' is no model with")


@pytest.mark.parametrize("flag", ["--memory", "--bandwidth"])
def test_no_device_is_infinite(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are finite numbers."""
    with pytest.raises(SystemExit):
        main(["plan", *PAIR, "--gpu", "h100", flag, "inf"])
    assert capsys.readouterr().err == f"outrider: {flag}: must be a number above 0, at most 1e12, not 'inf'\n"
