"""Quantized checkpoints: read without the packages that made them, exactly, or refused with a way out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.experts import PackedExperts
from outrider.engine.cpu.linear import KernelLinear
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.stored import read_generation_config
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests import checkpoints
from tests.checkpoints import Writer, Written, write
from tests.models import build_model, plain_model
from tests.mtp import add_layer

Folders = Callable[[str], Path]
TOKENS = [5, 6, 7, 8, 250, 3, 3, 99]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}

needs_kernels = pytest.mark.skipif(vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512")

EXACT: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (GPTQ, checkpoints.gptq(4, 32)),
    "gptq, symmetric": (GPTQ | {"sym": True}, checkpoints.gptq(4, 32, symmetric=True)),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, checkpoints.gptq(4, 32, version=2)),
    "gptq, version 2 by format": (GPTQ | {"format": "gptq_v2"}, checkpoints.gptq(4, 32, version=2)),
    "gptq, 8 bits, whole rows": (GPTQ | {"bits": 8, "group_size": -1}, checkpoints.gptq(8, -1)),
    "awq": (AWQ, checkpoints.awq(32)),
    "packed": (checkpoints.compressed("pack-quantized", **PACKED), checkpoints.packed(4, 32)),
    "packed, zeros": (
        checkpoints.compressed("pack-quantized", **(PACKED | {"symmetric": False})),
        checkpoints.packed(4, 32, symmetric=False),
    ),
    "packed, 8 bits, rows": (
        checkpoints.compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        checkpoints.packed(8, -1),
    ),
    "int8, rows": (
        checkpoints.compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        checkpoints.int8(),
    ),
    "int8, whole": (
        checkpoints.compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="tensor"),
        checkpoints.int8(whole=True),
    ),
}
"""Formats whose codes the kernels take."""
WIDENED: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq, desc_act": (GPTQ | {"desc_act": True}, checkpoints.gptq(4, 32, shuffled=True)),
    "gptq, groups of 16": (GPTQ | {"group_size": 16}, checkpoints.gptq(4, 16)),
    "packed, actorder": (
        checkpoints.compressed("pack-quantized", **(PACKED | {"actorder": "group"})),
        checkpoints.packed(4, 32, shuffled=True),
    ),
    "fp8, small blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        checkpoints.fp8(16, name="weight_scale_inv"),
    ),
}
"""Formats of which the numbers alone are kept."""
FP8: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 of compressed-tensors": (
        checkpoints.compressed(
            "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"
        ),
        checkpoints.fp8(),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        checkpoints.fp8(32, name="weight_scale_inv"),
    ),
    "fp8, blocks, powers of two": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        checkpoints.fp8(32, name="weight_scale_inv", powers=True),
    ),
    "fp8, rows": ({"quant_method": "fbgemm_fp8"}, checkpoints.fp8()),
    "fp8, whole": ({"quant_method": "fp8"}, checkpoints.fp8(1 << 20)),
}
"""Formats of e4m3."""


def load(folder: Path, **settings: Any) -> LoadedModel:
    """Load on the CPU in float32 unless told otherwise."""
    return load_model(str(folder), **{"dtype": "float32", "device": "cpu", "threads": 1, **settings})


def logits(loaded: LoadedModel) -> Tensor:
    """[T, V] of TOKENS over paged memory, the last ones one by one."""
    runner = ModelRunner(loaded, 8, 4)
    kv = SequenceKv.open(runner.pool, [])
    rows = [runner.forward([Segment(kv, TOKENS[:5], None, range(5))])]
    runner.commit(kv, range(5), TOKENS[:5])
    for token in TOKENS[5:]:
        rows.append(runner.forward([Segment(kv, [token], None, [0])]))
        runner.commit(kv, [0], [token])
    return torch.cat(rows)


def plain(source: Path, written: Written) -> PreTrainedModel:
    """The model as transformers runs it, with the numbers that the test worked out."""
    network = plain_model(source)
    for name, numbers in written.numbers.items():
        experts, _, rest = name.partition(".experts.")
        if rest:
            expert, _, layer = rest.partition(".")
            layers = network.get_submodule(experts.rpartition(".")[0]).children()
            (held,) = [block.experts for block in layers if hasattr(block, "experts")]
            _set_expert(held, int(expert), layer, numbers)
        else:
            network.get_submodule(name).weight.data = numbers
    return network


def _set_expert(experts: Any, expert: int, layer: str, numbers: Tensor) -> None:
    """Set one of an expert's weights; that of the gate comes before that of up."""
    if layer in ("down_proj", "w2"):
        experts.down_proj.data[expert] = numbers
    else:
        experts.gate_up_proj.data[expert].chunk(2)[layer in ("up_proj", "w3")].copy_(numbers)


