"""Measures how floods slow down a small request of another caller: the figures of docs/faults.md.

    python -m scripts.attack                                all attacks, 15 seconds each
    python -m scripts.attack --seconds 30 --only "n = 16, long" "texts of 3.6 MB"

Starts an orchestrator, a verify and a draft service on the demo pair, with a bearer token for each caller.
The exit status is 1 if a small request was lost.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path

from benchmarks import machine
from scripts.console import new_parser, progress, run
from tests.faults.harness.attacks import NAMES
from tests.faults.harness.bystander import HEADER, Felt, feel
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster


def main() -> int:
    """Attack and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="ATTACK", help=str(NAMES))
    flags = parser.parse_args()
    print(machine.lines(machine.describe()), HEADER, sep="\n\n", flush=True)
    lost = []
    for attack in flags.only:
        progress(attack)
        with tempfile.TemporaryDirectory() as folder:
            felt = attacked(attack, flags.seconds, Path(folder))
        print(felt.row(), flush=True)
        lost += [f"{attack}: {one}" for one in felt.lost]
    for one in lost:
        progress(one)
    return 1 if lost else 0


def attacked(attack: str, seconds: float, folder: Path) -> Felt:
    """One attack on services of its own."""
    tokens = secrets.token_hex(16), secrets.token_hex(16)
    known = folder / "tokens"
    known.write_text("\n".join(tokens) + "\n")
    cluster = Cluster(folder, {"OMP_NUM_THREADS": "1"})
    try:
        verify = cluster.serve("verify", model=DEMO_TARGET, dtype="float32", device="cpu")
        draft = cluster.serve("draft", model=DEMO_DRAFT, dtype="float32", device="cpu")
        endpoints = {"verify": verify.wait_ready().endpoint, "draft": draft.wait_ready().endpoint}
        orchestrator = cluster.serve("orchestrator", auth_tokens_file=known, **endpoints).wait_ready()
        return asyncio.run(feel(attack, orchestrator.endpoint, orchestrator.pid, seconds, tokens))
    finally:
        cluster.stop()


if __name__ == "__main__":
    run(main)
