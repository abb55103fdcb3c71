"""The command line, built on the public API. `tsopt --help` does not import torch."""
