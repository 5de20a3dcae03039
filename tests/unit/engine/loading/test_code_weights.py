"""Weights reach a device as codes: rounded ones, and those of quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.gpu import coded_linear
from outrider.engine.gpu.coded_linear import CodedLinear
from outrider.engine.loading import code_weights as coding
from outrider.engine.loading import loader, stored
from outrider.engine.loading.check_forward import check_paged, run_plain
from outrider.engine.loading.code_weights import code_weights
from outrider.engine.loading.fingerprint import fingerprint
from outrider.engine.quantization import planes
from outrider.engine.quantization.rounding import BITS
from outrider.protocol.errors import ModelError
from tests.checkpoints import write
from tests.models import ARCHITECTURES, build_model, plain_model
from tests.unit.engine.loading.test_rounded import TOKENS, expected
from tests.unit.engine.loading.test_stored import EXACT, FP8, WIDENED, plain
from tests.unit.engine.loading.test_stored import TOKENS as STORED_TOKENS
from tests.unit.engine.loading.test_stored import expected as expected_of

Folders = Callable[[str], Path]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def network_of(folder: Path) -> PreTrainedModel:
    """As transformers loads it, in float32."""
    return plain_model(folder).requires_grad_(False)


def silent(_: str) -> None:
    """Nobody listens."""


def logits(network: Any, tokens: list[int] = TOKENS) -> Tensor:
    """[T, V] by the model's own modules."""
    with torch.inference_mode():
        found: Tensor = network(torch.tensor([tokens])).logits[0]
    return found


def coded(network: nn.Module) -> dict[str, CodedLinear]:
    """Layers with codes by name."""
    return {name: each for name, each in network.named_modules() if isinstance(each, CodedLinear)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_computes_with_rounded_layers(architecture: str, folder_of: Folders) -> None:
    """By its own modules, as the check at load runs it, and over pages, fused or not; experts stay."""
    network = network_of(folder_of(architecture))
    count = code_weights(network, CPU, BITS["int4"], silent)
    assert count == len(coded(network)) > 0
    wanted = expected(folder_of(architecture), BITS["int4"], experts=False)
    assert torch.allclose(logits(network), wanted, atol=1e-4 * wanted.std().item())
    own = run_plain(network, 512)
    vocabulary, shape = own.logits.shape[-1], {"context_length": 512, "geometry": own.geometry}
    loaded = loader.described(network, "tiny", vocabulary, model=network, device=CPU, **shape)
    check_paged(loader._made_fused(loaded, network, own, silent), own)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_has_8_bits(tied: bool, tmp_path: Path) -> None:
    """The others 4; an embedding that shares its weight keeps it."""
    network = network_of(build_model("llama", tmp_path, tie_word_embeddings=tied))
    embedding = network.get_input_embeddings().weight.clone()
    code_weights(network, CPU, BITS["int4"], silent)
    assert {name.rpartition(".")[2]: layer.planes.bits for name, layer in coded(network).items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 4),
        "lm_head": 8,
    }
    assert torch.equal(network.get_input_embeddings().weight, embedding)