def expected(network: PreTrainedModel) -> Tensor:
    """[T, V] of TOKENS."""
    with torch.inference_mode():
        found: Tensor = network(torch.tensor([TOKENS])).logits[0]
    return found


def coded_layers(loaded: LoadedModel) -> int:
    """Layers whose products take codes."""
    kinds = [module for module in loaded.model.modules() if isinstance(module, KernelLinear)]
    return sum(module.dtype == torch.int8 for module in kinds)


@needs_kernels
@pytest.mark.parametrize("name", EXACT | FP8)
def test_codes_are_taken_as_they_are(name: str, folder_of: Folders, tmp_path: Path) -> None:
    """The model computes what transformers computes with the numbers that the codes stand for."""
    settings, writer = (EXACT | FP8)[name]
    written = write(folder_of("llama"), tmp_path / "model", settings, writer)
    loaded = load(written.folder)
    assert torch.allclose(logits(loaded), expected(plain(folder_of("llama"), written)), atol=1e-3)
    assert coded_layers(loaded) == 3 * 4
    method = settings["quant_method"].removeprefix("fbgemm_")
    assert loaded.arithmetic.startswith(f"{method} float32 fused")


@needs_kernels
@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_an_mtp_layer_is_not_read(architecture: str, tmp_path: Path) -> None:
    """The target has no such layer: its codes were decoded, and reported as layers that become 16 bits."""
    source = build_model(architecture, tmp_path / "plain")
    without = told(write(source, tmp_path / "without", *FP8["fp8, rows"]))
    add_layer(source)
    assert told(write(source, tmp_path / "beside", *FP8["fp8, rows"])) == without


def told(written: Written) -> list[str]:
    """What is said of layers that become 16 bits."""
    said: list[str] = []
    load(written.folder, say=said.append)
    return [line for line in said if "layers become" in line]


@pytest.mark.parametrize("name", WIDENED)
def test_what_kernels_do_not_take_becomes_numbers(name: str, folder_of: Folders, tmp_path: Path) -> None:
    """With the same results, and a sentence that says what memory it takes."""
    settings, writer = WIDENED[name]
    written = write(folder_of("llama"), tmp_path / "model", settings, writer)
    said: list[str] = []
    loaded = load(written.folder, say=said.append)
    assert torch.allclose(logits(loaded), expected(plain(folder_of("llama"), written)), atol=1e-3)
    assert coded_layers(loaded) == 0
    assert any("21 " in line and "become torch.float32; all weights take" in line for line in said)


@needs_kernels
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "phi3"])
def test_other_architectures(architecture: str, folder_of: Folders, tmp_path: Path) -> None:
    """Biases, norms of heads, layers fused in the checkpoint, and models that run plain."""
    written = write(folder_of(architecture), tmp_path / "model", *EXACT["awq"])
    loaded = load(written.folder)
    assert torch.allclose(logits(loaded), expected(plain(folder_of(architecture), written)), atol=2e-3)
    assert coded_layers(loaded) >= 3 * 4


