"""Drafting with an EAGLE-3 head: what it proposes is what the head says, spelled out, of the features it was
told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft_service.drafters.base import Expansion, FeatureReader
from draft_service.drafters.head import HeadDrafter
from draft_service.mailbox import Tell
from outrider.engine.features import to_bytes
from outrider.engine.heads.loading import load_head
from outrider.protocol.errors import OutOfPages, Overloaded
from outrider.protocol.messages import PromptFeatures, SamplingParams
from outrider.sampling.chooser import SamplingRow, rank
from outrider.sampling.history import History
from tests.heads import PlainHead, build_head
from tests.models import build_model
from tests.unit.draft_service.fakes import Bench, RankCalibration, likeliest, request, verdict

LAYERS = (1, 2)
TEXT = (3, 77, 120, 9, 30, 31, 8, 200)
CHILDREN = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random head and its target."""
    target = build_model("llama", tmp_path_factory.mktemp("target"), vocab_size=300)
    return build_head(tmp_path_factory.mktemp("head")), target


@pytest.fixture(scope="module")
def head(folders):
    """The head as it is served, in float32."""
    return load_head(str(folders[0]), str(folders[1]), dtype="float32", device="cpu", threads=1)


def feature(position: int, layers: int = 2) -> Tensor:
    """[layers, 64] what the target had before the token at a position: some numbers that bfloat16 has."""
    draw = torch.Generator().manual_seed(position)
    return torch.randn(8, 64, generator=draw).to(torch.bfloat16).float()[:layers]


def rows(first: int, stop: int, layers: int = 2) -> bytes:
    """Of the tokens of a range."""
    return to_bytes(torch.stack([feature(position, layers).flatten() for position in range(first, stop)]))


class Rig(Bench):
    """A core over the head, turned by hand, beside the head spelled out."""

    def __init__(self, head, folders, *, max_rows: int = 10_000, nodes: int = 32, **config):
        self.plain = PlainHead(*folders)
        self.drafter = HeadDrafter(
            head, children=CHILDREN, max_nodes=nodes, max_rows=max_rows, context_length=500
        )
        super().__init__(self.drafter, **config)
        self.core.calibration = RankCalibration(0.8, 0.1)

    def tell(self, stream, part: PromptFeatures) -> None:
        """What the target made of a part of the text."""
        self._messages.append(Tell(stream, part))

    def commit(self, stream, tokens, step: int, told: int | None = None) -> None:
        """A verdict with the features of its last tokens."""
        base = self.session(stream).tree.committed_length
        end = base + len(tokens)
        features = rows(end - (len(tokens) if told is None else told), end) if told != 0 else b""
        self.verdict(stream, verdict(base, *tokens, step=step, features=features))
        self.step()

    def expected(self, tokens, path=(), first: int = 1) -> list[int]:
        """The best children below a path, when tokens from `first` on were told: each row of the path takes
        the result of the row above it."""
        told = torch.stack([feature(position).flatten() for position in range(first, len(tokens))])
        features = self.plain.fuse(told)
        text, chain = [*tokens[first:]], features
        hidden, logits = self.plain.chain([*tokens], features, first)
        for node in path:
            text, chain = [*text, node], torch.cat([chain, hidden[None]])
            seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            out, found = self.plain(text, chain, list(range(first, first + len(text))), seen)
            hidden, logits = out[-1], found[-1]
        row = SamplingRow(SamplingParams(), len(tokens) + len(path), 1, History(tokens, []))
        return rank(logits[None], [row], CHILDREN, 1.0, ())[0].tokens


def opened(rig: Rig, tokens=TEXT[:5], layers=LAYERS, **changes):
    """A session of a text, after its first turn."""
    stream, outbox = rig.open(request(tokens, feature_layers=layers, **changes))
    rig.step()
    return stream, outbox


def children(rig: Rig, stream) -> list[int]:
    """Tokens below the root, as they were proposed."""
    return [*rig.session(stream).tree.children]


def test_it_reads_features(head, folders):
    """The core knows it by what it can do."""
    assert isinstance(Rig(head, folders).drafter, FeatureReader)


def test_it_waits_for_what_the_target_makes_of_the_last_token(head, folders):
    """Nothing is expanded before, and nobody waits for the session."""
    rig = Rig(head, folders)
    stream, outbox = opened(rig)
    assert not rig.step()
    assert [block.ready for block in outbox.read()] == [True]
    rig.tell(stream, PromptFeatures(1, rows(1, 4)))
    assert not rig.step()
    assert children(rig, stream) == []


def test_the_tree_is_what_the_head_says_of_the_text(head, folders):
    """Below the root with the target's features, further down with its own."""
    rig = Rig(head, folders, nodes=256)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    rig.run()
    text, levels = [*TEXT[:5], 31], likeliest(rig.session(stream).tree)
    assert len(levels) > 3
    path: list[int] = []
    for level in levels[:4]:
        assert level == rig.expected(text, path)
        path.append(level[0])


def test_a_commit_brings_the_targets_features(head, folders):
    """After a hit the root is expanded once more, with the features that came; the nodes below it stay."""
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    rig.run()
    (first, *_), (second, *_), *_ = likeliest(rig.session(stream).tree)
    below = {
        node.token for node in rig.session(stream).tree.children[first].children[second].children.values()
    }
    rig.commit(stream, [first, second], 2)
    rig.run()
    expected = rig.expected([*TEXT[:5], 31, first, second])
    assert below < set(children(rig, stream)) or below == set(expected)
    assert set(expected) <= set(children(rig, stream))
    assert len(rig.drafter._sequences[stream.id].store) == 7


def test_after_a_miss_the_tree_begins_anew(head, folders):
    """Rows of nodes that were dropped are not seen any more."""
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    rig.run()
    rig.commit(stream, [2], 2)
    rig.run()
    assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:5], 31, 2])
    live = {node.id for node in rig.session(stream).tree.nodes()}
    assert set(rig.drafter._sequences[stream.id].nodes) <= live


def test_without_the_beginning_it_starts_where_features_begin(head, folders):
    """A prompt that was cached has none; neither has what was committed while no draft was wanted."""
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.commit(stream, [31], 1)
    rig.run()
    assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:5], 31], first=5)
    rig.commit(stream, [8, 9], 2, told=0)
    assert not rig.step()
    assert rig.session(stream).waiting
    rig.commit(stream, [7], 3)
    rig.run()
    assert not rig.session(stream).waiting
    assert len(rig.drafter._sequences[stream.id].store) == 2


def test_what_is_known_is_not_read_twice(head, folders):
    """Another verify replica computes the text again and tells it again."""
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    rig.run()
    rig.tell(stream, PromptFeatures(2, rows(2, 6)))
    rig.commit(stream, [2, 4], 2)
    rig.run()
    assert len(rig.drafter._sequences[stream.id].store) == 7
    assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:5], 31, 2, 4])


def test_layers_of_other_heads_are_left_out(head, folders):
    """Where a session tells more layers, the head takes its own."""
    told = {}
    for layers in (LAYERS, (0, 1, 2)):
        rig = Rig(head, folders)
        stream, _ = opened(rig, layers=layers)
        wide = torch.stack([torch.cat([torch.full((64,), 3.0)] * (len(layers) - 2) + [*feature(5)])])
        rig.verdict(stream, verdict(5, 31, features=to_bytes(wide)))
        rig.run()
        told[layers] = likeliest(rig.session(stream).tree)
    assert told[LAYERS] == told[0, 1, 2]


@pytest.mark.parametrize("layers", [(), (1,)])
def test_without_its_layers_it_proposes_what_the_text_repeats(head, folders, layers):
    """Nothing is computed; a lookup goes on."""
    rig = Rig(head, folders)
    stream, _ = opened(rig, (*TEXT, *TEXT), layers=layers)
    rig.verdict(stream, verdict(16, 3, features=bytes(128 * len(layers))))
    assert not rig.step()
    assert children(rig, stream) == [77]


def test_several_sessions_share_a_forward(head, folders):
    """Each sees its own text; long ones are computed in pieces."""
    rig = Rig(head, folders)
    streams = [opened(rig, TEXT[:count])[0] for count in (4, 6, 1)]
    for stream, count in zip(streams, (4, 6, 1), strict=True):
        if count > 1:
            rig.tell(stream, PromptFeatures(1, rows(1, count)))
        rig.verdict(stream, verdict(count, 31, features=rows(count, count + 1)))
    rig.run()
    for stream, count in zip(streams, (4, 6, 1), strict=True):
        assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:count], 31])


def test_a_long_text_is_read_in_pieces(head, folders, monkeypatch):
    """No forward takes more rows than the chunk, and the root is answered at the end."""
    monkeypatch.setattr("draft_service.drafters.head.PREFILL_CHUNK", 2)
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    assert len(rig.drafter._sequences[stream.id].store) == 2
    rig.run()
    assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:5], 31])


def test_a_long_text_holds_nobody_up(head, folders, monkeypatch):
    """A younger session's rows are read while an older one has more than the chunk."""
    monkeypatch.setattr("draft_service.drafters.head.PREFILL_CHUNK", 4)
    rig = Rig(head, folders)
    streams = [opened(rig)[0] for _ in range(2)]
    for stream, stop in zip(streams, (5, 2), strict=True):
        rig.drafter.tell(stream.id, rows(1, stop), 1)
    told = [rig.drafter._sequences[stream.id].told for stream in streams]
    rig.drafter.expand([Expansion(stream.id, None) for stream in streams])
    assert [sum(len(each) for _, each in waiting) for waiting in told] == [1, 0]


def test_memory_is_bounded(head, folders):
    """A full drafter takes no session; one that runs over suspends a session, which goes on with its next
    verdict."""
    rig = Rig(head, folders, max_rows=40)
    stream, _ = opened(rig)
    rig.tell(stream, PromptFeatures(1, rows(1, 5)))
    rig.commit(stream, [31], 1)
    rig.run()
    _, refused = opened(rig, TEXT)
    assert refused.error is None
    drafter = HeadDrafter(head, children=3, max_nodes=32, max_rows=31, context_length=500)
    with pytest.raises(Overloaded):
        drafter.open(1, request(TEXT))
    rig.drafter._max_rows = 4
    with pytest.raises(OutOfPages):
        rig.drafter.expand([])
    rig.commit(stream, [2], 2)
    rig.run()
    assert rig.session(stream).suspended
    assert rig.drafter.pages().used == 0
    rig.drafter._max_rows = 100
    rig.commit(stream, [4], 3)
    rig.run()
    assert likeliest(rig.session(stream).tree)[0] == rig.expected([*TEXT[:5], 31, 2, 4], first=7)


def test_nothing_is_left_of_a_closed_session(head, folders):
    """Its rows are gone."""
    rig = Rig(head, folders)
    stream, _ = opened(rig)
    rig.commit(stream, [31], 1)
    rig.run()
    assert rig.drafter.pages().used == 1
    rig.close(stream)
    rig.step()
    assert rig.drafter.pages().used == 0
