"""Checkpoints of EAGLE-3 heads: the spellings that there are, and clear errors for what is no such head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from outrider.engine.heads.eagle_checkpoint import read_head
from outrider.engine.heads.eagle_config import describe_head, is_head
from outrider.protocol.errors import ModelError
from tests import checkpoints
from tests.heads import build_head, head_config, head_tensors, save_head
from tests.models import build_model

TARGET = {"num_hidden_layers": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama of 300 tokens."""
    return str(build_model("llama", tmp_path_factory.mktemp("target"), vocab_size=300))


def renamed(spelling: dict[str, str]) -> dict[str, torch.Tensor]:
    """The tensors with other names."""
    tensors = {}
    for name, tensor in head_tensors().items():
        for old, new in spelling.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(
    "spelling", [{}, {"midlayer.": "layers.0."}, {"midlayer.": "model.layers.0.", "fc.": "model.fc."}]
)
def test_every_spelling_gives_the_same_head(target, tmp_path, spelling):
    """SpecForge, vLLM and SGLang name the layer differently."""
    folder = save_head(tmp_path / "head", renamed(spelling), head_config())
    _, tensors = read_head(str(folder), target)
    expected = head_tensors()
    assert tensors["fc.weight"].equal(expected["fc.weight"])
    assert tensors["layers.0.mlp.up_proj.weight"].equal(expected["midlayer.mlp.up_proj.weight"])
    assert tensors["embed_tokens.weight"].shape == (300, 64), "the target's"


def test_a_head_may_bring_its_embedding(target, tmp_path):
    """It is taken instead of the target's."""
    own = torch.full((300, 64), 2.0)
    folder = save_head(tmp_path / "head", head_tensors() | {"embed_tokens.weight": own}, head_config())
    assert read_head(str(folder), target)[1]["embed_tokens.weight"].equal(own)


@pytest.mark.parametrize("writer", [checkpoints.fp8(), checkpoints.packed(4, 32)])
def test_quantized_layers_of_the_target_are_not_shared(target, tmp_path, writer):
    """Without their scales they are no numbers, and an embedding that is not tied is no output layer."""
    tensors = {name: value for name, value in head_tensors().items() if name not in ("d2t", "lm_head.weight")}
    folder = save_head(tmp_path / "head", tensors, head_config(draft_vocab_size=300))
    assert read_head(str(folder), target)
    coded = checkpoints.write(Path(target), tmp_path / "target", {}, writer, head=True).folder
    with pytest.raises(ModelError, match=r"tensor 'lm_head\.weight.*is quantized.*use a whole head"):
        read_head(str(folder), str(coded))


@pytest.mark.parametrize("writer", [checkpoints.fp8(), checkpoints.packed(4, 32)])
def test_a_head_with_an_output_layer_asks_for_no_other(target, tmp_path, writer):
    """The target's may be quantized then; such a head was told to bring the one that it has."""
    coded = checkpoints.write(Path(target), tmp_path / "target", {}, writer, head=True).folder
    folder = save_head(tmp_path / "head", head_tensors(), head_config())
    assert read_head(str(folder), str(coded))[1]["lm_head.weight"].equal(head_tensors()["lm_head.weight"])


def test_weights_may_be_in_several_files(target, tmp_path):
    """An index says in which."""
    tensors = head_tensors()
    first = {"fc.weight": tensors.pop("fc.weight")}
    folder = save_head(tmp_path / "head", first, head_config())
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_head(folder, tensors, head_config())
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    index = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(tensors, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_head(str(folder), target)[1]["fc.weight"].equal(first["fc.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_norm.weight": torch.zeros(128)}, "input_norm.weight"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}, "layers.1.mlp.up_proj.weight"),
        ({"midlayer.self_attn.q_proj.weight": None}, "layers.0.self_attn.q_proj.weight"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(32, 64)}, "layers.0.self_attn.k_proj.weight"),
        ({"fc.weight": torch.zeros(64, 192)}, "fc.weight"),
        ({"d2t": torch.full((40,), 299)}, "d2t"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, "d2t"),
    ],
)
def test_an_error_names_the_tensor(target, tmp_path, change, named):
    """What is unknown, missing, of another shape, or leads nowhere."""
    tensors = {name: value for name, value in (head_tensors() | change).items() if value is not None}
    folder = save_head(tmp_path / "head", tensors, head_config())
    with pytest.raises(ModelError, match=repr(named)):
        read_head(str(folder), target)


@pytest.mark.parametrize(
    ("whose", "change", "said"),
    [
        ("target", {"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ("target", {"text_config": ["llama"]}, r"text_config is \['llama'\], and must be an object"),
        ("head", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_a_wrong_value_in_a_configuration_is_named(target, tmp_path, whose, change, said):
    """In the head's and in the target's, of which only the folder with the fault is named."""
    head = save_head(tmp_path / "head", head_tensors(), head_config())
    folders = {"head": head, "target": tmp_path / "target"}
    shutil.copytree(target, folders["target"])
    path = folders[whose] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=f"config.json of '{folders[whose]}': {said}"):
        read_head(str(head), str(folders["target"]))


def test_a_head_for_another_target_is_refused(tmp_path):
    """Its embedding would be that of other tokens."""
    other = build_model("llama", tmp_path / "other", vocab_size=280)
    folder = build_head(tmp_path / "head")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight.*\[280, 64\].*\[300, 64\]"):
        read_head(str(folder), str(other))


def test_pickles_are_not_opened(target, tmp_path):
    """The error says what to do."""
    folder = build_head(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert"):
        read_head(str(folder), target)


def test_layers_are_counted_as_their_trainers_count_them():
    """SpecForge names layers whose outputs are read, vLLM what goes into a layer; without, low, middle and
    high."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = describe_head("m", head_config(eagle_config={name: [1, 15, 28]}), TARGET)
    plain = describe_head("m", head_config(eagle_config=None, **{name: [2, 16, 29]}), TARGET)
    default = describe_head("m", head_config(eagle_config={}), TARGET)
    assert nested.feature_layers == plain.feature_layers == default.feature_layers == (2, 16, 29)


def test_sizes_may_be_nested():
    """vLLM's speculators keep them in a part of their own."""
    flat = head_config()
    layer = {
        name: flat.pop(name) for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
    }
    config = flat | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    assert describe_head("m", config, TARGET).hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [31]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"),
        ({"architectures": 5}, "no EAGLE-3 head"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}}, "layer_ids is 5"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, r"layer_ids is \['2'\]"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ({"num_attention_heads": None, "head_dim": None}, "num_attention_heads: "),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"hidden_size": "64", "head_dim": None}, "hidden_size is '64'"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    ],
)
def test_other_heads_are_refused_by_name(changes, named):
    """A setting that changes what is computed is not passed over."""
    with pytest.raises(ModelError, match=named):
        describe_head("m", head_config(**changes), TARGET)


def test_a_head_is_recognised():
    """By its architecture, or as a speculator."""
    assert is_head(head_config())
    assert is_head({"speculators_model_type": "eagle3"})
    assert not is_head({"architectures": ["LlamaForCausalLM"]})
    assert not is_head({"architectures": 5}), "loading it as a model says what is wrong"


def test_the_demo_head_is_one_of_the_demo_target():
    """It is loaded as any other, and is small."""
    demo = Path("models/demo")
    config, tensors = read_head(str(demo / "eagle"), str(demo / "target"))
    assert config.feature_layers == (1, 3, 5)
    assert tensors["d2t"].shape == (config.draft_vocab_size,)
