"""Engines in a fork: their threads are the parent's."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import textwrap
import weakref

import onnxruntime
import pytest
import torch

import tsopt
from tests.forks import FORKS, PATIENCE, in_a_fork

pytestmark = FORKS


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_engine_computes_without_its_threads(mlp_program, mlp_input, backend):
    pytest.importorskip(backend)
    fast = tsopt.compile(mlp_program, backend, threads=2)
    wanted = fast(mlp_input)
    assert in_a_fork(lambda: torch.equal(fast(mlp_input), wanted))


def test_an_engine_is_freed_by_the_process_alone_that_has_its_threads(mlp_program, monkeypatch):
    made = []
    real = onnxruntime.InferenceSession

    def session(*args, **options):
        found = real(*args, **options)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    held = [tsopt.compile(mlp_program, "onnxruntime", threads=2)]

    def is_there_after_the_last_use():
        held.clear()
        gc.collect()
        return made[0]() is not None

    assert in_a_fork(is_there_after_the_last_use)
    assert not is_there_after_the_last_use()


def test_what_cannot_compute_without_threads_says_so(mlp_program, mlp_input):
    fast = tsopt.compile(mlp_program, "onnxruntime?parallel=True", threads=2)
    wanted = fast(mlp_input)

    def says_so():
        for called in (fast, fast.called_as(fast.signature)):
            with pytest.raises(tsopt.BackendError, match="the option parallel=True needs threads"):
                called(mlp_input)
        return True

    assert in_a_fork(says_so)
    assert torch.equal(fast(mlp_input), wanted)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library can be told")
def test_a_fork_of_a_process_with_an_engine_ends():
    script = """
        import os, sys
        import torch, tsopt
        fast = tsopt.compile(tsopt.capture(torch.nn.Linear(4, 2).eval(), torch.ones(1, 4)), "onnxruntime", threads=2)
        child = os.fork()
        if not child:
            print("from the child")
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=True)
    assert found.stdout.split("\n") == ["from the child", "7", ""]
