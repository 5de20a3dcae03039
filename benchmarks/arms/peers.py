"""Starts the peers that the flags name: their processes run on the same cores, and live over the run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.arms.base import PEER, REFERENCE, Arm
from benchmarks.arms.llama import LlamaArm, free_port, server_command
from benchmarks.arms.worker import WorkerArm, engine_of
from benchmarks.pairs import Pair
from scripts.child import ROOT, Child
from scripts.console import progress

HF_DEFAULTS = -1
"""Stands for as many tokens as `transformers` drafts by default."""
VLLM_DRAFTS = ("draft", "ngram")
MIN_CONTEXT = 1024
GGUF = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
ROUNDED_GGUF = {"int8": "q8_0"}
"""The format that llama.cpp's converter makes of a target with these weights; others are given as a file."""
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the peers."""
    group = parser.add_argument_group("peers; see docs/benchmarks.md")
    group.add_argument(
        "--no-hf", action="store_true", help="leave out transformers, and with it the reference"
    )
    group.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python that has vLLM's CPU build")
    group.add_argument(
        "--vllm-path", default="", metavar="FOLDER", help="PYTHONPATH of vLLM, as for zentorch"
    )
    group.add_argument(
        "--vllm-drafts",
        nargs="*",
        choices=VLLM_DRAFTS,
        default=VLLM_DRAFTS,
        help="an arm for each, beside the plain one",
    )
    group.add_argument("--llama", type=Path, metavar="SERVER", help="llama-server")
    group.add_argument("--llama-source", type=Path, metavar="FOLDER", help="its sources, to convert the pair")
    group.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PYTHON",
        help="for the conversion; has sentencepiece",
    )
    group.add_argument(
        "--draft-tokens",
        type=int,
        nargs="*",
        default=[5],
        help="tokens that peers draft: an arm for each, beside the plain one",
    )
    group.add_argument("--target-gguf", type=Path, metavar="FILE", help="instead of converting")
    group.add_argument("--draft-gguf", type=Path, metavar="FILE")
    group.add_argument(
        "--peer-threads", type=int, nargs="+", default=[2], help="each peer with so many threads"
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """The flags, models and cores that all peers of a run share."""

    flags: argparse.Namespace
    pair: Pair
    cores: tuple[int, ...]
    """The first is the target's."""
    folder: Path
    """For logs and converted models."""
    sequences: int
    """Most prompts at once."""

    @property
    def context(self) -> int:
        """The tokens of a sequence: of the longest prompt, its answer, and the drafts after it."""
        longest: int = self.flags.prompt_tokens + self.flags.tokens
        return max(MIN_CONTEXT, longest + 64)

    def cpus(self, threads: int) -> str:
        """The cores of a peer with `threads` threads, as a list."""
        return ",".join(map(str, self.cores[:threads]))

    def child(self, name: str, command: list[str], threads: int, **environment: str) -> Child:
        """Start a peer's process."""
        idle = {"KMP_BLOCKTIME": "5", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        log = self.folder / f"{name.replace(' ', '-')}.log"
        return Child(command, log, cpus=self.cpus(threads), environment={**idle, **environment})


def peers(setting: Setting, stack: ExitStack) -> Iterator[Arm]:
    """Start the peers that the flags name, one after another."""
    flags = setting.flags
    if not flags.no_hf:
        yield from _hf(setting, stack)
    if flags.vllm and setting.pair.weights != "full":
        raise SystemExit("--weights: vLLM here runs the target in 16 bits; leave --vllm out")
    for threads in flags.peer_threads if flags.vllm else ():
        for kind, tokens in (("", 0), *product(flags.vllm_drafts, flags.draft_tokens)):
            progress(f"starting vLLM {kind or 'plain'} with {threads} threads (it compiles first)")
            yield _vllm(setting, stack, kind, tokens, threads)
    models = _gguf_models(setting) if flags.llama else None
    for threads in flags.peer_threads if models else ():
        assert models is not None
        progress(f"starting llama.cpp with {threads} threads")
        for tokens in (0, *flags.draft_tokens):
            yield _llama(setting, stack, models, tokens, threads)


def _hf(setting: Setting, stack: ExitStack) -> Iterator[Arm]:
    """Start one process for all arms: the number of threads may change from request to request."""
    pair = setting.pair
    command = [sys.executable, "-m", "benchmarks.workers.hf", "--target", str(pair.target)]
    command += ["--draft", str(pair.draft), "--dtype", pair.dtype, "--weights", pair.weights]
    worker = stack.enter_context(setting.child("hf", command, max(setting.flags.peer_threads)))
    engine = engine_of(worker.receive())
    for threads in setting.flags.peer_threads:
        for tokens, name in _hf_kinds(setting.flags.draft_tokens):
            yield WorkerArm(
                f"HF {name} {threads}t",
                worker,
                devices=threads,
                speculates=tokens != 0,
                engine=engine,
                kind=PEER if tokens else REFERENCE,
                options={"threads": threads, "assistant_tokens": tokens},
                largest=1 if tokens else 0,  # transformers assists one sequence at a time
            )


def _hf_kinds(draft_tokens: Sequence[int]) -> list[tuple[int, str]]:
    """The numbers of tokens to draft, each with its name in tables."""
    given = [(tokens, f"assisted K={tokens}") for tokens in draft_tokens]
    return [(0, "generate"), (HF_DEFAULTS, "assisted"), *given]


def _vllm(setting: Setting, stack: ExitStack, kind: str, tokens: int, threads: int) -> Arm:
    flags, pair = setting.flags, setting.pair
    name = f"vLLM {f'{kind} K={tokens}' if kind else 'plain'} {threads}t"
    command = [str(flags.vllm), "-m", "benchmarks.workers.vllm", "--target", str(pair.target)]
    command += ["--dtype", pair.dtype, "--sequences", str(setting.sequences)]
    command += ["--context", str(setting.context)]
    if kind:
        command += ["--draft", str(pair.draft) if kind == "draft" else kind]
        command += ["--assistant-tokens", str(tokens)]
    environment = _vllm_environment(flags, setting.cores[:threads])
    worker = stack.enter_context(setting.child(name, command, threads, **environment))
    engine = engine_of(worker.receive())
    return WorkerArm(name, worker, devices=threads, speculates=kind == "draft", engine=engine)


def _vllm_environment(flags: argparse.Namespace, cores: tuple[int, ...]) -> dict[str, str]:
    """The environment that vLLM's page on CPUs asks for: Intel's OpenMP and tcmalloc loaded first, threads
    bound to cores."""
    preload = [flags.vllm.parent.parent / "lib/libiomp5.so", TCMALLOC]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [flags.vllm_path, str(ROOT)])),
        "LD_PRELOAD": os.pathsep.join(str(path) for path in preload if path.exists()),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _gguf_models(setting: Setting) -> tuple[Path, Path]:
    """Target and draft as given, or converted once."""
    flags, pair = setting.flags, setting.pair
    plain = GGUF[pair.dtype]
    kind = plain if pair.weights == "full" else ROUNDED_GGUF.get(pair.weights)
    if flags.target_gguf is None and kind is None:
        raise SystemExit(f"--weights {pair.weights} needs --target-gguf; see docs/benchmarks.md")
    target = flags.target_gguf or _converted(setting, pair.target, str(kind))
    return target, flags.draft_gguf or _converted(setting, pair.draft, plain)


def _converted(setting: Setting, model: Path, kind: str) -> Path:
    output = setting.folder / f"{model.parent.name}-{model.name}-{kind}.gguf"
    if not output.exists():
        if setting.flags.llama_source is None:
            raise SystemExit("--llama needs --llama-source, or --target-gguf and --draft-gguf")
        command = [
            setting.flags.llama_python,
            "-m",
            "benchmarks.workers.gguf",
            str(setting.flags.llama_source),
        ]
        subprocess.run([*command, str(model), str(output), kind], check=True, cwd=ROOT, stdout=sys.stderr)
    return output


def _llama(setting: Setting, stack: ExitStack, models: tuple[Path, Path], tokens: int, threads: int) -> Arm:
    name = f"llama.cpp {f'draft K={tokens}' if tokens else 'plain'} {threads}t"
    target, draft = models
    port = free_port()
    sequences, context = setting.sequences, setting.context
    command = server_command(
        setting.flags.llama, target, draft if tokens else None, tokens, threads, sequences, context, port
    )
    server = stack.enter_context(setting.child(name, command, threads))
    return LlamaArm(name, server, port, devices=threads, speculates=tokens > 0)
