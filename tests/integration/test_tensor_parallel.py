"""A target in several processes: it computes what one process does, and lives and dies as one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.cores import allowed_cores
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.parallel.leader import Group, load_parallel
from outrider.engine.parallel.ranks import MAX_WAIT_SECONDS, Ranks
from outrider.engine.parallel.shard import Shard
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import LostRank, ModelError
from tests.integration.client import (
    AUTO,
    OFF,
    SAMPLER_SWEEP,
    SAMPLERS,
    SEQUENTIAL,
    Client,
    Generation,
    collect,
    eventually,
    request,
    verify_info,
)
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster
from tests.integration.reference import assert_same
from tests.models import build_model
from tests.unit.engine.parallel.conftest import settings

TOKENS = 32
TOKEN_IDS = [5, 9, 200, 17, 44, 120]
CROWD, LONG = 6, [(7 * place + 3) % 300 for place in range(100)]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def followers(pid: int) -> list[int]:
    """The ranks that a process has started."""
    return [
        child
        for child in children(pid)
        if b"parallel.follower" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def gone(pid: int) -> bool:
    """The process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target."""
    return build_model("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, ranks: int, **options: Any) -> tuple[ModelRunner, Group]:
    """Rank 0 here, the others as processes."""
    return load_parallel(settings(folder, ranks, kv_tokens=1024), say=lambda _: None, **options)


def forward(runner: ModelRunner) -> torch.Tensor:
    """[6, V] logits of a short text."""
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, TOKEN_IDS, None, range(len(TOKEN_IDS)))])
    runner.commit(kv, range(len(TOKEN_IDS)), TOKEN_IDS)
    kv.release()
    return logits


def forward_many(runner: ModelRunner) -> torch.Tensor:
    """[CROWD * 100, V] logits of a step that is too long to be sent at once."""
    sequences = [SequenceKv.open(runner.pool, []) for _ in range(CROWD)]
    return runner.forward([Segment(kv, LONG, None, range(len(LONG))) for kv in sequences])


@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [("llama", 2), pytest.param("llama", 4, marks=pytest.mark.slow), ("qwen3_moe", 4)],
)
def test_processes_compute_what_one_does(tmp_path: Path, architecture: str, ranks: int) -> None:
    """Logits are those of transformers but for rounding, twice the same bits, and closing ends all."""
    folder = build_model(architecture, tmp_path)
    runner, _ = load(folder, ranks)
    started = followers(os.getpid())
    assert len(started) == ranks - 1
    try:
        logits = forward(runner)
        again = forward(runner)
        crowd = forward_many(runner)
    finally:
        runner.close()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([TOKEN_IDS]), use_cache=False).logits[0]
        crowded = plain(torch.tensor([LONG]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, again)
    torch.testing.assert_close(crowd, crowded.repeat(CROWD, 1), rtol=1e-4, atol=1e-4)
    assert all(map(gone, started))


def test_weights_of_nan_are_noticed_at_start(folder: Path, tmp_path: Path) -> None:
    """As in one process: the small model of the check has other weights, so the first request failed."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 90] = torch.nan  # in the part of the last rank
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"logits of LlamaForCausalLM in torch\.float32 are NaN or infinite"):
        load(tmp_path / "model", 2)
    assert not followers(os.getpid())


