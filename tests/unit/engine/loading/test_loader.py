"""What is loaded, and what is refused with one sentence that says what to change."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.model_config import eos_token_ids, find_context_length
from outrider.engine.loading.stored import read_generation_config
from outrider.protocol.errors import ModelError
from tests.models import BOS_ID, EOS_ID, UNSUPPORTED, build_model

Folders = Callable[[str], Path]


def load(folder: Path | str, **settings: Any) -> LoadedModel:
    """Load on the CPU in float32 unless told otherwise."""
    return load_model(str(folder), **{"dtype": "float32", "device": "cpu", "threads": 1, **settings})


def changed(folder: Path, into: Path, **changes: Any) -> Path:
    """A copy of a model folder with another config.json."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | changes))
    return into


def test_what_is_known_of_a_loaded_model(folder_of: Folders) -> None:
    """Sizes, special tokens and the shape of its keys and values."""
    loaded = load(folder_of("llama"), dtype="auto", device="auto")
    assert (loaded.vocabulary_size, loaded.context_length) == (300, 512)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (BOS_ID, (EOS_ID,))
    shape = loaded.geometry
    assert (shape.num_layers, shape.kv_heads, shape.head_dim) == (3, 2, 16)
    assert loaded.dtype_name == "float32"
    assert loaded.kv_bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert loaded.name == folder_of("llama").name


