"""The command line: commands over the public API. `tsopt --help` imports no torch."""
