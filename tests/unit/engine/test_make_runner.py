"""Which models run on a GPU's kernels, and what happens to those that turn out not to; without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from subprocess import CalledProcessError
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.gpu import accelerator
from outrider.engine.loaded_model import Geometry
from outrider.engine.loading import loader
from outrider.engine.loading.check_forward import run_plain
from outrider.engine.make_runner import make_runner, without_kernels
from outrider.engine.runner import ModelRunner
from outrider.engine.step import StepSize
from outrider.protocol.errors import ModelError

CUDA = torch.device("cuda:0")


@pytest.fixture
def device(monkeypatch):
    """A device of compute capability 8.0 with Triton 3.4."""
    caches = (accelerator.missing, accelerator.overlapping, accelerator.has_kernels)
    for each in caches:
        each.cache_clear()
    found = {"capability": (8, 0), "triton": "3.4.0"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found["capability"])
    monkeypatch.setattr(accelerator, "find_spec", lambda _: found["triton"] or None)
    monkeypatch.setattr(accelerator, "version", lambda _: found["triton"])
    monkeypatch.setattr(accelerator, "unable_to_launch", lambda _: found.get("launch"))
    yield found
    for each in caches:
        each.cache_clear()


@pytest.fixture
def crowded(monkeypatch):
    """A device whose shared memory is too small for the kernels."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is for Linux alone")

    def refuse(*_, **__):
        raise errors.OutOfResources(140800, 101376, "shared memory")

    monkeypatch.setattr("outrider.engine.gpu.runner.GraphRunner", refuse)


def heads(width: int) -> Geometry:
    """One layer."""
    return Geometry(1, 4, 2, width, width)


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256, 512])
def test_16_bit_models_run_on_kernels(device, width):
    """With heads of any width that a matrix product takes and a multiprocessor has room for."""
    assert without_kernels(heads(width), torch.bfloat16, CUDA) is None
    assert accelerator.has_kernels(CUDA)


@pytest.mark.parametrize(
    ("found", "overlaps"),
    [
        ({"capability": (9, 0), "triton": "3.5.0"}, True),
        ({"capability": (10, 0), "triton": "3.10.1"}, True),
        ({"capability": (9, 0), "triton": "3.4.0"}, False),
        ({"capability": (8, 9), "triton": "3.6.0"}, False),
    ],
)
def test_launches_overlap_where_device_and_compiler_can(device, found, overlaps):
    """In Triton 3.4 a kernel that waits for others does not compile: the model would run without kernels."""
    device.update(found)
    assert accelerator.overlapping(CUDA)["OVERLAP"] == overlaps
    assert ("launch_pdl" in accelerator.overlapping(CUDA)) == overlaps


@pytest.mark.parametrize(
    ("width", "dtype", "found", "reason"),
    [
        (8, torch.bfloat16, {}, "heads are 8 wide, not 16 to 512"),
        (576, torch.float16, {}, "heads are 576 wide"),
        (64, torch.float32, {}, "not torch.float32"),
        (64, torch.bfloat16, {"capability": (7, 5)}, "compute capability 7.5, below 8.0"),
        (
            64,
            torch.bfloat16,
            {"triton": "3.3.1"},
            "Triton 3.3.1 is older than 3.4; install torch 2.8 or newer",
        ),
        (64, torch.bfloat16, {"triton": ""}, "Triton is not installed"),
    ],
)
def test_others_say_why_not(device, width, dtype, found, reason):
    """Heads, dtype, device, Triton: each in a sentence."""
    device.update(found)
    assert reason in (without_kernels(heads(width), dtype, CUDA) or "")


def test_where_no_kernel_can_be_launched_neither_models_nor_choices_have_any(device):
    """Known before one is needed."""
    device["launch"] = "Triton cannot launch kernels"
    assert without_kernels(heads(64), torch.bfloat16, CUDA) == device["launch"]
    assert not accelerator.has_kernels(CUDA)


