"""Everything here needs a CUDA device and Triton; elsewhere it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.gpu.accelerator import has_kernels

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without a device."""
    usable = torch.cuda.is_available() and has_kernels(torch.device("cuda:0"))
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and Triton"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that the tests run on."""
    return torch.device("cuda:0")


@pytest.fixture(scope="session")
def loaded(device, tmp_path_factory):
    """A small random Llama in bf16, loaded as a service would, self check included."""
    from outrider.engine.loading.loader import load_model
    from tests.models import build_model

    folder = build_model("llama", tmp_path_factory.mktemp("llama"))
    return load_model(str(folder), dtype="bfloat16", device=str(device), threads=1)


@pytest.fixture(scope="session", params=["full", "int8", "int4"])
def deterministic(request, device, tmp_path_factory):
    """The same with `deterministic`, also with codes: its check at load is part of it."""
    from outrider.engine.loading.loader import load_model
    from tests.models import build_model

    folder = build_model("llama", tmp_path_factory.mktemp("llama"))
    options = {"dtype": "bfloat16", "device": str(device), "threads": 1, "weights": request.param}
    return load_model(str(folder), **options, deterministic=True)
