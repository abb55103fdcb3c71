"""Runs a measurement in a fresh process, as a user's own would be."""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
from typing import Any

# glibc's mallopt(3): never give memory back, grow in large steps, take nothing from mmap.
KEEP = {-1: 1 << 30, -2: 64 << 20, -4: 0}


def in_own_process(function: str, argument: str) -> Any:
    """What `module:function` returns for an argument, from a new interpreter; its stderr is this one's.

    Raises:
        CalledProcessError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.process", function, argument], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def keep_memory() -> bool:
    """Lets this process keep what it frees, and says whether it can.

    Otherwise glibc gives large buffers back between calls, depending on what the process did before: the same call of
    MobileNetV2 takes 0 to 5,000 page faults, which is up to half of its time and drowns what passes gain.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(key, value) for key, value in KEEP.items())


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(sys.argv[2])))
