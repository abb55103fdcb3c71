"""What becomes of a bundle that is loaded and called in a process of its own, with limits.

Right: an error of tsopt's own in time, or the answer of the sound bundle. Wrong: the end of the process, a raw error,
no end, or another file opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401 - imported before the forks, once
import torch

import tsopt
from bench.hazards import RIGHT, Case, Outcome
from bench.hazards.sound_bundles import saved

SECONDS = 40.0  # for the process of a case; imports and engines are part of it
IN_TIME = 12.0  # of processor time, for `load` and all that it starts; torch's import is up to 4 of them
MEMORY = 6 << 30


def apart(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a fork of this process finds; `killed` or `hangs` where it does not say.

    For a process that has imported all libraries and run none of them: the threads of engines do not survive a fork.
    Others ask a Clean one.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reader)
        said = {"kind": "raw", "why": "no answer"}
        try:
            said = work()
        except BaseException as error:
            said = {"kind": "raw", "why": f"{type(error).__name__}: {str(error)[:120]}"}
        finally:
            said["why"] = str(said.get("why", ""))[:400]
            os.write(writer, json.dumps(said).encode())  # less than a pipe takes at once
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], seconds)
        raw = os.read(reader, 4096) if ready else b""
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if raw:
        return json.loads(raw)
    if ready:
        return {"kind": "killed", "why": signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""}
    return {"kind": "hangs", "why": f"no end in {seconds:.0f} s"}


class Clean:
    """A process that has run no engine, and forks for each question; a context."""

    def __enter__(self) -> Clean:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "bench.hazards.load_trial", "serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *details: object) -> None:
        self.process.communicate()  # it ends with its input

    def ask(self, work: str, *arguments: str) -> dict[str, Any]:
        """What a fork finds; see `apart`. `work`: `make`, with a backend and a folder, or `loaded`, with a folder."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([work, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def in_process(work: str, *arguments: str) -> dict[str, Any]:
    """The same in a process that has not been forked."""
    command = [sys.executable, "-m", "bench.hazards.load_trial", work, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"kind": "hangs", "why": f"no end in {SECONDS:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if out:
        return json.loads(out.splitlines()[-1])
    status = -process.returncode
    return {"kind": "killed", "why": signal.Signals(status).name if status > 0 else f"status {-status}"}


def make(backend: str, folder: str) -> dict[str, Any]:
    """Saves a sound bundle, `m.tsopt`, and a call with its answer."""
    place = Path(folder)
    os.environ["TSOPT_CACHE_DIR"] = str(place / "of the author")
    _, x, y = saved(backend, place)
    torch.save((x, y), place / "call.pt")
    return {"kind": "made"}


def loaded(folder: str) -> dict[str, Any]:
    """What becomes of a bundle that is loaded and called: right, other, refused or raw; what that took and opened."""
    place = Path(folder)
    os.environ["TSOPT_CACHE_DIR"] = str(place / "cache")
    bundle = place / "m.tsopt"
    x, y = torch.load(place / "call.pt")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    witness, opened = os.path.realpath(bundle.parent / "witness"), list[str]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and os.path.realpath(args[0]) in (witness, "/etc/passwd"):
            opened.append(args[0])

    sys.addaudithook(hook)
    start = time.process_time()
    try:
        found = tsopt.load(bundle, trust=True)(x)
        right = found.shape == y.shape and torch.allclose(found, y, atol=1e-3)
        said = {"kind": "right"} if right else {"kind": "other", "why": str(found.flatten()[:4].tolist())}
    except tsopt.TsoptError as error:
        said = {"kind": "refused", "why": f"{error.what}; {error.why or ''}"}
    except BaseException as error:
        said = {"kind": "raw", "why": f"{type(error).__name__}: {str(error)[:120]}"}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = time.process_time() - start + children.ru_utime + children.ru_stime
    return {**said, "seconds": spent, "peak": max(peaks) * 1024, "opened": opened}


def judged(said: dict[str, Any]) -> Outcome:
    why = str(said.get("why", ""))[:160]
    if said.get("opened"):
        return Outcome("wrong", f"opened {said['opened'][0]}")
    if said.get("peak", 0) > MEMORY:
        return Outcome("wrong", f"took {said['peak'] / 1e9:.1f} GB")
    if said.get("seconds", 0) > IN_TIME:
        return Outcome("wrong", f"took {said['seconds']:.1f} s of processor time")
    if said["kind"] == "right":
        return RIGHT
    if said["kind"] == "refused":
        return Outcome("refused", why)
    return Outcome("wrong", f"{said['kind']}: {why}")


def case(name: str, change: Callable[[Path], None], *backends: str) -> Case:
    """A case: a sound bundle of each backend, changed."""

    def check(backend: str) -> Outcome:
        # OpenVINO's library does not survive a fork.
        ask = in_process if backend == "openvino" else forked
        with tempfile.TemporaryDirectory(prefix="hazard-") as folder:
            torch.set_num_threads(1)
            made = ask("make", backend, folder)
            if made["kind"] != "made":
                return Outcome("wrong", f"the case cannot be made: {made}")
            change(Path(folder) / "m.tsopt")
            return judged(ask("loaded", folder))

    return Case(name, check, backends)


WORKS: dict[str, Callable[..., dict[str, Any]]] = {"make": make, "loaded": loaded}


def forked(work: str, *arguments: str) -> dict[str, Any]:
    """What a fork of this process finds; see `apart`."""
    return apart(functools.partial(WORKS[work], *arguments), SECONDS)


def serve() -> None:
    """The other side of Clean."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by an engine must not be read as an answer
    for line in sys.stdin:
        print(json.dumps(forked(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
        sys.exit()
    print(json.dumps(WORKS[sys.argv[1]](*sys.argv[2:])), flush=True)
    os._exit(0)
