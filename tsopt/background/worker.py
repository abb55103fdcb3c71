"""The other process: optimizes the model and leaves a bundle and the report, or the error."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsopt.api import optimize
from tsopt.background.job import ANSWER, BUNDLE, REQUEST, Answer, named_tensors, write
from tsopt.compiler.other_threads import THREADS
from tsopt.errors import GraphBreakError, TsoptError
from tsopt.runtime.bundles.store import save
from tsopt.runtime.calling.audit import may_draw
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.sandbox.processes import descendants, import_path, kill, working_directory


def main(directory: Path) -> None:
    threading.Thread(target=_end_with_the_caller, args=(directory,), name=f"{THREADS}caller", daemon=True).start()
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how compilers have ended
    found: Answer | TsoptError
    with (directory / REQUEST).open("rb") as file:
        path, threads, dtype = pickle.load(file)
        sys.path[:] = [*import_path(path), *working_directory(path)]  # before what it has may be needed
        model, examples, options = pickle.load(file)
    (directory / REQUEST).unlink()  # as large as the model
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        given = examples if len(examples) > 1 else examples[0]
        fast = optimize(model, given, **{"frontend": "one-graph"} | options | {"progress": None})
        if not isinstance(fast, Optimized):
            why = fast.report.frontend
            raise GraphBreakError(
                "only a model captured as one graph can be compiled in the background",
                why=why,
                fix="pass background=False",
            )
        found = _answer(fast, model, directory)
    except TsoptError as error:
        found = error
    write(directory / ANSWER, found)


def _answer(fast: Optimized, model: Callable[..., Any], directory: Path) -> Answer:
    executable = fast.executable
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    if executable is None:
        return Answer(fast.report, tuple(names[id(tensor)] for tensor in fast.program.state.values()))
    written = tuple(names[id(tensor)] for tensor in executable.state)
    # The nesting goes into the answer: bundles hold no objects.
    flat = executable.called_as(executable.signature.flat())
    save(flat, directory / BUNDLE, model, fast.example, fast.report)
    returned = tuple(names.get(id(tensor)) for tensor in executable.returned_weights)
    return Answer(fast.report, written, returned, executable.signature, may_draw(executable))


def _end_with_the_caller(directory: Path) -> None:
    sys.stdin.buffer.read()
    for pid in descendants(os.getpid()):
        kill(pid)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
