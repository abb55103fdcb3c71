"""Runs a measurement in a fresh process, as a user's own would be."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any


def in_own_process(function: str, argument: str) -> Any:
    """What `module:function` returns for an argument, from a new interpreter; its stderr is this one's.

    Raises:
        CalledProcessError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.process", function, argument], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(sys.argv[2])))
