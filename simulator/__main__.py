"""`python -m simulator`."""

from simulator.cli import main

main()