@needs_kernels
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "hunyuan_moe"])
@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "int8, rows", "fp8, rows"])
def test_experts_keep_their_codes(name: str, architecture: str, tmp_path: Path) -> None:
    """Those of all experts together, whatever a checkpoint calls them, and their products are from these."""
    from outrider.engine.cpu.quantized_matmul import QuantizedMatmul

    settings, writer = (EXACT | FP8)[name]
    widths = {"moe_intermediate_size": 64, "intermediate_size": 64}
    source = build_model(architecture, tmp_path / "plain", num_hidden_layers=2, **widths)
    written = write(source, tmp_path / "model", settings, writer)
    said: list[str] = []
    loaded = load(written.folder, say=said.append)
    assert torch.allclose(logits(loaded), expected(plain(source, written)), atol=2e-3)
    found = [module for module in loaded.model.modules() if isinstance(module, PackedExperts)]
    products = [product for module in found for product in module._up.products + module._down.products]
    assert all(isinstance(product, QuantizedMatmul) for product in products)
    assert len(products) == (8 if architecture == "qwen3_moe" else 16)
    assert not any("layers become" in line for line in said)


@needs_kernels
def test_an_output_layer_may_have_codes(folder_of: Folders, tmp_path: Path) -> None:
    """Where the checkpoint gives it some."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["packed"], head=True)
    loaded = load(written.folder)
    assert torch.allclose(logits(loaded), expected(plain(folder_of("llama"), written)), atol=1e-3)
    assert coded_layers(loaded) == 3 * 4 + 1


@needs_kernels
def test_the_rest_may_be_rounded_too(folder_of: Folders, tmp_path: Path) -> None:
    """What the checkpoint left alone, the output layer, is rounded where that is asked for."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["awq"])
    loaded = load(written.folder, weights="int8")
    assert coded_layers(loaded) == 3 * 4 + 1
    assert loaded.arithmetic.startswith("awq int8 float32")


@needs_kernels
@pytest.mark.parametrize("name", ["awq", "fp8, rows"])
def test_16_bits_give_the_same_within_their_rounding(name: str, folder_of: Folders, tmp_path: Path) -> None:
    """The numbers of the plain model are rounded to bfloat16, those of the codes are not."""
    written = write(folder_of("llama"), tmp_path / "model", *(EXACT | FP8)[name])
    network = expected(plain(folder_of("llama"), written))
    found = logits(load(written.folder, dtype="bfloat16"))
    spread = (network - network.mean(-1, keepdim=True)).norm()
    assert (found - network).norm() / spread < 0.1


