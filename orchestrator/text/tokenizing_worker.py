"""The process that tokenizes long prompts: `python -m orchestrator.text.tokenizing_worker`.

It reads the tokenizer and then jobs, one at a time, from its standard input, and answers each on its standard
output. With a job comes the most tokens that its prompt may have. It ends with its input, so that it does not
outlive the orchestrator. The kernel ends it when a prompt takes too much processor time, and bounds its
memory.

A frame is a length in eight bytes, followed by that many bytes. Input is pickled. Answers are values of
`marshal`, which has only plain data and runs no code, even if a prompt has taken over this process.
"""

from __future__ import annotations

import marshal
import os
import pickle
import resource
import signal
import sys
from array import array
from typing import Any, BinaryIO

from orchestrator.text.constraint_check import ConstraintCheck
from orchestrator.text.jobs import Ids, Job
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import InvalidRequest

LENGTH_BYTES = 8
NICENESS = 5
"""Niceness of the process. Under load it gets a third of the processor time of a process with niceness 0."""
BASE_SECONDS, POSITION_SECONDS = 5.0, 20e-6
"""Processor time of a prompt: a base, and seconds per token that it may have (ordinary text takes 6e-6)."""
CHECK_SECONDS = 2.0
"""Base of the processor time of a constraint. It is smaller because an engine compiles the constraint too."""
STACK_BYTES = 8 << 20
"""Stack. A constraint that needs more ends the process; engines have more (`outrider.grammar.compiler`)."""
BASE_BYTES, POSITION_BYTES = 256 << 20, 1024
"""Memory for a prompt: a base, and bytes per token that it may have (ordinary text takes 600)."""
KEPT_BYTES = 128 << 20
"""Memory for a prompt after which the process ends once it has answered, to return it all."""


def frame(data: bytes) -> bytes:
    """A frame with these bytes."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def read_frame(file: BinaryIO) -> Any:
    """The next pickled value; None at the end."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    return pickle.loads(file.read(length)) if length else None


def answer(tokenizer: TextTokenizer, positions: int, job: Job) -> tuple[str, Any]:
    """The answer to a job of `orchestrator.text.jobs`.

    It is ("tokens", unsigned 32-bit numbers), ("too_long", the least number of tokens), ("text", text),
    ("checked", whether the text is complete), or ("refused", (field, problem)).
    """
    if isinstance(job, Ids):
        return "text", job.text(tokenizer)
    try:
        if isinstance(job, ConstraintCheck):
            return "checked", job.complete(tokenizer)
        tokens = job.tokens(tokenizer, positions)
    except InvalidRequest as error:
        return "refused", (error.field, error.problem)
    if len(tokens) > positions:
        return "too_long", len(tokens)
    return "tokens", array("I", tokens).tobytes()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer jobs until the input ends, or until one needed more than `KEPT_BYTES` of memory."""
    tokenizer = TextTokenizer(*read_frame(source))
    start, mapped = _peak_bytes(), _mapped_bytes()
    _bound(resource.RLIMIT_STACK, STACK_BYTES)
    leaving = False
    while not leaving and (asked := read_frame(source)) is not None:
        job, positions = asked
        if mapped is not None:
            _bound(resource.RLIMIT_AS, mapped + BASE_BYTES + POSITION_BYTES * positions)
        base = CHECK_SECONDS if isinstance(job, ConstraintCheck) else BASE_SECONDS
        signal.setitimer(signal.ITIMER_PROF, base + POSITION_SECONDS * positions)
        result = answer(tokenizer, positions, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        leaving = _peak_bytes() - start > KEPT_BYTES
        sink.write(frame(marshal.dumps((*result, leaving))))
        sink.flush()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _mapped_bytes() -> int | None:
    """The memory that the process has mapped; None if that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _bound(resource_kind: int, bound: int) -> None:
    _, hard = resource.getrlimit(resource_kind)
    resource.setrlimit(resource_kind, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)
