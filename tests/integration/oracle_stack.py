"""A target with a draft that is right three times out of four, and what every mode must say there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration import fake_drafts
from tests.integration.client import AUTO, OFF, SAMPLERS, SEQUENTIAL, Client, eventually, verify_info
from tests.integration.cluster import Cluster
from tests.integration.oracle_draft import OracleDraft
from tests.integration.reference import Reference, assert_same


@dataclass
class Stack:
    """Verify service and orchestrator of one target, the draft, and `transformers` with the same weights."""

    client: Client
    reference: Reference
    oracle: OracleDraft


@contextmanager
def stack_of(folder: Path, reference: Reference, logs: Path, **settings: object) -> Iterator[Stack]:
    """Serve a target with these settings until the block ends."""
    cluster = Cluster(logs)
    settings = {"model": folder, "dtype": "float32", "kv_tokens": 8192, **settings}
    verify = cluster.serve("verify", **settings).wait_ready()
    oracle = OracleDraft(verify_info(verify.endpoint))
    server, endpoint = fake_drafts.serve(oracle)
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint, draft=endpoint).wait_ready()
    yield Stack(Client(orchestrator.endpoint), reference, oracle)
    cluster.stop()
    server.stop(None)


def check_modes(stack: Stack, prompts: list[list[int]], sampler: str, tokens: int) -> None:
    """Greedy equals `transformers`; speculation equals no speculation, greedy and sampled."""
    options = {"max_tokens": tokens, **SAMPLERS[sampler]}
    expected = [found.tokens for found in stack.client.generate_all(prompts, 4, mode=OFF, **options)]
    if sampler == "greedy":
        for prompt, said in zip(prompts, expected, strict=True):
            assert_same(stack.reference, prompt, stack.reference.greedy(prompt, tokens), said)
    stack.oracle.learn(prompts, expected)

    def accepted(mode: int) -> int:
        """Tokens of the oracle that the target took; every text has to be right."""
        together = stack.client.generate_all(prompts, 4, mode=mode, **options)
        for prompt, said, found in zip(prompts, expected, together, strict=True):
            assert_same(stack.reference, prompt, said, found.tokens)
        return sum(found.statistics.accepted for found in together)

    accepted(AUTO)  # a pipelined step of these tiny targets does not wait for an oracle in Python
    # on a busy machine a text may be at its end before its draft has opened
    eventually(lambda: accepted(SEQUENTIAL) > len(prompts), "the oracle's right tokens are accepted")
