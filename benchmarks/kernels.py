"""What each kind of CPU kernel saves: a forward and a choice with all kernels, and without one kind.

    python -m benchmarks.kernels models/demo/target --dtype bfloat16

    forward    of some tokens behind a context; without norm, rotation or attention torch computes them
    choosing   the target's tokens at some rows, without kernels by the torch operations that define them
    ranking    the draft's best guesses at some rows, likewise

All in turn, the time of this thread; least and median in milliseconds. docs/kernels.md has the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer

from benchmarks import machine, step
from benchmarks.flags import new_parser
from outrider.config import DraftConfig
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import SamplingRow, choose, rank
from outrider.sampling.history import History
from scripts import console

DECODER = "outrider.engine.fused_decoder"
KINDS = {
    "norm": f"{DECODER}.norm.runs",
    "rotation": f"{DECODER}.rotation.runs",
    "attention": f"{DECODER}.attention.attends",
}
"""Who is asked whether there is a kernel."""
SAMPLERS = {
    "T = 0": SamplingParams(),
    "T = 1": SamplingParams(temperature=1.0, seed=7),
    "T = 1, top-p 0.9": SamplingParams(temperature=1.0, seed=7, top_p=0.9),
}


def main() -> int:
    """Measure and print."""
    flags = _flags()
    torch.set_num_threads(1)
    print(machine.lines(machine.describe()) + "\n")
    text = Tokenizer.from_file(str(flags.model / "tokenizer.json")).encode(step.TEXT.read_text()).ids
    model = load_model(str(flags.model), dtype=flags.dtype, device="cpu", threads=1)
    print(f"{'forward, rows':26}{'all kernels':>19}" + "".join(f"{f'without {kind}':>19}" for kind in KINDS))
    for rows in flags.rows:
        calls = [_forward(model, rows, text[: flags.context], without) for without in (None, *KINDS)]
        print(f"{rows:<26}" + _line(calls, flags.rounds))
    logits = step._some_logits(model, text)
    print(f"\n{'sampling, rows':26}{'choosing':>19}{'in torch':>19}{'ranking':>19}{'in torch':>19}")
    for rows in flags.rows:
        for name, params in SAMPLERS.items():
            print(f"{rows:<4}{name:22}" + _line(_sampling(logits[:rows], params), flags.rounds))
    return 0


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200, help="tokens before those of the step")
    parser.add_argument("--rounds", type=int, default=100)
    return parser.parse_args()


def _forward(
    model: LoadedModel, rows: int, context: Sequence[int], without: str | None
) -> Callable[[], None]:
    with patch(KINDS[without], lambda *_: False) if without else nullcontext():
        return step._forward(model, rows, context)


def _line(calls: list[Callable[[], None]], rounds: int) -> str:
    return "".join(step._pair(times) for times in step._times(calls, rounds))


def _sampling(logits: torch.Tensor, params: SamplingParams) -> list[Callable[[], None]]:
    """Choosing and ranking, each with kernels and without."""
    rows = [SamplingRow(params, 100 + index, index, History(())) for index in range(len(logits))]
    children = DraftConfig().children

    def choosing() -> None:
        choose(logits, rows, ())

    def ranking() -> None:
        rank(logits, rows, children, 1.0, ())

    return [choosing, _in_torch(choosing), ranking, _in_torch(ranking)]


def _in_torch(call: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        with _without_kernels():
            call()

    return called


@contextmanager
def _without_kernels() -> Iterator[None]:
    with patch.object(chooser, "available", lambda: False):
        yield


if __name__ == "__main__":
    console.run(main)