@pytest.mark.parametrize("kind", ["no compiler", "no headers", "no assembler", "other", None])
def test_a_kernel_is_launched_to_see_whether_any_can(monkeypatch, kind):
    """Errors of what Triton compiles for the host and for the device; the sentence says what is lacking."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is for Linux alone")
    error = {
        "no compiler": RuntimeError("Failed to find C compiler."),
        "no headers": CalledProcessError(1, ["gcc", "driver.c"]),
        "no assembler": errors.PTXASError("Value 'sm_121a' is not defined"),
        "other": AttributeError("'NoneType' object has no attribute 'target'"),
    }.get(kind)
    kernel = MagicMock()
    kernel.__getitem__.return_value.side_effect = error
    monkeypatch.setattr("outrider.engine.gpu.kernels.layers.activation_kernel", kernel)
    found = accelerator.unable_to_launch(torch.device("cpu"))
    assert kernel.__getitem__.return_value.call_count == 1
    assert (found or "").startswith(f"Triton cannot launch kernels ({error}); it needs" if error else "")
    assert (found is None) == (error is None)


def test_a_broken_triton_leaves_the_model_to_torch(monkeypatch):
    """Such as one whose library does not load: not even its errors can be imported."""
    monkeypatch.setitem(sys.modules, "outrider.engine.gpu.kernels.layers", None)
    assert "Triton cannot launch kernels" in (accelerator.unable_to_launch(torch.device("cpu")) or "")


@pytest.mark.parametrize(
    ("wide", "places", "reason"),
    [
        (512, ((0, 0), (1, 0), (0, 0)), None),
        (1024, ((0, 0), (1, 0), (0, 0)), "heads are 1024 wide, not 16 to 512"),
        (512, ((0, 0), None, (1, 0)), "some of its layers have no attention"),
    ],
)
def test_layers_may_differ_if_all_have_attention(device, wide, places, reason):
    """Each shape of heads has to be one that kernels take."""
    geometry = replace(heads(256), parts=(heads(256), heads(wide)), places=places)
    assert without_kernels(geometry, torch.bfloat16, CUDA) == reason


def test_kernels_that_do_not_fit_leave_the_model_to_torch(pair_of, crowded):
    """What Triton raises is said, and the runner of plain torch serves."""
    said: list[str] = []
    loaded = replace(pair_of("llama").loaded, kernels=True)
    assert type(make_runner(loaded, 8, 4, largest=StepSize(8, 8), say=said.append)) is ModelRunner
    assert "shared memory, Required: 140800" in said[0]
    assert said[0].endswith("plain torch computes this model")


def test_keys_and_values_of_8_bits_are_refused_without_kernels(pair_of, folder_of, crowded):
    """Nothing else keeps them: while the runner is made, at load, on the CPU before a weight is read."""
    loaded = replace(pair_of("llama").loaded, kernels=True, fp8_kv=True)
    with pytest.raises(
        ModelError, match=r"^kv_dtype: fp8 .* \(out of resource: shared memory.*; leave it out$"
    ):
        make_runner(loaded, 8, 4, largest=StepSize(8, 8))
    network = AutoModelForCausalLM.from_pretrained(folder_of("llama")).eval().requires_grad_(False)
    with pytest.raises(
        ModelError, match=r"^kv_dtype: fp8 .* \(out of resource: shared memory.*; leave it out$"
    ):
        loader._arranged(loaded, network, run_plain(network, 512), True, lambda _: None)
    with pytest.raises(ModelError, match=r"^kv_dtype: fp8 .* \(this is the CPU\); leave it out$"):
        loader.load_model(str(folder_of("llama")), dtype="auto", device="cpu", threads=1, kv_dtype="fp8")


def test_what_has_no_kernels_has_no_keys_and_values_of_8_bits(pair_of, device):
    """A float32 model on a GPU; the sentence says why."""
    loaded = replace(pair_of("llama").loaded, device=CUDA, fp8_kv=True)
    with pytest.raises(
        ModelError, match=r"^kv_dtype: fp8 .* \(they compute 16-bit models, not torch.float32"
    ):
        loader._with_kernels(loaded, lambda _: None)


def test_a_load_that_finds_kernels_not_to_fit_goes_on_without(pair_of, folder_of, crowded):
    """The model is fused all the same."""
    loaded = replace(pair_of("llama").loaded, kernels=True)
    network = AutoModelForCausalLM.from_pretrained(folder_of("llama")).eval().requires_grad_(False)
    said: list[str] = []
    found = loader._arranged(loaded, network, run_plain(network, 512), True, said.append)
    assert not found.kernels
    assert isinstance(found.model, FusedDecoder)
    assert sum("shared memory" in sentence for sentence in said) == 2, "fused, and as it is"


def test_errors_of_triton_are_known():
    """They are no RuntimeErrors: whoever expects kernels to fail has to name them. The last is raised where
    there is a C compiler but not what launchers are compiled with.
    """
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is for Linux alone")
    for error in (errors.OutOfResources, errors.PTXASError, CalledProcessError):
        assert issubclass(error, accelerator.kernel_errors())
        assert not issubclass(error, RuntimeError)
