"""Models whose files are wrong: one sentence names the file, and the field where there is one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading.config_faults import fault_in, fault_of
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import ModelError

Folders = Callable[[str], Path]
PART = "model-00001-of-00001.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(folder_of: Folders, tmp_path: Path) -> Path:
    """A copy of a tiny model."""
    return Path(shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True))


def said(folder: Path) -> str:
    """The sentence with which a load fails."""
    with pytest.raises(ModelError) as refusal:
        load_model(str(folder), dtype="float32", device="cpu", threads=1)
    return str(refusal.value)


FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_size": -64}, "hidden_size is -64, and must be a whole number of 1 or more"),
    ({"hidden_size": 0}, "hidden_size is 0, and must be a whole number of 1 or more"),
    ({"hidden_size": "wide"}, "hidden_size is 'wide', and must be a whole number of 1 or more"),
    ({"hidden_size": 64.5}, "hidden_size is 64.5, and must be a whole number of 1 or more"),
    ({"hidden_size": None}, "hidden_size is None, which is of the wrong kind"),
    ({"hidden_size": 1000000007}, "(1000000007) is not a multiple of the number of attention heads (4)"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1, and must be"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, and must be"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple of num_key_value_heads, 3"),
    ({"head_dim": -8}, "head_dim is -8, and must be a whole number of 0 or more"),
    ({"intermediate_size": "x"}, "intermediate_size is 'x', and must be"),
    ({"vocab_size": -1}, "vocab_size is -1, and must be"),
    ({"max_position_embeddings": -1}, "max_position_embeddings is -1, and must be"),
    ({"pad_token_id": 300}, "pad_token_id is 300, and no token of the vocabulary; write null"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', and must be a number above 0"),
    ({"rope_parameters": "x"}, "rope_parameters is 'x', and must be an object"),
    ({"rope_scaling": [2.0]}, "rope_scaling is [2.0], and must be an object"),
    ({"rope_parameters": {"rope_type": "bent"}}, "rope_parameters.rope_type is 'bent', which is not known"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
        "rope_parameters.factor is 'x', and must be a number above 0",
    ),
    ({"rope_theta": -5}, "rope_theta is -5, and must be a number above 0"),
    ({"hidden_act": "foo"}, "hidden_act is 'foo', which is not known"),
    ({"hidden_act": 4}, "hidden_act is 4, which is of the wrong kind"),
    ({"dtype": "float99"}, "dtype is 'float99', which is not known"),
    ({"quantization_config": "x"}, "quantization_config is 'x', and must be an object"),
    ({"tie_word_embeddings": "x"}, "tie_word_embeddings is 'x', which is of the wrong kind"),
    ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
)


@pytest.mark.parametrize(("changes", "sentence"), FIELDS, ids=lambda value: json.dumps(value)[:40])
def test_a_wrong_field_of_the_config_is_named(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    """With its value, and without the words of a library's traceback."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    problem = said(folder)
    assert problem.startswith(f"model: config.json of {str(folder)!r}: ")
    assert sentence in problem
    assert problem.endswith("; repair it, or give another model")


