"""The helper process of a race: imports torch once and forks a child for each candidate.

Started as `python -m tsopt.runtime.sandbox FD`; knows neither the user's script nor the model's class, only the
stored program. A candidate that crashes, hangs or exits takes its own child along and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import read_program
from tsopt.errors import NoGain, TsoptError
from tsopt.runtime.backends.backend import Reopens, compile, get_backend, reopen
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.compare import bit_equal
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.timing import MEASUREMENTS, rest
from tsopt.runtime.sandbox.processes import (
    SET_DEATH_SIGNAL,
    SET_SUBREAPER,
    descendants,
    die_first,
    give_back_memory,
    kill,
    kill_group,
    limit_memory,
    prctl,
)
from tsopt.runtime.sandbox.transfer import Gone, Message, read_tensors, receive, send, write_tensors

# Done while nothing is asked, at the latest before the fork of a child that exports to ONNX: no child pays for it.
# NOTE: not OpenVINO, whose threads do not survive a fork.
TO_IMPORT = (
    *("tsopt.compiler.capture.thread_patches", "onnxruntime", "onnx", "torch.onnx", "onnxscript"),
    *("onnxscript.function_libs.torch_lib.ops", "onnxscript.rewriter", "tsopt.runtime.onnx.export"),
    "tsopt.compiler.graph.quantized",  # registers ops, of which the registry is to have translations
)

# Where memory runs out, a candidate is to go, which costs a row, then the helper; never the process of the user.
HELPER_DIES, CANDIDATE_DIES = 500, 1000


def main(connection: socket.socket) -> None:
    """Serves the process that races: forks children for it, reads programs, says how children ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, as a daemon may have it, no status is kept
    torch.set_num_threads(1)  # NOTE: a pool of threads does not survive a fork; children make their own
    die_first(HELPER_DIES)
    prctl(SET_SUBREAPER, 1)  # what a candidate leaves running becomes ours to end
    send(connection, {"ready": True})
    to_do: list[Callable[[], None]] = [*(partial(_import, name) for name in TO_IMPORT), _prepare_exports]
    programs: dict[str, Program] = {}
    directory: Path | None = None
    while True:
        while to_do and not select.select([connection], [], [], 0)[0]:
            to_do.pop(0)()
        try:
            message, files = receive(connection, files=2)
        except Gone:  # the caller has ended, maybe without a chance to clean up
            for pid in descendants(os.getpid()):
                kill(pid)
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            return
        if message["do"] == "program":
            directory = Path(message["directory"])
            if programs:
                programs.clear()
                gc.collect()
            gc.freeze()  # what is here stays: no collector is to look through it again
            try:
                torch.set_default_dtype(getattr(torch, message["default_dtype"]))  # children inherit it
                state = read_tensors(directory / "state", message["state"])
                programs = {name: read_program(directory / name, state, own=True) for name in message["variants"]}
                answer = {}
            except Exception as error:  # it goes on, and says what it could not read
                answer = {"error": str(error)[:300]}
            send(connection, answer)
        elif message["do"] == "fork":
            while to_do and message["through_onnx"]:
                to_do.pop(0)()
            child = os.fork()
            if not child:
                connection.close()
                _become_candidate(files, message, programs)
            for file in files:
                os.close(file)
            send(connection, {"pid": child})
        elif message["do"] == "reap":
            send(connection, {"status": _reap(message["pid"], message["seconds"])})


