"""An MTP layer, read under the names of published checkpoints, computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from outrider.engine.heads.base import Head, Rows
from outrider.engine.heads.loading import load_head
from outrider.engine.heads.mtp_loading import mtp_version
from outrider.engine.heads.store import seen_in_tree
from outrider.protocol.errors import ModelError
from tests.checkpoints import fp8, write
from tests.models import build_model
from tests.mtp import TARGETS, PlainMtp, add_layer, build_target

TOKENS = [3, 77, 120, 9, 30, 31, 8]
POSITIONS = list(range(1, len(TOKENS) + 1))


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainMtp]:
    """A target with an MTP layer, and what transformers computes with that layer."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, build_target(request.param, folder)


def load(folder: Path, **changes: str) -> Head:
    """In float32 on the CPU, unless other things are asked for."""
    return load_head(
        str(folder), "", kind="mtp", **{"dtype": "float32", "device": "cpu", **changes}, threads=1
    )


def computed(head: Head, features: torch.Tensor, seen: torch.Tensor, first: int = 0):
    """Features of the next rows and logits, of the rows from `first` on."""
    asked = list(range(first, len(TOKENS)))
    rows = Rows(torch.tensor(TOKENS), torch.tensor(POSITIONS), head.fuse(features), asked)
    with torch.inference_mode():
        return head.compute(rows, lambda queries, entries, mix: mix(queries[first:], entries, seen[first:]))


