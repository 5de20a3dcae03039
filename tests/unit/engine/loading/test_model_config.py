"""Which device a setting names, and whether it can be used."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.loading.model_config import find_device, usable
from outrider.protocol.errors import ModelError


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("auto", 0)])
def test_devices_of_the_machine_are_found(
    name: str, number: int, two_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its number, as tensors on it have: whether it runs kernels is tried once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(name) == torch.device("cuda", number)


@pytest.mark.parametrize("name", ["cuda:2", "cuda:127", "cuda:128", "cuda:255", "cuda:999"])
def test_numbers_beyond_the_devices_are_refused(name: str, two_devices: None) -> None:
    """Also those that torch makes negative, or none, which is the first device."""
    with pytest.raises(ModelError, match=f"device: '{name}' asked for and 2 CUDA devices found"):
        find_device(name)


@pytest.mark.parametrize("name", ["cuda:0,1", "cuda:-1", "cuda:MIG-3b2f", "GPU-8932f937", "cuda:"])
def test_what_is_no_name_of_one_device_is_refused(name: str, two_devices: None) -> None:
    """Lists and the names that CUDA_VISIBLE_DEVICES takes are none."""
    with pytest.raises(ModelError, match="is unknown or not in this machine; use auto, cpu, cuda or cuda:N"):
        find_device(name)


def test_a_variable_that_hides_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is why none are found, and its value may be wrong."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ModelError, match="0 CUDA devices with CUDA_VISIBLE_DEVICES='7' found"):
        find_device("cuda")


@pytest.mark.parametrize(
    "problem",
    ["The NVIDIA driver on your system is too old (found version 11040).", "CUDA error: out of memory"],
)
def test_a_device_that_cannot_be_used_is_refused(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a weight is read, by the first line of what torch says."""

    def refuse(place: torch.device) -> None:
        raise RuntimeError(f"{problem}\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(ModelError) as caught:
        usable(torch.device("cuda:1"))
    assert str(caught.value) == (
        f"device: cuda:1 cannot be used ({problem}); see nvidia-smi, or use another device"
    )
    assert usable(torch.device("cpu")) == torch.device("cpu")