@pytest.mark.parametrize(("ids", "known"), [([1, 5, 300, -1], (1, 5)), (-1, ()), ([], ())])
def test_ids_that_no_token_has_are_left_out(
    folder_of: Folders, tmp_path: Path, ids: Any, known: tuple[int, ...]
) -> None:
    """Some files write -1 for none, and a vocabulary may have been cut."""
    folder = changed(folder_of("llama"), tmp_path)
    settings = {"eos_token_id": ids, "bos_token_id": -1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded = load(folder)
    assert (loaded.eos_token_ids, loaded.bos_token_id) == (known, None)


@pytest.mark.parametrize("inner", ["none", "null", "one", "list"])
@pytest.mark.parametrize("outer", ["no file", "none", "null", "one", "list"])
def test_texts_end_where_generate_of_transformers_ends_them(
    folder_of: Folders, tmp_path: Path, outer: str, inner: str
) -> None:
    """Whichever of the two files names the ids: config.json counts only where it is alone."""
    folder = changed(folder_of("llama"), tmp_path)
    generation: dict[str, Any] = {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    prompt = torch.tensor([[2, 3, 4]])
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    end = int(network.generate(prompt, max_new_tokens=1)[0, -1])
    ids: dict[str, Any] = {"none": {}, "null": {"eos_token_id": None}, "one": {"eos_token_id": end}}
    ids["list"] = {"eos_token_id": [5, end]}
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config | ids[inner]))
    if outer == "no file":
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation | ids[outer]))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ends = network.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] == prompt.shape[1] + 1
    assert (end in eos_token_ids(network)) == ends
    as_others_read = transformers.AutoModelForCausalLM.from_config(network.config)
    read_generation_config(as_others_read, str(folder))
    assert eos_token_ids(as_others_read) == eos_token_ids(network)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"vocab_size": 10},
            r"lm_head\.weight of \(300, 64\), and .* it is \(10, 64\); use",
        ),
        (
            {"eos_token_id": 1.5},
            r"config\.json of .*: eos_token_id is 1\.5, which is of the wrong kind",
        ),
        ({"num_hidden_layers": 9}, r"lacks .* weights .*; use the config\.json that belongs to the weights"),
    ],
)
def test_a_wrong_config_is_said_in_a_sentence(
    folder_of: Folders, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    """It names the weight that does not fit, or the entry and its value."""
    with pytest.raises(ModelError, match=sentence):
        load(changed(folder_of("llama"), tmp_path, **changes))


def test_ids_that_are_no_numbers_are_refused(folder_of: Folders, tmp_path: Path) -> None:
    """The sentence names the file to repair."""
    folder = changed(folder_of("llama"), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": "1"}')
    with pytest.raises(ModelError, match=r"eos_token_id is '1'; .* generation_config\.json"):
        load(folder)


def test_linear_layers_are_packed(folder_of: Folders) -> None:
    """On the CPU every linear layer is, GPT-2's kind and the tied output layer included."""
    network = load(folder_of("gpt2")).model
    kinds = [type(module) for module in network.modules()]
    assert sum(issubclass(kind, CpuLinear) for kind in kinds) == 3 * 4 + 1
    assert torch.nn.Linear not in kinds


def test_progress_is_told(folder_of: Folders) -> None:
    """A slow load says what it is doing."""
    said: list[str] = []
    load(folder_of("llama"), say=said.append)
    assert [line.split()[0] for line in said[:2]] == ["loading", "checking"]
    assert "linear layers on" in said[2]


def test_the_context_can_be_shortened(folder_of: Folders) -> None:
    """A smaller context is a setting, a larger one than the model's is refused."""
    assert load(folder_of("llama"), context_length=100).context_length == 100
    with pytest.raises(ModelError, match=r"context_length: 1000 .* 512"):
        load(folder_of("llama"), context_length=1000)
    with pytest.raises(ModelError, match="context_length: 8 is too small"):
        load(folder_of("llama"), context_length=8)


def test_a_model_may_name_no_context() -> None:
    """Then one has to be set, and the error says how."""
    config = transformers.BloomConfig()
    with pytest.raises(ModelError, match=r"context_length: .* set one with --context-length.*outrider up"):
        find_context_length(config, 0, print)
    assert find_context_length(config, 128, print) == 128


def test_a_rope_that_changes_with_the_length_is_cut(folder_of: Folders, tmp_path: Path) -> None:
    """Beyond the original context longrope would turn every cached key; the context ends before."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    folder = changed(folder_of("phi3"), tmp_path, rope_parameters=rope, original_max_position_embeddings=128)
    said: list[str] = []
    assert load(folder, say=said.append).context_length == 128
    assert any("cut from 512 to 128" in line for line in said)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "encoder-decoder; use a decoder-only model"),
        ("mamba", "has no attention beside its recurrent layers; use another architecture"),
        ("rembert", "does not let its attention be replaced"),
    ],
)
def test_other_kinds_of_model_are_refused(folder_of: Folders, kind: str, reason: str) -> None:
    """The sentence names the kind and what to use instead."""
    assert kind in UNSUPPORTED
    with pytest.raises(ModelError, match=reason):
        load(folder_of(kind))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "not set"),
        ("/nowhere/at-all", "no folder .* give a folder"),
        ("no-such-id", "no folder .* as a hub id it cannot be loaded .* give a folder"),
    ],
)
def test_a_missing_model_is_refused(model: str, reason: str) -> None:
    """No folder and no hub id is one sentence, not a traceback."""
    with pytest.raises(ModelError, match=reason):
        load(model)


def test_a_broken_config_is_refused(folder_of: Folders, tmp_path: Path) -> None:
    """A config.json of no known model type is named as the reason."""
    with pytest.raises(ModelError, match=r"config\.json of .*: model_type is .no-such-model., which .* know"):
        load(changed(folder_of("llama"), tmp_path, model_type="no-such-model"))


def test_a_model_with_an_adapter_is_refused(folder_of: Folders, tmp_path: Path) -> None:
    """Transformers adds it where peft is installed, and else says nothing: its text would be another one. A
    folder may have the adapter alone."""
    folder = changed(folder_of("llama"), tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    with pytest.raises(ModelError, match=r"has an adapter \(adapter_config\.json\).*merge it"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has an adapter \(adapter_config\.json\).*merge it"):
        load(folder)


def test_weights_that_are_cut_off_are_named(folder_of: Folders, tmp_path: Path) -> None:
    """A download that broke leaves a part of a file; the sentence says which to fetch again."""
    weights = changed(folder_of("llama"), tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole, fetch it again"):
        load(weights.parent)


def test_code_of_a_model_is_not_run(folder_of: Folders, tmp_path: Path) -> None:
    """The sentence names the setting that lets it run."""
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    folder = changed(folder_of("llama"), tmp_path, model_type="own", auto_map=code)
    with pytest.raises(ModelError, match="has code of its own, which runs only with trust_remote_code"):
        load(folder)


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path) -> None:
    """As where a model's numbers are too large for 16 bits; the sentence names the dtype."""
    folder = build_model("llama", tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.lm_head.weight *= 1e5
    network.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"in torch\.float16 are NaN or infinite; set another dtype"):
        load(folder, dtype="float16")
    load(folder)


@pytest.mark.parametrize("device", ["tpu9", "meta", "mps"])
def test_an_unknown_device_is_refused(device: str, folder_of: Folders) -> None:
    """The setting and its possible values are named."""
    with pytest.raises(ModelError, match=f"device: '{device}' is unknown"):
        load(folder_of("llama"), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_refused(folder_of: Folders) -> None:
    """Asking for a GPU that is not there says so."""
    with pytest.raises(ModelError, match="0 CUDA devices found"):
        load(folder_of("llama"), device="cuda")


def test_a_checkpoint_without_head_is_refused(tmp_path: Path) -> None:
    """Weights that would be made up are named."""
    build_model("llama", tmp_path)
    headless = transformers.AutoModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    headless.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 1 weights .* lm_head\.weight"):
        load(tmp_path)


class _Trap:
    """Opening a pickle of it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_never_opened(folder_of: Folders, tmp_path: Path, name: str) -> None:
    """A folder that has nothing else is refused with what to do; beside safetensors they are left alone."""
    folder = changed(folder_of("llama"), tmp_path / "model")
    (folder / name).write_bytes(pickle.dumps(_Trap(tmp_path / "opened")))
    load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in safetensors.*convert"):
        load(folder)
    assert not (tmp_path / "opened").exists()


def test_parts_without_the_file_that_names_them(folder_of: Folders, tmp_path: Path) -> None:
    """The sentence says which files are missing, and not that there are no safetensors."""
    folder = changed(folder_of("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    sentence = r"has model-00001-of-00001\.safetensors, but no model\.safetensors, nor an .*index\.json"
    with pytest.raises(ModelError, match=sentence):
        load(folder)


def test_a_dtype_that_cannot_run_is_refused(tmp_path: Path) -> None:
    """Weights of float64 need another dtype, and the sentence says which."""
    folder = build_model("llama", tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(folder).double().save_pretrained(folder)
    with pytest.raises(ModelError, match=r"dtype: weights of torch\.float64"):
        load(folder, dtype="auto")


class TestSelfCheck:
    """Attention that this engine does not know of is found at load, not in the text."""

    def patched(self, monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]]) -> None:
        """Let Llama's attention layers call with other arguments."""
        original = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

        def get_interface(name: str, default: Any) -> Any:
            function = original(name, default)
            return lambda *args, **kwargs: function(*args, **change(name, kwargs))

        monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)

    def test_a_difference_is_refused(self, monkeypatch: pytest.MonkeyPatch, folder_of: Folders) -> None:
        """The sentence names the model, where it differs and the argument nobody knows."""

        def biased(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
            ours = name.startswith("outrider")
            return {**kwargs, "scaling": 0.5, "unheard_of": 1} if ours else kwargs

        self.patched(monkeypatch, biased)
        with pytest.raises(ModelError, match=r"LlamaForCausalLM gives other logits .* asks for unheard_of"):
            load(folder_of("llama"), fused=False)

    def test_a_window_longer_than_the_check_is_compared(
        self, monkeypatch: pytest.MonkeyPatch, folder_of: Folders
    ) -> None:
        """A window that the model's cache does not have cannot show in a short run."""
        self.patched(monkeypatch, lambda name, kwargs: {**kwargs, "sliding_window": 100})
        with pytest.raises(ModelError, match="attends over a window of 100, its cache keeps None"):
            load(folder_of("llama"), fused=False)

    def test_a_window_of_the_cache_alone_is_refused(self, tmp_path: Path) -> None:
        """Llama attends to everything, whatever its config.json says of a window; its cache would forget."""
        folder = build_model("llama", tmp_path, sliding_window=100)
        with pytest.raises(ModelError, match="attends over a window of None, its cache keeps 100"):
            load(folder)
        assert load(folder, context_length=100).context_length == 100

    def test_an_exception_is_refused(self, monkeypatch: pytest.MonkeyPatch, folder_of: Folders) -> None:
        """A model that cannot run over pages says so with the reason."""

        def broken(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
            if name.startswith("outrider"):
                raise ValueError("no such thing")
            return kwargs

        self.patched(monkeypatch, broken)
        with pytest.raises(ModelError, match=r"does not run over paged memory \(no such thing\)"):
            load(folder_of("llama"), fused=False)