def drawn(count: int) -> torch.Tensor:
    """Some features."""
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def causal(count: int) -> torch.Tensor:
    """What the rows of a text see."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def test_a_text_is_computed_as_by_transformers(pair):
    """Every row of a chain; the feature of a row below is the layer's result."""
    folder, plain = pair
    features, seen = drawn(len(TOKENS)), causal(len(TOKENS))
    hidden, logits = computed(load(folder), features, seen)
    expected_hidden, expected = plain(TOKENS, features, POSITIONS, seen)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not hasattr(transformers, "MellumConfig"), reason="transformers knows no Mellum")
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_layer_turns_as_its_kind_does(tmp_path, kind):
    """Where kinds of layers have rotary positions of their own."""
    config = transformers.MellumConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        layer_types=["sliding_attention", "full_attention"],
        num_mtp_layers=1,
        mtp_layer_types=[kind],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain, features, seen = add_layer(tmp_path), drawn(len(TOKENS)), causal(len(TOKENS))
    _, logits = computed(load(tmp_path), features, seen)
    _, expected = plain(TOKENS, features, POSITIONS, seen)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_tree_sees_the_text_and_its_own_path(pair):
    """Only some rows are asked for; the others' keys and values are seen."""
    folder, plain = pair
    features, inside = drawn(len(TOKENS)), seen_in_tree(4, [[11], [11, 12], [13]], [11, 12, 13])
    seen = torch.cat([torch.cat([causal(4), torch.zeros(4, 3, dtype=torch.bool)], 1), inside])
    hidden, logits = computed(load(folder), features, seen, first=4)
    expected_hidden, expected = plain(TOKENS, features, POSITIONS, seen)
    torch.testing.assert_close(hidden, expected_hidden[4:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected[4:], atol=1e-4, rtol=1e-4)


def test_sixteen_bits_come_close(pair):
    """The kernels of bfloat16 compute the same layer, rounded."""
    folder, plain = pair
    features, seen = drawn(len(TOKENS)), causal(len(TOKENS))
    head = load(folder, dtype="bfloat16")
    _, logits = computed(head, features, seen)
    _, expected = plain(TOKENS, features, POSITIONS, seen)
    assert head.dtype == torch.bfloat16
    assert (logits - expected).abs().mean() < 0.06 * expected.abs().mean()


def test_rows_are_those_of_transformers_own_drafting(pair):
    """Its candidate after a text and the target's next token, from the target's hidden states: the same
    tokens, states and positions belong together."""
    folder, plain = pair
    if "qwen3_5" in plain.main.config.model_type and not hasattr(plain.model, "forward_layer"):
        pytest.skip("this version of transformers drafts with other positions than Qwen 3.5 takes")
    with torch.no_grad():
        target = plain.main(torch.tensor([TOKENS]), output_hidden_states=True)
        states, following = target.hidden_states[-1], int(target.logits[0, -1].argmax())
        _, logits, _ = plain.model(
            input_ids=torch.tensor([[*TOKENS[1:], following]]),
            last_hidden_states=states,
            attention_mask=torch.ones(1, len(TOKENS), dtype=torch.int64),
            position_ids=torch.tensor([POSITIONS]),
            mtp_cache=MtpCache(config=plain.model.config),
        )
    tokens, features, seen = [*TOKENS[1:], following], states[0], causal(len(TOKENS))
    head = load(folder)
    rows = Rows(torch.tensor(tokens), torch.tensor(POSITIONS), head.fuse(features), [len(TOKENS) - 1])
    with torch.inference_mode():
        found = head.compute(rows, lambda queries, entries, mix: mix(queries[-1:], entries, seen[-1:]))
    torch.testing.assert_close(found[1], logits[0], atol=1e-4, rtol=1e-4)


def test_rows_that_nobody_asks_for_are_kept(pair):
    """Their entries go to the drafter, and there is no result."""
    head, kept = load(pair[0]), []
    rows = Rows(torch.tensor([5]), torch.tensor([1]), drawn(1), [])
    with torch.inference_mode():
        found = head.compute(rows, lambda queries, entries, _: (kept.append(len(entries)), queries[:0])[1])
    assert found is None
    assert kept == [1]


def test_it_reads_what_goes_into_the_output_layer(pair):
    """One feature layer, numbered behind the target's layers."""
    folder, plain = pair
    head = load(folder)
    assert head.feature_layers == (plain.main.config.num_hidden_layers,)
    assert (head.target_hidden_size, head.vocab_size) == (64, 300)


def test_with_a_window_the_newest_rows_are_seen(tmp_path):
    """A layer with a sliding window sees as many rows as that of transformers."""
    build_target("glm4_moe_lite", tmp_path)
    head, seen, narrow = load(tmp_path), causal(len(TOKENS)), causal(len(TOKENS)).triu(-2)
    found = []
    for window, mask in ((3, seen), (None, narrow)):
        queries, entries = torch.ones(len(TOKENS), 4, 24), torch.arange(7.0)[:, None, None].expand(7, 4, 40)
        options = {"scaling": 1.0, "sliding_window": window}
        head._call = (
            (lambda q, e, mix, mask=mask: mix(q, e, mask)),
            Rows(torch.tensor(TOKENS), torch.tensor(POSITIONS), torch.zeros(7, 64), list(range(7))),
        )
        key, value = entries[..., :24].transpose(0, 1)[None], entries[..., 24:].transpose(0, 1)[None]
        found.append(
            head.attention(head.layer, queries.transpose(0, 1)[None], key, value, None, **options)[0]
        )
    torch.testing.assert_close(*found)


def test_targets_that_take_images_have_other_names(tmp_path):
    """Qwen 3.5 is published with its text model beside one for images; the MTP layer is the same."""
    plain = build_target("qwen3_5", tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=images, tie_word_embeddings=False)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "both")
    weights = load_file(tmp_path / "both" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "text" / "model.safetensors").items():
        weights[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(weights, tmp_path / "both" / "model.safetensors", {"format": "pt"})
    features, seen = drawn(len(TOKENS)), causal(len(TOKENS))
    _, logits = computed(load(tmp_path / "both"), features, seen)
    torch.testing.assert_close(logits, plain(TOKENS, features, POSITIONS, seen)[1], atol=1e-4, rtol=1e-4)


def test_a_target_without_an_mtp_layer_is_refused(tmp_path):
    """With what to use in its place."""
    with pytest.raises(ModelError, match=r"has no MTP layer; use another draft"):
        load(build_model("llama", tmp_path))


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_quantized_layers_are_the_numbers_that_they_stand_for(architecture, tmp_path):
    """Of a published format; the same layer with these numbers in its checkpoint computes the same."""
    build_target(architecture, tmp_path / "plain")
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    written = write(
        tmp_path / "plain", tmp_path / "coded", settings, fp8(32, name="weight_scale_inv"), head=True
    )
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    weights |= {f"{module}.weight": numbers for module, numbers in written.numbers.items()}
    save_file(weights, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    features, seen = drawn(len(TOKENS)), causal(len(TOKENS))
    found = [computed(load(tmp_path / name), features, seen)[1] for name in ("coded", "plain")]
    assert any(module.startswith(("mtp.", "model.layers.3.")) for module in written.numbers)
    torch.testing.assert_close(*found)


def test_a_missing_weight_is_named(tmp_path):
    """A layer with random numbers would only cost time."""
    build_target("qwen3_5", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["mtp.fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"eh_proj"):
        load(tmp_path)


def test_its_version_is_that_of_its_own_weights(tmp_path):
    """Other weights of the target, which may be many, do not count; its own do."""
    build_target("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    weights, first = load_file(path), mtp_version(str(tmp_path))
    weights["model.layers.0.self_attn.o_proj.weight"] += 1.0
    save_file(weights, path, {"format": "pt"})
    assert mtp_version(str(tmp_path)) == first
    weights["model.layers.3.self_attn.o_proj.weight"] += 1.0
    save_file(weights, path, {"format": "pt"})
    assert mtp_version(str(tmp_path)) != first


def test_other_kinds_of_layers_are_refused(tmp_path):
    """A recurrent layer has no keys that a tree could see."""
    build_target("qwen3_5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mtp_layer_types"] = ["linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'linear_attention', which does not run here"):
        load(tmp_path)
