"""A draft that does not know constraints: `outrider` with the same arguments, to see what its masks bring."""

from __future__ import annotations

import sys

import draft_service.main
from outrider.cli.main import main


def without_grammars(*_: object) -> None:
    """In place of what loads them."""


if __name__ == "__main__":
    draft_service.main.load_grammars = without_grammars
    sys.exit(main())
