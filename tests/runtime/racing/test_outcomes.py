"""How candidates end, and whose doing it was."""

from __future__ import annotations

import errno
import warnings

import pytest
import torch
from google.protobuf.message import EncodeError
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

import tsopt
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.outcomes import ending_of, stopped
from tsopt.runtime.racing.row import Row

EAGER = Row("eager")


def caused(error: BaseException) -> tsopt.BackendError:
    made = tsopt.BackendError("it cannot be compiled")
    made.__cause__ = error
    return made


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA"), "out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
            "out of memory",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (RuntimeError("Failed to allocate memory for requested buffer of size 8"), "out of memory"),
        (caused(MemoryError()), "out of memory"),
        (caused(RuntimeException("Exception during initialization: std::bad_alloc")), "out of memory"),
        (caused(RuntimeException("Non-zero status code returned")), "failed"),
        (caused(EncodeError("Failed to serialize proto")), "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "system error"),
        (OSError(errno.EMFILE, "Too many open files"), "system error"),
        (RuntimeError("can't start new thread"), "system error"),
        (caused(FileNotFoundError("g++")), "system error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "failed"),
        (ValueError("out of memory"), "failed"),
        (tsopt.BackendError("this op is too new"), "failed"),
        (ImportError("no module"), "failed"),
    ],
    ids=str,
)
def test_the_system_and_the_model_are_told_apart(error, ending):
    assert ending_of(error) == ending


@pytest.mark.parametrize("status", outcomes.LOST)
def test_candidates_that_the_machine_has_stopped_are_named_with_their_reasons(status):
    assert stopped((EAGER, Row("x", status, "why"), Row("y", status))) == f"x {status} (why); y {status}"


@pytest.mark.parametrize(
    ("rows", "is_stopped"),
    [
        ((), False),  # nobody was to race
        ((Row("x"),), False),
        ((Row("x", "wrong"),), False),
        ((Row("x", "failed"),), False),
        ((Row("x", "unsupported"),), False),
        ((Row("x", "no gain"), Row("y", "unsupported")), False),
        ((Row("x", "crashed"), Row("y")), False),
        ((Row("x", "crashed"), Row("y", "wrong")), False),
        ((Row("x", "crashed"), Row("y", "unsupported")), True),
        ((Row("x", "missing"),), True),
        ((Row("x", "missing"), Row("y", "crashed")), True),
        ((Row("x", "missing"), Row("y", "unsupported")), False),
        ((Row("x", "missing"), Row("y", "unsupported"), Row("z", "timed out")), True),
    ],
)
def test_who_was_tried_or_refused_the_model_was_not_stopped(rows, is_stopped):
    assert bool(stopped((EAGER, *rows))) == is_stopped


def test_the_warning_is_at_the_line_of_the_caller():
    with pytest.warns(outcomes.NoCandidate, match="all of them") as seen:
        outcomes.warn("all of them", outcomes.NoCandidate)
    assert seen[0].filename == __file__


def test_the_warning_can_be_silenced_by_its_class():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", outcomes.NoCandidate)
        outcomes.warn("all of them", outcomes.NoCandidate)
