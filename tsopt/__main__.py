"""`python -m tsopt`."""

from tsopt.cli.app import run

run()
