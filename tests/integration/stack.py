"""The demo pair as services: one set of processes for the whole run, for each takes seconds to load torch."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration import fake_drafts
from tests.integration.client import Client, eventually, verify_info
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process
from tests.integration.hostile_draft import HostileDraft

DRAFTS = ("real", "random", "lookup", "hostile", "none")


class DemoStack:
    """The demo target behind one orchestrator per kind of draft; everything starts on first use."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._verify: Process | None = None
        self._drafts: dict[str, str] = {}
        self._orchestrators: dict[str, Process] = {}
        self._clients: dict[str, Client] = {}
        self.hostile: HostileDraft | None = None

    @property
    def verify(self) -> Process:
        """The verify replica, in float32 and with two threads."""
        if self._verify is None:
            settings = {"model": DEMO_TARGET, "dtype": "float32", "name": "verify-demo", "threads": 2}
            self._verify = self.cluster.serve("verify", max_sessions=32, **settings).wait_ready()
        return self._verify

    def draft(self, kind: str) -> str:
        """Endpoint of a draft replica of a kind."""
        if kind not in self._drafts:
            self._drafts[kind] = self._start_draft(kind)
        return self._drafts[kind]

    def orchestrator(self, kind: str) -> Process:
        """The orchestrator that uses drafts of a kind."""
        if kind not in self._orchestrators:
            settings: dict[str, object] = {"verify": self.verify.endpoint, "name": f"orchestrator-{kind}"}
            if kind != "none":
                settings["draft"] = self.draft(kind)
            if kind == "hostile":  # a refused attack must not keep the next one out
                settings |= {
                    "breaker_failures": 1_000_000,
                    "breaker_seconds": 0.001,
                    "draft_open_timeout_ms": 200,
                }
            process = self.cluster.serve("orchestrator", **settings).wait_ready()
            drafts = 0 if kind == "none" else 1
            client = Client(process.endpoint)
            eventually(lambda: client.info().draft_replicas == drafts, f"{drafts} draft replicas are known")
            self._orchestrators[kind], self._clients[kind] = process, client
        return self._orchestrators[kind]

    def client(self, kind: str = "real") -> Client:
        """A client of the orchestrator that uses drafts of a kind."""
        self.orchestrator(kind)
        return self._clients[kind]

    def _start_draft(self, kind: str) -> str:
        if kind == "hostile":
            self.hostile = HostileDraft(verify_info(self.verify.endpoint))
            self._server, endpoint = fake_drafts.serve(self.hostile)
            return endpoint
        settings: dict[str, object] = {"name": f"draft-{kind}"}
        if kind == "lookup":
            settings |= {"kind": "lookup", "tokenizer": DEMO_TARGET}
        else:
            model = DEMO_DRAFT if kind == "real" else random_copy(DEMO_DRAFT, self.folder / "random-draft")
            settings |= {"model": model, "dtype": "float32"}
        return self.cluster.serve("draft", **settings).wait_ready().endpoint


def random_copy(source: Path, folder: Path) -> Path:
    """A model of the same shape and vocabulary with random weights."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).save_pretrained(
        folder
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder
