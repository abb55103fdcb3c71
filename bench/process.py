"""Runs a measurement in a fresh process, as a user's own would be."""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tsopt.runtime.racing.environment import Environment, environment

Rows = dict[str, dict[str, Any]]

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


def measure_each(
    function: str,
    known: Collection[str],
    place: Path,
    line: Callable[[str, dict[str, Any]], str],
    page: Callable[[Environment, Rows], Iterable[str]],
    at_once: int = 1,
) -> None:
    """Measures the models that the command line names, or all that are known, each in a process of its own.

    Writes the numbers to `place` and a page of them beside it, after each model: a run takes long. Numbers of models
    that are known and not measured now stay, if they were measured on the same machine with the same packages.

    Args:
        function: `module:function` of a model's name.
        line: a row of the table.
        page: the lines of the page.
        at_once: processes; more than one where nothing is timed.
    """
    names = sys.argv[1:]
    rows = measured_here(place) if names else {}
    with ThreadPoolExecutor(at_once) as pool:
        waiting = {pool.submit(in_own_process, function, name): name for name in names or known}
        for done in as_completed(waiting):
            name = waiting[done]
            rows[name] = done.result()
            print(line(name, rows[name]), flush=True)
            found, env = {name: rows[name] for name in known if name in rows}, environment()
            place.parent.mkdir(exist_ok=True)
            place.write_text(json.dumps({"environment": env.to_json(), "models": found}, indent=1) + "\n")
            place.with_suffix(".md").write_text("\n".join([f"On {env}.", "", *page(env, found), ""]))


def measured_here(place: Path) -> Rows:
    """What an earlier run has measured on such a machine with these packages, by model; empty if either differs."""
    if not place.exists():
        return {}
    found, here = json.loads(place.read_text()), json.loads(json.dumps(environment().to_json()))  # lists for tuples
    # A different kernel build is still the same kind of machine; the header of the results does not name it either.
    same = all(found["environment"].get(key) == value for key, value in here.items() if key != "platform")
    return found["models"] if same else {}


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
