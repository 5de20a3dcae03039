"""Sizes of a model from its files: what loading it would bring, without loading it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.plan.checkpoint import read_checkpoint
from outrider.protocol.errors import ModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int]]], **config: Any) -> Path:
    """A folder with a configuration and the headers of weights that are not there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    safetensors(folder / "model.safetensors", tensors)
    return folder


def safetensors(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file of the format up to where its weights would begin."""
    entries = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}
        for name, (kind, shape) in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


EMBEDDING = ("BF16", [10, 8])
UNTIED = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": EMBEDDING,
    "model.norm.weight": ("BF16", [8]),
}


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    """Weights, and a key and a value for each layer, head and dimension, in the checkpoint's arithmetic."""
    found = read_checkpoint(str(checkpoint(tmp_path, UNTIED)))
    assert found.dtype == "bfloat16"
    assert found.weight_bytes == (80 + 80 + 8) * 2
    assert found.kv_bytes_per_token == 2 * 3 * 2 * (8 // 4) * 2
    assert found.context_length == 64


def test_another_arithmetic(tmp_path: Path) -> None:
    """Is what everything is counted in."""
    folder = str(checkpoint(tmp_path, UNTIED))
    wide, own = read_checkpoint(folder, "float32"), read_checkpoint(folder)
    assert wide.weight_bytes == 2 * own.weight_bytes
    assert wide.kv_bytes_per_token == 2 * own.kv_bytes_per_token


def test_what_a_step_reads(tmp_path: Path) -> None:
    """Not a table that is only looked up in; a tied one, which is the output layer, it reads."""
    assert read_checkpoint(str(checkpoint(tmp_path / "a", UNTIED))).step_bytes(1) == (80 + 8) * 2
    tied = {name: one for name, one in UNTIED.items() if name != "lm_head.weight"}
    assert read_checkpoint(str(checkpoint(tmp_path / "b", tied))).step_bytes(1) == (80 + 8) * 2


LINEAR = {"model.layers.0.mlp.down_proj.weight": ("BF16", [8, 64]), "model.norm.bias": ("BF16", [8])}


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8.5), ("int4", 4.5)])
def test_rounded_linear_layers(tmp_path: Path, weights: str, bits: float) -> None:
    """Take their codes and scales, the output layer 8 bits; embedding and norms stay as they are."""
    found = read_checkpoint(str(checkpoint(tmp_path, UNTIED | LINEAR)), weights=weights)
    codes = int((512 * bits + 80 * 8.5) / 8)
    assert found.weight_bytes == (80 + 8 + 8) * 2 + codes
    assert found.step_bytes(1) == (8 + 8) * 2 + codes


def test_linear_layers_of_fp8(tmp_path: Path) -> None:
    """Have 8 bits and a scale; layers that are stored otherwise, and the output layer, stay as they are."""
    stored = {
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [8, 64]),
        "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", [1, 1]),
    }
    found = read_checkpoint(str(checkpoint(tmp_path, UNTIED | LINEAR | stored)))
    assert (found.weights, found.dtype) == ("fp8", "bfloat16")
    assert found.weight_bytes == (80 + 80 + 8 + 8 + 512) * 2 + 512 * 8.25 / 8
    assert found.step_bytes(1) == found.weight_bytes - 80 * 2


def test_a_tied_output_layer_has_codes_of_its_own(tmp_path: Path) -> None:
    """The table of embeddings stays whole beside them, and no step reads it."""
    tied = {name: one for name, one in UNTIED.items() if name != "lm_head.weight"}
    found = read_checkpoint(str(checkpoint(tmp_path, tied | LINEAR)), weights="int8")
    codes = int((512 + 80) * 8.5 / 8)
    assert found.weight_bytes == (80 + 8 + 8) * 2 + codes
    assert found.step_bytes(1) == (8 + 8) * 2 + codes


def test_keys_and_values_of_8_bits(tmp_path: Path) -> None:
    """Take half of what 16 bits take; the weights are what they were."""
    folder = str(checkpoint(tmp_path, UNTIED))
    whole, small = read_checkpoint(folder), read_checkpoint(folder, kv_dtype="fp8")
    assert (2 * small.kv_bytes_per_token, small.weight_bytes) == (
        whole.kv_bytes_per_token,
        whole.weight_bytes,
    )


def test_one_token_goes_through_some_experts(tmp_path: Path) -> None:
    """Several tokens may want all of them."""
    experts = {f"model.layers.0.mlp.experts.{i}.up.weight": ("BF16", [8, 8]) for i in range(4)}
    folder = checkpoint(tmp_path, UNTIED | experts, num_local_experts=4, num_experts_per_tok=1)
    found = read_checkpoint(str(folder))
    assert found.step_bytes(1) == (80 + 8 + 64) * 2
    assert found.step_bytes(2) == (80 + 8 + 4 * 64) * 2
    rounded = read_checkpoint(str(folder), weights="int8")
    assert rounded.step_bytes(1) == 8 * 2 + (80 + 64) * 8.5 / 8
    assert rounded.weight_bytes == (80 + 8) * 2 + (80 + 4 * 64) * 8.5 / 8


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """A folder may hold its weights a second time, in a layout that nothing loads."""
    folder = checkpoint(tmp_path, {})
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        safetensors(folder / f"part-{number}.safetensors", {f"model.layers.{number}.w": ("BF16", [4])})
    safetensors(folder / "consolidated.safetensors", {"other": ("BF16", [4000])})
    weight_map = {f"model.layers.{number}.w": f"part-{number}.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_checkpoint(str(folder)).parameters == 8


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a folder with"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* is not JSON; repair"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights in safetensors; convert"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "is no whole safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                struct.pack("<Q", 43) + b'{"w": {"dtype":"F32","data_offsets":[0,0]}}'
            ),
            "is no whole safetensors file .*'shape'",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
            "is no whole safetensors file",
        ),
        (
            lambda folder: safetensors(folder / "model.safetensors", {"w": ("U8", [4])}),
            "w of .* is stored as U8; use a checkpoint in float32, bfloat16, float16",
        ),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, spoil: Any, sentence: str) -> None:
    """Is told with what to do."""
    folder = checkpoint(tmp_path, UNTIED)
    spoil(folder)
    with pytest.raises(ModelError, match=sentence):
        read_checkpoint(str(folder))


def test_a_hub_id_is_refused() -> None:
    """Plan asks nobody."""
    with pytest.raises(ModelError, match="'owner/name' is a hub id and plan reads a folder"):
        read_checkpoint("owner/name")
