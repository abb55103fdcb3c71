"""`python -m tsopt`."""

from tsopt.cli.main import run

run()
