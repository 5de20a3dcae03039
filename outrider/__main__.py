"""The `outrider` command, also as `python -m outrider`."""


def main() -> int:
    """Run `outrider.cli.main.main`; Ctrl-C during its imports or parsing ends it without a traceback."""
    try:
        from outrider.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
