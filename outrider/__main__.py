"""`python -m outrider` is the `outrider` command."""

from outrider.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