def test_a_layer_reaches_the_device_in_parts(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of its numbers at once than are rounded together, and the way is said."""
    moved: list[int] = []
    original = torch.Tensor.to

    def noted(self: Tensor, *args: Any, **named: Any) -> Tensor:
        if args == (CPU,) and self.is_floating_point() and self.ndim == 2:
            moved.append(self.numel())
        return original(self, *args, **named)

    network, said = network_of(folder_of("llama")), []
    monkeypatch.setattr(torch.Tensor, "to", noted)
    monkeypatch.setattr(planes, "AT_ONCE", 1000)
    monkeypatch.setattr(coding, "PROGRESS_BYTES", 100_000)
    code_weights(network, CPU, BITS["int8"], said.append)
    assert max(moved) <= 1000
    assert len(said) > 1
    assert said[0].endswith("GB of weights are codes on cpu")


def test_models_of_other_codes_have_other_fingerprints(folder_of: Folders) -> None:
    """And equal ones the same."""
    found = []
    for bits in (8, 8, 4):
        network = network_of(folder_of("llama"))
        code_weights(network, CPU, bits, silent)
        found.append(fingerprint(network))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        (None, r"weights: int8 does not run on cuda: .* torch\.float32; set dtype to bfloat16, or leave"),
        (
            "Triton is not installed",
            r"weights: int8 does not run on cuda: Triton is not installed; .*docs/gpu",
        ),
    ],
)
def test_a_device_without_kernels_is_refused(
    lacking: str | None, sentence: str, folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is moved; the sentence says what to change."""
    monkeypatch.setattr(coded_linear, "missing", lambda place: lacking)
    with pytest.raises(ModelError, match=sentence):
        loader.place_weights("model", network_of(folder_of("llama")), CUDA, "int8", silent)


def test_a_device_with_kernels_gets_codes(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded where that is asked for; a model without codes goes there as it is."""
    monkeypatch.setattr(loader, "without_codes", lambda dtype, place: None)
    monkeypatch.setattr(
        loader, "code_weights", lambda network, place, bits, say: code_weights(network, CPU, bits, say)
    )
    monkeypatch.setattr(loader, "_move", lambda *_: None)
    for weights, count in (("int4", 3 * 7 + 1), ("full", 0)):
        network, said = network_of(folder_of("llama")), []
        loader.place_weights("model", network, CUDA, weights, said.append)
        assert len(coded(network)) == count
        assert said == ([f"{count} linear layers are codes on cuda"] if count else [])


def read(folder: Path, place: torch.device | None, say: Callable[[str], None] = silent) -> PreTrainedModel:
    """A quantized checkpoint's model, before it is moved."""
    found = stored.read_quantized(str(folder), "float32", place, False, say)
    assert found is not None
    return found[0].eval()


@pytest.mark.parametrize("name", EXACT | FP8)
def test_a_checkpoint_keeps_its_codes_alone(
    name: str, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has zeros without memory in place of numbers, the device the codes."""
    settings, writer = (EXACT | FP8)[name]
    written = write(folder_of("llama"), tmp_path / "model", settings, writer)
    monkeypatch.setattr(stored, "without_codes", lambda dtype, place: None)
    network = read(written.folder, CUDA)
    numbers = [network.get_submodule(layer).weight for layer in written.numbers]
    assert all(each.untyped_storage().nbytes() == each.itemsize for each in numbers)
    assert code_weights(network, CPU, None, silent) == len(written.numbers)
    assert type(network.get_output_embeddings()) is nn.Linear
    assert torch.allclose(
        logits(network, STORED_TOKENS), expected_of(plain(folder_of("llama"), written)), atol=1e-3
    )


@pytest.mark.parametrize("name", ["gptq, groups of 16", "fp8, small blocks"])
def test_what_kernels_do_not_take_becomes_numbers(
    name: str, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CPUs, and it is said."""
    settings, writer = WIDENED[name]
    written, said = write(folder_of("llama"), tmp_path / "model", settings, writer), []
    monkeypatch.setattr(stored, "without_codes", lambda dtype, place: None)
    network = read(written.folder, CUDA, said.append)
    assert code_weights(network, CPU, None, silent) == 0
    assert torch.allclose(
        logits(network, STORED_TOKENS), expected_of(plain(folder_of("llama"), written)), atol=1e-3
    )
    assert "21 " in said[0]


@pytest.mark.parametrize("place", [CUDA, None])
def test_without_kernels_all_become_numbers(
    place: torch.device | None, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has none, and for studies that want numbers."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["awq"])
    monkeypatch.setattr(stored, "without_codes", lambda dtype, place: "there are none")
    network = read(written.folder, place)
    assert code_weights(network, CPU, None, silent) == 0
    assert torch.allclose(
        logits(network, STORED_TOKENS), expected_of(plain(folder_of("llama"), written)), atol=1e-3
    )
