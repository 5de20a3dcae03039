"""Prompts from the standard library's source: what the demo pair was trained to continue."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from tests.integration.cluster import DEMO_TARGET

MODULES = """
    argparse ast bisect calendar cmd codecs configparser copy csv dataclasses difflib doctest enum
    fnmatch fractions ftplib functools getopt glob heapq inspect keyword linecache locale mailbox
    netrc numbers operator optparse pickle platform pprint queue random reprlib sched shlex shutil
    smtplib socket statistics string subprocess tarfile tempfile textwrap threading timeit tokenize
    trace traceback types uuid warnings wave weakref
""".split()  # noqa: SIM905 - a list of words reads better as text
SHORTEST, LONGEST = 1, 120


def code_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 120 tokens, the same on every machine with the same Python."""
    random = Random(0)
    found = []
    for index in range(count):
        ids = _module(MODULES[index % len(MODULES)])
        start = random.randrange(len(ids) - LONGEST)
        found.append(ids[start : start + random.randint(SHORTEST, LONGEST)])
    return found


def long_prompt(tokens: int) -> list[int]:
    """A prompt that takes several prefill chunks."""
    return _module("argparse")[:tokens]


@cache
def _module(name: str) -> list[int]:
    source = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")
    return _tokenizer().encode(source).ids


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