def test_padding_that_only_the_kind_of_model_has_is_named(folder_of: Folders, tmp_path: Path) -> None:
    """Phi 3's is token 32000, also where config.json has a smaller vocabulary and says nothing of it."""
    folder = Path(shutil.copytree(folder_of("phi3"), tmp_path, dirs_exist_ok=True))
    config = json.loads((folder / "config.json").read_text())
    del config["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "pad_token_id is not set, and what its model_type has instead is no token of the" in said(folder)


def test_heads_of_an_odd_width_are_refused(folder: Path) -> None:
    """By the config, or, in versions of transformers that do not check it there, by the shapes of weights."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 7}))
    of_weights = "k_proj.weight of (32, 64), and by its config.json it is (14, 64); use the config.json"
    assert re.search(rf"`head_dim`=7.*; repair it|{re.escape(of_weights)}", said(folder))


def test_what_models_have_is_no_fault() -> None:
    """Lists with a value for each layer, null, and sizes of 0 where there is no such part."""
    config = {"num_key_value_heads": [1, 2], "head_dim": None, "intermediate_size": 0, "rope_scaling": None}
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "factor": None}}
    assert fault_of(config | {"rope_parameters": rope, "text_config": {"hidden_size": 64}}) == ""
    assert fault_of({"text_config": {"hidden_size": 0}}).startswith("hidden_size is 0")


def test_other_errors_are_not_about_the_config() -> None:
    """A missing package or a name that no field has."""
    assert fault_in({"hidden_act": "silu"}, KeyError("weight_map")) == ""
    assert fault_in({"model_type": "mamba"}, ModuleNotFoundError("no mamba", name="mamba")) == ""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", "{bad", "config.json of .* is not JSON"),
        ("config.json", "\ufeff{}", "config.json of .* begins with a byte order mark; save it without"),
        ("config.json", "[]", "config.json of .* is no JSON object"),
        ("config.json", "{}", "`model_type` key in its config.json"),
        ("generation_config.json", "[]", "generation_config.json of .* is no JSON object"),
        ("generation_config.json", "{bad", "generation_config.json of .* is not JSON"),
        (WEIGHTS, "", "model.safetensors is not whole, fetch it again"),
        (WEIGHTS, "<html>404</html>", "model.safetensors is not whole, fetch it again"),
    ],
)
def test_a_file_that_is_broken_is_named(folder: Path, name: str, content: str, sentence: str) -> None:
    """As after a bad download or an edit."""
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=sentence):
        load_model(str(folder), dtype="float32", device="cpu", threads=1)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{bad", "is not JSON"),
        ("[]", "is no JSON object"),
        ("{}", "must have an object `weight_map`"),
        ('{"metadata": {}, "weight_map": "x"}', "must have an object"),
        ('{"metadata": {}, "weight_map": {}}', "must have an object"),
        ('{"metadata": {}, "weight_map": {"w": 5}}', "must have an object"),
        ('{"metadata": {}, "weight_map": {"w": "../../etc/passwd"}}', "must have an object"),
        ('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}', "'metadata' is missing in one of its"),
        ('{"metadata": {}, "weight_map": {"w": "b.safetensors"}}', "b.safetensors of .* is missing, which"),
    ],
)
def test_an_index_that_is_wrong_is_named(folder: Path, index: str, sentence: str) -> None:
    """As is the file that it names and that is not there."""
    (folder / WEIGHTS).rename(folder / PART)
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelError, match=sentence):
        load_model(str(folder), dtype="float32", device="cpu", threads=1)


def test_weights_that_are_not_used_are_said(folder: Path) -> None:
    """A config.json with fewer layers than the weights is another model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    lines: list[str] = []
    load_model(str(folder), dtype="float32", device="cpu", threads=1, say=lines.append)
    assert any("weights of the checkpoint are not used, such as model.layers.1." in line for line in lines)


def test_a_list_of_settings_is_refused(folder: Path) -> None:
    """Not taken for a file without settings."""
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json of .* is no JSON object"):
        json_file(str(folder), "tokenizer_config.json")


def test_weights_that_cannot_be_opened_are_named_with_the_reason(folder: Path) -> None:
    """Such as a link whose file has gone, or a file of another user: they were called missing beside
    themselves."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "gone")
    assert f"has {WEIGHTS}, which cannot be opened (No such file or directory)" in said(folder)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "does not fit into the free memory ("),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "does not fit into the free memory (",
        ),
        (RuntimeError("can't start new thread"), "can't start new thread; raise the limit"),
    ],
)
@pytest.mark.parametrize(
    "place", ["loader._from_files", "check_forward._run_plain", "check_forward._run_paged"]
)
def test_a_lack_of_memory_or_threads_is_no_fault_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, sentence: str
) -> None:
    """Wherever a load gets none, the sentence says so; it called for another model or architecture."""

    def lack(*_: Any) -> None:
        raise error

    monkeypatch.setattr(f"outrider.engine.loading.{place}", lack)
    assert said(folder).startswith(f"model: {sentence}")
