"""`save` that is killed, and bundles that are replaced: what is there afterwards is the old bundle or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome
from bench.hazards.sound_bundles import saved

BETWEEN, AT_RANDOM = 20, 40  # kills


@contextlib.contextmanager
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hazard-") as folder:
        os.environ["TSOPT_CACHE_DIR"] = str(Path(folder) / "cache")
        yield Path(folder)


def after_kills(times: int, save_and_die: Callable[[Path], Any], seconds: Callable[[int], float | None]) -> Outcome:
    """What is left of a bundle that children save again, each of which is killed.

    Args:
        save_and_die: what a child does.
        seconds: after how long which child is killed; None: it does that itself.
    """
    with place() as folder:
        bundle, x, y = saved("eager", folder)
        for number in range(times):
            child = os.fork()
            if not child:
                save_and_die(folder)
                os._exit(0)
            wait = seconds(number)
            if wait is not None:
                time.sleep(wait)
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            try:
                found = tsopt.load(bundle)(x)
            except tsopt.TsoptError as error:
                return Outcome("wrong", f"no bundle is left: {error.what}")
            if not torch.allclose(found, y):
                return Outcome("wrong", "another bundle")
        saved("eager", folder)
        left = sorted(set(os.listdir(folder)) - {"m.tsopt", "cache"})
        return Outcome("wrong", f"left behind: {len(left)} directories") if left else RIGHT


def killed_between(backend: str) -> Outcome:
    """`save` over a bundle, killed when the old one has been moved, or right before the new one is."""
    rename = Path.rename

    def dying(self: Path, target: Path) -> Any:
        done = rename(self, target)
        if self.name == "m.tsopt":
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def save_and_die(folder: Path) -> None:
        Path.rename = dying  # type: ignore[method-assign, assignment]
        saved("eager", folder)

    return after_kills(BETWEEN, save_and_die, lambda number: None)


def killed_at_random(backend: str) -> Outcome:
    def save_for_ever(folder: Path) -> None:
        while True:
            saved("eager", folder)

    return after_kills(AT_RANDOM, save_for_ever, lambda number: 0.002 * number)


def replaced_while_read(backend: str) -> Outcome:
    """Two bundles change places while one of them is loaded: what is loaded is one of the two."""
    with place() as folder:
        bundle, _, _ = saved("eager", folder)
        other = Path(shutil.copytree(bundle, folder / "other.tsopt"))
        child = os.fork()
        if not child:
            staged = _staged()
            while True:
                with staged(bundle) as target:
                    for file in other.iterdir():
                        shutil.copy(file, target)
        try:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                tsopt.load(bundle)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return RIGHT


def _staged() -> Any:
    try:
        from tsopt.runtime.bundles.staging import staged
    except ImportError:
        from tsopt.runtime.bundles.store import staged  # type: ignore[attr-defined,no-redef]
    return staged


CASES = (
    Case("save is killed between its two renames", killed_between, ANY),
    Case("save is killed at random moments", killed_at_random, ANY),
    Case("a bundle is replaced while it is read", replaced_while_read, ANY),
)
