"""Probes a bundle that this machine does not know: opens it and calls it once in a separate process.

Engines fold constants while they open a file: a division that kills the process, an endless loop or values that fill
the memory do so in that process, under limits, and become a BundleError here. The inputs are those that the bundle was
written with. Started as `python -m tsopt.runtime.bundles.probe`; needs torch only where the bundle does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt import errors
from tsopt.compiler.calls import signature_json
from tsopt.errors import BundleError, TsoptError
from tsopt.runtime.backends.table import info_of
from tsopt.runtime.sandbox.processes import (
    OWN,
    SET_DEATH_SIGNAL,
    available_memory,
    descendants,
    environment_of_child,
    kill,
    limit_memory,
    prctl,
    python,
    why_none,
    working_directory,
)

if TYPE_CHECKING:
    from tsopt.compiler.calls.signature import Signature

CPU_SECONDS, BYTES_A_SECOND = 3.0, 4 << 20  # of processor time for any bundle, and one more for so many bytes of it
GPU_SECONDS = 20.0  # the same for a bundle on a GPU, whose libraries are loaded and initialized first
START_SECONDS, PATIENCE = 120.0, 10.0  # for imports on a cold disk; times the processor time, on a busy machine
MEMORY, TIMES = 4 << 30, 8  # bytes for any bundle; for one that is larger, so many times its size
THREADS = 2  # it is not about speed, and each thread takes address space
READY = b"ready\n"
LONGEST = 1 << 16  # bytes of an answer
FIX = "if you trust its source, use tsopt.load(path, probe=False); otherwise export the model again"


def try_out(
    directory: Path,
    backend: str,
    options: Mapping[str, Any],
    signature: Signature,
    sizes: Mapping[str, int],
    trust: bool,
) -> None:
    """Opens a bundle and calls it once, in a separate process with time and memory limits.

    Args:
        sizes: bytes of each member.

    Raises:
        TsoptError: as opening it does there.
        BundleError: it crashes its process, does not finish, takes too much memory, or fails on its inputs.
    """
    none = why_none()
    if none:
        raise BundleError(
            "the bundle cannot be probed, because no separate process can be started",
            where=str(directory),
            why=none,
            fix="if you trust its source, use tsopt.load(path, probe=False)",
        )
    on_cpu = all(device == "cpu" for _, device in signature.devices)
    size = sum(sizes.values())
    cpu = math.ceil((CPU_SECONDS if on_cpu else GPU_SECONDS) + size / BYTES_A_SECOND)
    request = {
        "directory": str(directory.absolute()),
        "backend": backend,
        "options": {**options, "threads": min(options.get("threads") or THREADS, THREADS)},
        "signature": signature_json.to_json(signature.flat()),
        "trust": trust,
        "path": working_directory(sys.path) if trust else [],  # where a backend of the user's may be
        "torch": not on_cpu or not info_of(backend).through_onnx,
        "cpu": cpu,
        "memory": _memory(size) if on_cpu else None,  # a GPU's driver reserves far more addresses than memory
    }
    said, status = _run(json.dumps(request).encode(), START_SECONDS + PATIENCE * cpu, sees_gpus=not on_cpu)
    ready, _, answer = said.partition(READY)
    if ready or READY not in said:
        raise BundleError(
            "the bundle cannot be probed, because the separate process did not start",
            where=str(directory),
            why=f"{sys.executable or 'Python'} exited with status {status}",
            fix="if you trust its source, use tsopt.load(path, probe=False)",
        )
    if status != 0:
        raise BundleError(
            "the bundle is not safe to open",
            where=str(directory),
            why=f"opened in a separate process, it {_end(status, cpu)}",
            fix=FIX,
        )
    _raise_what_was_said(answer, directory)


def _memory(size: int) -> int:
    available = available_memory()
    wanted = max(MEMORY, TIMES * size)
    return wanted if available is None else max(min(wanted, available * 3 // 4), 1 << 28)


def _run(request: bytes, seconds: float, *, sees_gpus: bool) -> tuple[bytes, int | None]:
    """What the process has written, and how it ended; None when it did not."""
    nothing = subprocess.DEVNULL
    environment = environment_of_child(OWN, sees_gpus=sees_gpus)
    environment |= {"OMP_NUM_THREADS": str(THREADS), "PYTHONWARNINGS": "ignore"}
    command = python("tsopt.runtime.bundles.probe")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=nothing,
            start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then ends this one
            env=environment,
        )
    except OSError as error:
        return b"", error.errno
    try:
        said, _ = process.communicate(request, seconds)
        return said[: LONGEST + len(READY)], process.returncode
    except subprocess.TimeoutExpired as late:
        return late.output or b"", None
    finally:
        if process.poll() is None:
            for pid in descendants(process.pid):
                kill(pid)
            kill(process.pid)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it ended before it had read its request
                    pipe.close()


def _end(status: int | None, cpu: int) -> str:
    """How a process ended abnormally."""
    if status is None or -status == getattr(signal, "SIGXCPU", 0):
        return f"did not finish within {cpu} s of CPU time"
    if status == -signal.SIGKILL:
        return "was killed, most likely because it ran out of memory"
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _raise_what_was_said(answer: bytes, directory: Path) -> None:
    """NOTE: what the process says is shown, not believed: the bundle was in it."""
    try:
        said = json.loads(answer)
        kind, rows = str(said["kind"]), [said.get(key) for key in ("what", "where", "why", "fix")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            "the bundle is not safe to open", where=str(directory), why="its process gave no valid answer", fix=FIX
        ) from error
    if kind == "well":
        return
    what, where, why, fix = (text if text is None else _plain(str(text)) for text in rows)
    named: Any = getattr(errors, kind, None)
    cls: type[TsoptError] = named if isinstance(named, type) and issubclass(named, TsoptError) else BundleError
    raise cls(what or "the bundle cannot be used", where=where, why=why, fix=fix)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:2000])


def main() -> None:
    """The other side: one request on stdin, one answer on stdout."""
    answer_to = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    request = json.loads(sys.stdin.buffer.read())
    sys.path += request["path"]  # after all else
    if not request["torch"]:
        sys.modules["torch"] = None  # type: ignore[assignment]  # seconds that numpy's arrays do not take
    from tsopt.runtime.bundles.opening import require

    require(request["backend"])
    if request["torch"]:
        _import_for_programs()
    os.write(answer_to, READY)
    answer: dict[str, Any] = {"kind": "well"}
    try:
        _limit(request)
        _call(request)
    except TsoptError as error:
        rows = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        answer = {"kind": type(error).__name__, **rows}
    os.write(answer_to, json.dumps(answer).encode()[:LONGEST])
    os._exit(0)  # no clean-up: what an engine does when it is destroyed would be under no limit


def _import_for_programs() -> None:
    """What reading a program imports, most of it within torch at the first op on fake tensors.

    A second of processor time, on a slow and busy machine four: none of it may count for the bundle.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    importlib.import_module("tsopt.compiler.graph.serialize")
    with FakeTensorMode():
        torch.ones(1, 1, device="cpu") @ torch.ones(1, 1, device="cpu")


def _limit(request: Mapping[str, Any]) -> None:
    limit_memory(request["memory"])
    with contextlib.suppress(ImportError):  # Windows; there, the caller's patience is the limit
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(used.ru_utime + used.ru_stime) + request["cpu"]
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _call(request: Mapping[str, Any]) -> None:
    from tsopt.runtime.bundles.opening import CHECK, fitting, open_bundle, run_on_reference, stored_tensors

    directory, signature = Path(request["directory"]), signature_json.from_json(request["signature"])
    if request["torch"] and signature.default_dtype:
        torch = importlib.import_module("torch")
        torch.set_default_dtype(getattr(torch, signature.default_dtype))
    executable = open_bundle(directory, request["backend"], request["options"], signature, request["trust"])
    tensors = stored_tensors(directory / CHECK)
    names = [f"input.{position}" for position in range(len(signature.user_inputs))]
    inputs = fitting(tensors, dict(zip(names, signature.user_inputs, strict=True)), directory / CHECK)
    run_on_reference(executable, inputs, directory, failure=BundleError, fix=FIX)


if __name__ == "__main__":
    main()
