"""The `outrider` command, also as `python -m outrider`."""

import os
import signal

FIRST_PROCESS = 1
"""Id of a container's first process, to which the kernel sends no signal that it has no handler for."""


def main() -> int:
    """Run `outrider.cli.main.main`; Ctrl-C during its imports or parsing ends it without a traceback.

    So does SIGTERM in a container.
    """
    try:
        if os.getpid() == FIRST_PROCESS:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        from outrider.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