def test_tensors_may_lie_in_several_files(folder_of: Folders, tmp_path: Path) -> None:
    """Even those of one layer."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["awq"])
    whole = load_file(written.folder / "model.safetensors")
    (written.folder / "model.safetensors").unlink()
    for number in range(2):
        names = list(whole)[number::2]
        path = written.folder / f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: whole[name] for name in names}, path, {"format": "pt"})
    assert torch.allclose(
        logits(load(written.folder)), expected(plain(folder_of("llama"), written)), atol=1e-3
    )


REFUSED: dict[str, dict[str, Any]] = {
    "gptq with 3 bits": GPTQ | {"bits": 3},
    "gptq with 4 bits in the format marlin": GPTQ | {"checkpoint_format": "marlin"},
    "single layers": GPTQ | {"dynamic": {"+:.*": {"bits": 8}}},
    "awq with 4 bits, version gemv": AWQ | {"version": "gemv"},
    "awq with 4 bits, version gemv_fast": AWQ | {"version": None, "format": "gemv_fast"},
    "the format nvfp4-pack-quantized": checkpoints.compressed("nvfp4-pack-quantized"),
    "sparse weights": checkpoints.compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24"}},
    r"compressed-tensors with \[2\] bits": checkpoints.compressed(
        "pack-quantized", **PACKED | {"num_bits": 2}
    ),
    "the method bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "the method hqq": {"quant_method": "hqq"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_formats_are_refused(reason: str, folder_of: Folders, tmp_path: Path) -> None:
    """One sentence names the format, those that can be read, and the flag that needs none."""
    written = write(folder_of("llama"), tmp_path / "model", REFUSED[reason], checkpoints.awq(32))
    with pytest.raises(ModelError, match=rf"{reason}.*Readable are gptq.*weights int8 or int4"):
        load(written.folder)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without_order(tensors: dict[str, Tensor]) -> None:
    """As GPTQ checkpoints whose groups are in order may be."""
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


@pytest.mark.parametrize("group", [8, 64, 96])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_layer_of_another_layout_is_named(
    name: str, group: int, folder_of: Folders, tmp_path: Path
) -> None:
    """A checkpoint that does not hold what its settings say; larger groups were taken for padded ones."""
    settings, writer = EXACT[name]
    written = write(folder_of("llama"), tmp_path / "model", settings | {"group_size": group}, writer)
    change(written.folder, without_order)
    said = rf"{name}, layer model\.layers\.0\.mlp\.down_proj .it has 3 groups of {group} for rows of 96"
    with pytest.raises(ModelError, match=said):
        load(written.folder)


@pytest.mark.parametrize("name", ["packed", "packed, zeros", "fp8, blocks"])
def test_scales_of_other_groups_than_the_settings_say_are_refused(
    name: str, folder_of: Folders, tmp_path: Path
) -> None:
    """With the name of the layer: fewer scales were taken for those of larger groups."""
    written = write(folder_of("llama"), tmp_path / "model", *(EXACT | FP8)[name])
    layer = "model.layers.1.mlp.down_proj"

    def cut(tensors: dict[str, Tensor]) -> None:
        for part in ("weight_scale", "weight_zero_point", "weight_scale_inv"):
            if (held := tensors.get(f"{layer}.{part}")) is not None:
                tensors[f"{layer}.{part}"] = held[:, :2].contiguous()

    change(written.folder, cut)
    said = (
        rf"layer {re.escape(layer)} .it has scales \(\d+, 2\) for a weight \(64, 96\) in blocks of \d+ x 32"
    )
    with pytest.raises(ModelError, match=said):
        load(written.folder)


@pytest.mark.parametrize("block", ["x", [32], [-1, 32], [32, None]])
def test_blocks_that_cannot_be_are_named(block: Any, folder_of: Folders, tmp_path: Path) -> None:
    """With the setting."""
    settings, writer = FP8["fp8, blocks"]
    written = write(folder_of("llama"), tmp_path / "model", settings | {"weight_block_size": block}, writer)
    with pytest.raises(ModelError, match=rf"fp8 with weight_block_size {re.escape(repr(block))}\. Readable"):
        load(written.folder)


@pytest.mark.parametrize("group", ["x", 0, -2, None])
@pytest.mark.parametrize("strategy", ["group", "block"])
def test_groups_of_compressed_tensors_that_cannot_be_are_named(
    strategy: str, group: Any, folder_of: Folders, tmp_path: Path
) -> None:
    """With what the settings say."""
    weights = PACKED | {"strategy": strategy, "group_size": group, "block_structure": group}
    settings = checkpoints.compressed("pack-quantized", **weights)
    written = write(folder_of("llama"), tmp_path / "model", settings, EXACT["packed"][1])
    with pytest.raises(ModelError, match=r"compressed-tensors with blocks of .*\. Readable"):
        load(written.folder)


@pytest.mark.parametrize("group", ["x", 0, -2, None])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_groups_that_cannot_be_are_named(name: str, group: Any, folder_of: Folders, tmp_path: Path) -> None:
    """With the setting, where the error was one of Python's."""
    settings, writer = EXACT[name]
    written = write(folder_of("llama"), tmp_path / "model", settings | {"group_size": group}, writer)
    with pytest.raises(ModelError, match=rf"not read here: {name} with group_size {group!r}\. Readable are"):
        load(written.folder)


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("gptq", "scales", "it has no scales"),
        ("packed", "weight_scale", "it has no weight_scale"),
        ("packed", "weight_packed", "it has no weight"),
        ("int8, rows", "weight_scale", "its weights are torch.int8 without scales"),
    ],
)
def test_a_layer_without_one_of_its_tensors_is_named(
    name: str, lost: str, said: str, folder_of: Folders, tmp_path: Path
) -> None:
    """With what it lacks; codes of 8 bits were taken for numbers."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT[name])
    layer = "model.layers.1.mlp.up_proj"
    change(written.folder, lambda tensors: tensors.pop(f"{layer}.{lost}"))
    with pytest.raises(ModelError, match=rf"layer {re.escape(layer)} .{re.escape(said)}"):
        load(written.folder)


def test_an_order_with_unknown_groups_is_an_error_of_its_layer(folder_of: Folders, tmp_path: Path) -> None:
    """Not of the whole folder."""
    written = write(folder_of("llama"), tmp_path / "model", *WIDENED["gptq, desc_act"])
    layer = "model.layers.1.mlp.up_proj"
    change(written.folder, lambda tensors: tensors[f"{layer}.g_idx"].add_(100))
    with pytest.raises(ModelError, match=rf"gptq, layer {re.escape(layer)} .index 10\d is out of bounds"):
        load(written.folder)


def test_a_layer_of_another_shape_is_named(folder_of: Folders, tmp_path: Path) -> None:
    """As in a checkpoint that is not quantized, with both shapes."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["awq"])
    config = json.loads((written.folder / "config.json").read_text())
    (written.folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(
        ModelError, match=r"k_proj\.weight of \(32, 64\), .* it is \(64, 64\); use the config"
    ):
        load(written.folder)


def test_a_checkpoint_without_a_layer_is_refused(folder_of: Folders, tmp_path: Path) -> None:
    """As one that is not quantized."""
    written = write(folder_of("llama"), tmp_path / "model", *EXACT["awq"])
    path = written.folder / "model.safetensors"
    save_file({name: part for name, part in load_file(path).items() if "lm_head" not in name}, path)
    with pytest.raises(ModelError, match=r"lacks 1 weights .* lm_head\.weight"):
        load(written.folder)


def test_a_wrong_generation_config_is_one_sentence(folder_of: Folders, tmp_path: Path) -> None:
    """Also where a rank reads it by itself."""
    for path in folder_of("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    wrong = tmp_path / "generation_config.json"
    wrong.unlink(missing_ok=True)
    wrong.write_text('{"cache_implementation": "none of these"}')
    network: Any = SimpleNamespace()
    for read in (lambda: load(tmp_path), lambda: read_generation_config(network, str(tmp_path))):
        with pytest.raises(ModelError, match=r"cannot be loaded \(Invalid `cache_implementation`"):
            read()


@pytest.mark.parametrize("scale", ["scale", "qscale_weight"])
def test_fp8_numbers_are_not_taken_without_their_scales(
    scale: str, folder_of: Folders, tmp_path: Path
) -> None:
    """Scales of another name would be passed over, and the numbers mean nothing without them."""
    written = write(
        folder_of("llama"), tmp_path / "model", {"quant_method": "fp8"}, checkpoints.fp8(name=scale)
    )
    with pytest.raises(ModelError, match=r"_proj .it has fp8 numbers, and scales of another name"):
        load(written.folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_beside_numbers_of_more_bits_are_refused(
    dtype: torch.dtype, folder_of: Folders, tmp_path: Path
) -> None:
    """A checkpoint saved before it was compressed has both; the scales are not those of these numbers."""
    settings = checkpoints.compressed("dense", num_bits=8, type="float", symmetric=True, strategy="channel")

    def writer(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return {"weight": weight.to(dtype), "weight_scale": weight.abs().amax(1, keepdim=True) / 448}, weight

    written = write(folder_of("llama"), tmp_path / "model", settings, writer)
    with pytest.raises(
        ModelError, match=rf"_proj .its weights are {dtype}, not fp8, beside scales.*Readable"
    ):
        load(written.folder)