def _import(name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _prepare_exports() -> None:
    with contextlib.suppress(Exception):  # an export that fails for the same reason says so
        from tsopt.runtime.onnx import registry

        registry.prepare()


def _reap(pid: int, seconds: float) -> int | None:
    """How a child ended, as `waitpid` says it; None when it is still running. Ends what it has left in its group."""
    end = time.monotonic() + seconds
    while True:
        is_known = _has_ended(pid)
        if is_known:
            kill_group(pid)  # until its status is taken, no other process or group can have its number
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            if not is_known:  # it has just ended, or the system cannot tell
                kill_group(pid)  # at once, before another has the number
            return status
        if time.monotonic() > end:
            return None
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    """Whether a child is known to have ended; its status can still be taken."""
    look = getattr(os, "waitid", None)  # macOS has had it since Python 3.13
    return look is not None and look(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _become_candidate(files: list[int], message: Message, programs: Mapping[str, Program]) -> NoReturn:
    """The rest of a child's life."""
    code = 1
    try:
        gc.freeze()  # what is here is shared with the helper: a collector that touches it would copy it
        gc.enable()
        os.setsid()
        prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for place, file in ((0, nothing), (1, files[1]), (2, files[1])):
            os.dup2(file, place)
        die_first(CANDIDATE_DIES)
        limit_memory(message.get("memory"))
        _make_files_in(message["directory"])
        torch.set_num_threads(message["threads"])
        _Candidate(socket.socket(fileno=files[0]), programs[message["variant"]], Path(message["directory"])).serve()
        code = 0
    except Gone:
        code = 0  # nobody wants anything more
    finally:
        os._exit(code)  # NOTE: no clean-up of what was inherited: the files belong to the parent


def _make_files_in(directory: str) -> None:
    """Temporary files go where the caller will clear up; what Inductor keeps from run to run stays where it was."""
    with contextlib.suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cache_dir()  # writes down its place, which depends on where temporary files are
    os.environ["TMPDIR"] = tempfile.tempdir = directory


class _Candidate:
    """One candidate in its child: compiles, runs, times, each when asked."""

    def __init__(self, connection: socket.socket, program: Program, directory: Path) -> None:
        self.connection, self.program, self.directory = connection, program, directory
        self.executable: Executable | None = None
        self.examples: list[list[torch.Tensor]] = []
        self.first: list[tuple[torch.Tensor, torch.Tensor]] = []

    def serve(self) -> None:
        handlers: dict[str, Callable[[Message], Message]] = {
            "compile": self.compile,
            "run": self.run,
            "save": self.save,
            "examples": self.take_examples,
            "time": self.time,
        }
        while True:
            message, _ = receive(self.connection)
            try:
                answer = handlers[message["do"]](message)
            except Exception as error:  # a candidate may raise anything
                kind = type(error).__name__
                reason = error.what if isinstance(error, TsoptError) else f"{kind}: {str(error)[:200]}"
                if isinstance(error, TsoptError) and error.why:
                    reason += f"; {error.why}"
                ending = "no gain" if isinstance(error, NoGain) else outcomes.ending_of(error)
                answer = {"error": reason[:600], "kind": ending}
            send(self.connection, answer)

    def compile(self, message: Message) -> Message:
        start = time.perf_counter()
        candidate, options = Candidate.parse(message["candidate"]), message["options"]
        if "saved" in message and isinstance(get_backend(candidate, **options), Reopens):
            place = self.directory / message["saved"]
            self.executable = reopen(self.program, place, candidate, share_weights=True, **options)
        else:
            self.executable = compile(self.program, candidate, share_weights=True, **options)
        seconds = time.perf_counter() - start
        give_back_memory()
        return {"notes": list(self.executable.notes), "seconds": seconds}

    def save(self, message: Message) -> Message:
        assert self.executable is not None
        assert self.executable.hand_over is not None
        directory = self.directory / message["name"]
        directory.mkdir()
        self.executable.hand_over(directory)
        give_back_memory()
        return {}

    def run(self, message: Message) -> Message:
        """One call on the inputs and the state of a file; answers, and what it left in both, go into another."""
        values = read_tensors(self.directory / message["file"], message["tensors"])
        inputs = len(self.program.signature.user_inputs)
        outputs = self._call(values[:inputs], values[inputs:])
        self.first = self.first or [(value, value.clone()) for value in outputs]
        kept = all(bit_equal(value, copy) for value, copy in self.first)
        file = f"{message['file']}.answer"
        described = write_tensors(self.directory / file, [*outputs, *values])
        give_back_memory()
        return {"file": file, "tensors": described, "outputs": len(outputs), "kept": kept}

    def _call(self, leaves: list[torch.Tensor], state: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self.executable is not None
        self.executable.state[:] = state
        with torch.no_grad():
            found = self.executable(*leaves)
        return found if isinstance(found, tuple) else (found,)

    def take_examples(self, message: Message) -> Message:
        self.examples = [read_tensors(self.directory / item["file"], item["tensors"]) for item in message["examples"]]
        return {}

    def time(self, message: Message) -> Message:
        """The seconds that a measurement finds. Answers when its threads are at rest."""
        assert self.executable is not None
        names = [item.name for item in self.program.signature.user_inputs]
        inputs = len(names)
        chosen = [self.examples[place] for place in message["examples"]]
        if state := chosen[0][inputs:]:
            self.executable.state[:] = [value.clone() for value in state]
        written = any(item.writes in names for item in self.program.signature.writes)
        calls = [Example(tuple(item[:inputs]), written=written) for item in chosen]
        with torch.inference_mode() if message["inference"] else torch.no_grad():
            seconds = MEASUREMENTS[message["how"]](self.executable, calls, **message["counts"])
        rest()
        return {"seconds": seconds}
