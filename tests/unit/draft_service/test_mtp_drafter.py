"""Drafting with an MTP layer: what it proposes is what transformers computes with it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from draft_service.drafters.head import HeadDrafter
from draft_service.load import load_drafter, load_grammars
from draft_service.mailbox import Tell
from outrider.config import DraftConfig
from outrider.engine.features import to_bytes
from outrider.engine.heads.loading import load_head
from outrider.protocol.errors import ConfigError
from outrider.protocol.messages import PromptFeatures, SamplingParams
from outrider.protocol.wire import model_info_to_pb
from outrider.sampling.chooser import SamplingRow, rank
from outrider.sampling.history import History
from tests.mtp import build_target
from tests.unit.draft_service.fakes import Bench, RankCalibration, likeliest, request, verdict

TEXT = (3, 77, 120, 9, 30)
CHILDREN = 3


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_5"])
def target(request, tmp_path_factory):
    """A folder with a target, and what transformers computes with its MTP layer."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, build_target(request.param, folder)


def features(first: int, stop: int) -> Tensor:
    """[tokens, 64] what the target has before the tokens of a range: numbers that bfloat16 has."""
    drawn = [torch.randn(64, generator=torch.Generator().manual_seed(place)) for place in range(first, stop)]
    return torch.stack(drawn).to(torch.bfloat16).float()


def test_the_tree_is_what_the_layer_says_of_the_text(target):
    """Below the root with the target's features, further down with the layer's own; also after a miss."""
    folder, plain = target
    head = load_head(str(folder), "", kind="mtp", dtype="float32", device="cpu", threads=1)
    (layer,) = head.feature_layers
    bench = Bench(HeadDrafter(head, children=CHILDREN, max_nodes=64, max_rows=1000, context_length=500))
    bench.core.calibration = RankCalibration(0.8, 0.1)
    stream, _ = bench.open(request(TEXT, feature_layers=(layer,)))
    bench.step()
    bench._messages.append(Tell(stream, PromptFeatures(1, to_bytes(features(1, len(TEXT))))))
    text = [*TEXT]
    for step, token in enumerate((31, 2), 1):
        told = to_bytes(features(len(text), len(text) + 1))
        bench.verdict(stream, verdict(len(text), token, step=step, features=told))
        bench.step()
        bench.run()
        text.append(token)
        levels, path = likeliest(bench.session(stream).tree), []
        assert len(levels) > 3
        for level in levels[:4]:
            logits = plain.below(text, features(1, len(text)), path)
            row = SamplingRow(SamplingParams(), len(text) + len(path), 1, History(text, []))
            assert level == rank(logits[None], [row], CHILDREN, 1.0, ())[0].tokens
            path.append(level[0])


def test_a_draft_service_serves_it(target):
    """It says what it is, reads the target's tokenizer, and warms up."""
    folder, plain = target
    config = DraftConfig(kind="mtp", model=str(folder), dtype="float32", device="cpu")
    drafter, info = load_drafter(config, "d0")
    assert isinstance(drafter, HeadDrafter)
    assert (info.kind, drafter.kind) == ("mtp", "mtp")
    assert info.feature_layers == (plain.main.config.num_hidden_layers,)
    assert (info.vocabulary_size, info.context_length) == (300, 512)
    assert load_grammars(config, info) is not None


@pytest.mark.parametrize("given", [-1, [-1, 5], 5])
def test_ids_that_no_token_has_end_no_text(target, tmp_path, given):
    """Such as -1 for none, which has no place in the message that describes the draft."""
    for path in target[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    config = DraftConfig(kind="mtp", model=str(tmp_path), dtype="float32", device="cpu")
    _, info = load_drafter(config, "d0")
    assert list(model_info_to_pb(info).eos_token_ids) == ([] if given == -1 else [5])


def test_a_memory_without_room_is_refused_at_start(target):
    """The sentence names the two settings that do not go together."""
    config = DraftConfig(kind="mtp", model=str(target[0]), dtype="float32", device="cpu", kv_tokens=250)
    with pytest.raises(ConfigError, match="kv_tokens: no text fits beside a tree of 256 nodes; raise it, or"):
        load_drafter(config, "d0")


def test_it_is_used_as_it_is(target):
    """Settings of models that would change it are refused."""
    config = DraftConfig(kind="mtp", model=str(target[0]), weights="int8", device="cpu")
    with pytest.raises(ConfigError, match="an EAGLE head or MTP layer is used as it is"):
        load_drafter(config, "d0")
