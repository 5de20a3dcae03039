"""Where the time of a step goes, in each of the three services under load.

    .venv/bin/pip install py-spy
    python -m scripts.profile_services --seconds 10 --clients 4 --out out/profile

Starts `outrider up` on the demo pair with its target widened, keeps it busy, and samples each process with
py-spy, which must be allowed to look into other processes (root, or `kernel.yama.ptrace_scope` 0). Prints the
functions that most samples ended in, and writes a flame graph of each service.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from outrider.client import Client
from scripts.console import progress, run
from scripts.local_services import services, widened_target

SERVICES = ("orchestrator", "draft", "verify")
SHOWN = 12
"""Functions of each service that are printed."""
PROMPT = "def add(a, b):"


def main() -> int:
    """Start, load, sample, print."""
    flags = parse()
    if shutil.which("py-spy") is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    flags.out.mkdir(parents=True, exist_ok=True)
    stop = Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        services(widened_target(), "bfloat16", Path(folder) / "up.log") as ready,
        ThreadPoolExecutor(flags.clients) as clients,
    ):
        for seed in range(flags.clients):
            clients.submit(keep_busy, ready["endpoint"], flags.temperature, seed, stop)
        try:
            for service in SERVICES:
                progress(f"sampling the {service} for {flags.seconds} s")
                print(table(service, sample(service, flags.seconds, flags.out)))
        finally:
            stop.set()
    print(f"Flame graphs: {flags.out}")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=10, help="of each service (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="requests at once (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/profile"), help="folder (default: %(default)s)")
    return parser.parse_args()


def keep_busy(endpoint: str, temperature: float, seed: int, stop: Event) -> None:
    """One request after the other until told to stop."""
    with Client(endpoint, timeout=120) as client:
        while not stop.is_set():
            client.generate(PROMPT, max_tokens=128, temperature=temperature, seed=seed)


def sample(service: str, seconds: int, folder: Path) -> list[str]:
    """Collapsed stacks of a service's process, `frame;frame count`; also writes its flame graph.

    Raises:
        SystemExit: py-spy may not look into the process, or there is none.
    """
    pid = process_of(service)
    stacks, picture = folder / f"{service}.txt", folder / f"{service}.svg"
    for kind, path in (("raw", stacks), ("flamegraph", picture)):
        flags = ["--pid", pid, "--duration", str(seconds), "--format", kind, "-o", str(path)]
        done = subprocess.run(["py-spy", "record", *flags], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"py-spy could not sample the {service}: {done.stderr.strip().splitlines()[-1]}")
    return stacks.read_text(encoding="utf-8").splitlines()


def process_of(service: str) -> str:
    """The id of the newest process that serves."""
    command = ["pgrep", "--newest", "--full", f"outrider serve {service}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"there is no process of the {service}")
    return done.stdout.strip()


def table(service: str, stacks: Iterable[str]) -> str:
    """The functions in which most samples ended, as shares of all samples."""
    ended: Counter[str] = Counter()
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        ended[frames.rpartition(";")[2]] += int(count)
    return "\n".join([f"\n{service}", *_rows(ended.most_common(SHOWN), sum(ended.values()))])


def _rows(shares: Sequence[tuple[str, int]], total: int) -> list[str]:
    return [f"  {count / total:6.1%}  {frame}" for frame, count in shares]


if __name__ == "__main__":
    run(main)