def test_a_rank_that_hangs_or_dies_is_noticed(folder: Path) -> None:
    """A step that waits for a stopped rank fails in bounded time; when it is killed, somebody is told."""
    runner, group = load(folder, 2, seconds=10.0)
    (follower,) = followers(os.getpid())
    told: list[str] = []
    group.watch(told.append)
    try:
        forward(runner)
        os.kill(follower, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(LostRank, match="gone or hangs"):
            forward(runner)
        assert time.monotonic() - begun < 30.0
        os.kill(follower, signal.SIGKILL)
        eventually(lambda: bool(told), "the loss is told")
        assert "rank 1 was ended by signal 9" in told[0]
    finally:
        runner.close()


def test_a_rank_that_cannot_load_ends_the_start(folder: Path) -> None:
    """Rank 0 does not wait for one that is gone."""
    config = settings(folder, 2, cpus="0")
    import outrider.engine.parallel.processes as processes

    module, processes.MODULE = processes.MODULE, "outrider.engine.parallel.no_such_module"
    try:
        with pytest.raises(LostRank, match="rank 1 ended with status 1"):
            load_parallel(config, say=lambda _: None)
    finally:
        processes.MODULE = module
    assert not followers(os.getpid())


def test_an_error_of_rank_0_alone_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told while the others load, and nobody waits for them to listen."""
    failed: list[float] = []

    def whole(self: Shard, ranks: Ranks) -> LoadedModel:
        failed.append(time.monotonic())
        raise ModelError("no memory for the weights")

    monkeypatch.setattr(Shard, "whole", whole)
    with pytest.raises(ModelError, match="no memory for the weights"):
        load(folder, 2)
    assert time.monotonic() - failed[0] < MAX_WAIT_SECONDS / 2
    assert not followers(os.getpid())


class Services:
    """A target in two ranks, the same in one process, and an orchestrator of each and of both."""

    def __init__(self, cluster: Cluster) -> None:
        common = {"model": DEMO_TARGET, "dtype": "float32", "device": "cpu"}
        self.cluster = cluster
        ranks = cluster.serve("verify", name="in-ranks", tensor_parallel=2, **common)
        whole = cluster.serve("verify", name="whole", **common)
        draft = cluster.serve("draft", model=DEMO_DRAFT, dtype="float32", device="cpu")
        self.ranks, self.whole, self.draft = (one.wait_ready() for one in (ranks, whole, draft))
        self.alone = self._client(self.ranks.endpoint)
        self.both = self._client((self.ranks.endpoint, self.whole.endpoint))

    def _client(self, verify: Any) -> Client:
        process = self.cluster.serve(
            "orchestrator", verify=verify, draft=self.draft.endpoint, discovery_seconds=0.2
        ).wait_ready()
        client = Client(process.endpoint)
        eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
        return client


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Processes of this module."""
    cluster = Cluster(tmp_path_factory.mktemp("ranks"))
    yield Services(cluster)
    cluster.stop()


@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_all_modes_say_the_same(services: Services, reference: Any, prompts: Any, sampler: str) -> None:
    """Greedy equals transformers; speculation equals no speculation, alone and four at once."""
    chosen = prompts(4)
    options = {"max_tokens": TOKENS, **SAMPLERS[sampler]}
    expected = [one.tokens for one in services.alone.generate_all(chosen, 1, mode=OFF, **options)]
    if sampler == "greedy":
        for prompt, tokens in zip(chosen, expected, strict=True):
            assert_same(reference, prompt, reference.greedy(prompt, TOKENS), tokens)
    for mode in (SEQUENTIAL, AUTO):
        together = services.alone.generate_all(chosen, 4, mode=mode, **options)
        for prompt, tokens, one in zip(chosen, expected, together, strict=True):
            assert_same(reference, prompt, tokens, one.tokens)
        assert sum(one.statistics.accepted for one in together) > 0


def test_what_it_serves_says_so(services: Services) -> None:
    """The arithmetic names the ranks: its bits are others than one process's."""
    assert verify_info(services.ranks.endpoint).arithmetic.endswith("in 2 ranks")
    assert (
        verify_info(services.whole.endpoint).vocabulary_hash
        == verify_info(services.ranks.endpoint).vocabulary_hash
    )


def test_a_killed_rank_ends_its_replica_and_costs_no_token(
    services: Services, reference: Any, prompts: Any
) -> None:
    """A request moves to another replica; the broken one ends with a status and says why."""
    both = prompts(6)[4:]  # they share no prefix, so each replica gets one
    options = {"max_tokens": 600, "mode": AUTO}
    expected = [services.alone.generate(prompt, **options).tokens for prompt in both]
    (follower,) = followers(services.ranks.pid)

    def broken(number: int) -> Generation:
        responses = []
        for response in services.both.stream(request(both[number], **options)):
            responses.append(response)
            if number == 0 and len(responses) == 3:
                eventually(lambda: verify_info(services.ranks.endpoint).sessions > 0, "the ranks have one")
                os.kill(follower, signal.SIGKILL)
        return collect(responses)[0]

    with ThreadPoolExecutor(2) as pool:
        generations = list(pool.map(broken, range(2)))
    for prompt, tokens, generation in zip(both, expected, generations, strict=True):
        assert_same(reference, prompt, tokens, generation.tokens)
    assert sum(one.statistics.verify_losses for one in generations) > 0
    assert services.ranks.wait() == 1
    assert "rank 1 was ended by signal 9" in services.ranks.tail() or "gone or hangs" in services.ranks.tail()


def test_no_rank_outlives_its_replica(own_cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """SIGTERM drains and ends all with status 0; an idle replica notices the loss of a rank; a rank ends with
    a killed rank 0, and no temporary folder is left."""
    own_cluster.environment["TMPDIR"] = str(tmp_path)
    settings = {"model": folder, "dtype": "float32", "device": "cpu", "tensor_parallel": 2}
    started = [own_cluster.serve("verify", name=f"ranks-{i}", **settings) for i in range(3)]
    drained, broken, killed = (process.wait_ready() for process in started)
    ranks = [rank for process in started for rank in followers(process.pid)]
    assert len(ranks) == 3
    drained.signal(signal.SIGTERM)
    os.kill(ranks[1], signal.SIGKILL)
    killed.kill()
    assert drained.wait() == 0
    assert broken.wait() == 1
    assert "rank 1 was ended by signal 9" in broken.tail()
    eventually(lambda: all(map(gone, ranks)), "all ranks have ended")
    assert not list(tmp_path.glob("outrider-*"))


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="two cores are needed")
def test_each_rank_has_a_part_of_the_cores(own_cluster: Cluster, folder: Path) -> None:
    """The replica is given two cores, and no rank waits for another one's."""
    cores = allowed_cores()[:2]
    process = own_cluster.serve(
        "verify", model=folder, dtype="float32", tensor_parallel=2, cpus=",".join(map(str, cores))
    ).wait_ready()
    ranks = [process.pid, *followers(process.pid)]
    assert [os.sched_getaffinity(rank) for rank in ranks] == [{core} for core in cores]


def started_alone(folder: Path, listening: socket.socket) -> dict[str, Any]:
    """Settings of ranks as on several machines, which meet where a socket is bound."""
    listening.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    return {
        "model": folder,
        "dtype": "float32",
        "tensor_parallel": 2,
        "tensor_parallel_address": address,
    }


def test_ranks_may_be_started_one_by_one(own_cluster: Cluster, folder: Path) -> None:
    """As on several machines: they meet at rank 0's address, compute, and end together."""
    with socket.socket() as free:
        settings = started_alone(folder, free)
    second = own_cluster.serve("verify", tensor_parallel_rank=1, **settings)
    first = own_cluster.serve("verify", **settings).wait_ready()
    assert not followers(first.pid)
    second.signal(signal.SIGTERM)  # a whole group is told to end: rank 0 drains first
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert second.wait() == 0


def test_a_rank_that_waits_for_rank_0_ends_when_it_is_told_to(own_cluster: Cluster, folder: Path) -> None:
    """Else it would join the rank 0 that comes next, in place of the rank that comes with it."""
    with socket.socket() as silent:
        silent.settimeout(60)
        settings = started_alone(folder, silent)
        silent.listen()
        waiting = own_cluster.serve("verify", tensor_parallel_rank=1, **settings)
        silent.accept()
        waiting.signal(signal.SIGTERM)
        assert waiting.wait() == -signal.SIGTERM


def test_ranks_of_different_models_do_not_serve(own_cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """Both end with a sentence that says so, before they load their parts."""
    with socket.socket() as free:
        settings = started_alone(folder, free)
    other = build_model("llama", tmp_path / "other", seed=9)
    ranks = [
        own_cluster.serve("verify", tensor_parallel_rank=1, **settings | {"model": other}),
        own_cluster.serve("verify", **settings),
    ]
    for rank in ranks:
        assert rank.wait() != 0
        assert "rank 1 has another model" in rank.tail()
