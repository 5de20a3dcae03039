"""Measures the services on one GPU: `outrider up` with an 8B-shaped target and a draft of its first layers.

    python -m benchmarks.gpu_services --out out/gpu_services.json

Nothing is downloaded: the target of `benchmarks.gpu_pair` (random weights, agreement set to 0.8) is written
to a folder in memory and served, with all modes in turn. `--deterministic` also compares their tokens.
`--shape tiny --device cpu` tries the script.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.arms.own import MODES
from benchmarks.gpu_pair import DRAFT_LAYERS, llama, make_agree, random_model
from outrider.client import Client
from outrider.client.request import Mode
from outrider.engine.loading.model_config import find_device
from scripts import console
from scripts.child import Child

START_SECONDS = 240.0
PROMPT = 100


@dataclass
class Run:
    """Requests of one mode, running together."""

    mode: str
    temperature: float
    concurrency: int
    tokens_per_second: float
    tokens_per_step: float
    tokens: list[list[int]]


def write_target(folder: Path, shape: str, device: torch.device, dtype: torch.dtype) -> tuple[str, float]:
    """Write the target; returns the layers that its draft skips, and the share of positions at which they
    agree."""
    target = random_model(llama(shape), device, dtype)
    layers = target.config.num_hidden_layers
    kept = min(DRAFT_LAYERS, layers // 2)
    share = make_agree(target, kept)
    alphabet = {letter: token for token, letter in enumerate(sorted(ByteLevel.alphabet()))}
    bytes_only = Tokenizer(BPE(alphabet, []))
    bytes_only.pre_tokenizer, bytes_only.decoder = ByteLevel(add_prefix_space=False), Decoder()
    target.generation_config.pad_token_id = 0
    target.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return f"{kept}-{layers - 1}", share


def measure(client: Client, mode: Mode, temperature: float, concurrency: int, tokens: int) -> Run:
    """Send `concurrency` requests at once, each with its own prompt."""

    def request(number: int) -> tuple[list[int], int]:
        draw = torch.Generator().manual_seed(number)
        prompt = torch.randint(5, 400, (PROMPT,), generator=draw).tolist()
        result = client.generate(
            prompt, mode=mode, temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True
        )
        return list(result.token_ids), int(result.generations[0].end.speculation["steps"])

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        found = list(pool.map(request, range(concurrency)))
    seconds = time.perf_counter() - started
    made = sum(len(each) for each, _ in found)
    steps = sum(steps for _, steps in found) or made
    return Run(mode, temperature, concurrency, made / seconds, made / steps, [each for each, _ in found])


def compare(client: Client, tokens: int, rounds: int, way: str) -> list[Run]:
    """Run all modes in turn; prints a line for each setting, which begins with `way`."""
    runs: list[Run] = []
    for mode in MODES:
        measure(client, mode, 0.0, 1, tokens)  # warm-up
    for temperature in (0.0, 1.0):
        for concurrency in (1, 8):
            found = [
                measure(client, mode, temperature, concurrency, tokens)
                for _ in range(rounds)
                for mode in MODES
            ]
            runs.extend(found)
            print(f"{way}, T = {temperature:g}, {concurrency} at once: {_row(found)}", flush=True)
    return runs


def _row(found: list[Run]) -> str:
    parts = []
    for mode in MODES:
        mine = [run for run in found if run.mode == mode]
        rate = statistics.median(run.tokens_per_second for run in mine)
        same = sum(
            a == b
            for run in mine
            for ours, plain in zip(run.tokens, found[0].tokens, strict=True)
            for a, b in zip(ours, plain, strict=True)
        )
        whole = sum(map(len, found[0].tokens)) * len(mine)
        length = statistics.median(run.tokens_per_step for run in mine)
        parts.append(f"{mode} {rate:.1f} tokens/s, {length:.2f} a step, {same} of {whole} as the first")
    return "; ".join(parts)


def served(folder: str, skipped: str, flags: Namespace, dtype: str, way: str) -> list[Run]:
    """Serve the target in a folder with its draft, deterministic or not, and measure."""
    models = ["--target", folder, "--draft", folder, "--draft-skip-layers", skipped]
    models += ["--context-length", "4096"]
    places = ["--dtype", dtype, "--device", flags.device, "--port", "0", "--http-port", "-1"]
    more = ["--deterministic"] if way == "deterministic" else []
    command = [sys.executable, "-m", "outrider", "up", *models, *places, *more]
    started = time.monotonic()
    with Child(command, flags.out.with_name(f"services-{way}.log")) as up:
        endpoint = up.receive(START_SECONDS)["endpoint"]
        print(f"{way}: ready after {time.monotonic() - started:.1f} s", flush=True)
        with Client(endpoint) as client:
            return compare(client, flags.tokens, flags.rounds, way)


def main() -> int:
    """Write the target, serve it, measure."""
    parser = console.new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_services.json"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", default="8b", choices=("8b", "tiny"))
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the models are written")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="serve a second time, deterministic")
    flags = parser.parse_args()
    device = find_device(flags.device)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    runs: dict[str, list[Run]] = {}
    with TemporaryDirectory(dir=flags.folder) as folder:
        started = time.monotonic()
        skipped, share = write_target(Path(folder), flags.shape, device, getattr(torch, dtype))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the services need the memory
        print(f"pair agrees at {share:.3f}; written in {time.monotonic() - started:.1f} s", flush=True)
        for way in ["default", "deterministic"][: 1 + flags.deterministic]:
            runs[way] = served(folder, skipped, flags, dtype, way)
            flags.out.write_text(
                json.dumps({name: [asdict(run) for run in each] for name, each in runs.items()})
            )
    return 0


if __name__ == "__main__":
    console.run(main)
