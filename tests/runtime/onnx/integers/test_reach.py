"""How far sizes may grow after a program was compiled for smaller ones."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tsopt
from tsopt.runtime.onnx.integers.engine_differences import OPENVINO
from tsopt.runtime.onnx.integers.narrow_integers import examine
from tsopt.runtime.onnx.integers.reach import reach

pytestmark = pytest.mark.filterwarnings("ignore")


def captured(model, kind, text="n[1..24]"):
    return tsopt.capture(model, torch.zeros(1, 12, dtype=kind), dynamic={"x": {1: text}})


def verdict(program):
    found = examine(program, OPENVINO, check_indices=True)
    return found.refused, found.bounds


def test_sums_end_where_they_no_longer_fit():
    program = captured(lambda x: x.sum(1), torch.int64)
    assert reach(program, verdict) == {"n": 384}, "2^15 * 384 < 2^24, which OpenVINO represents; twice that is not"


def test_what_no_size_changes_may_grow_far():
    assert reach(captured(lambda x: x * 2, torch.float32), verdict) == {"n": 24 << 10}


def test_a_range_without_an_end_was_examined_without():
    assert reach(captured(lambda x: x * 2, torch.float32, "n"), verdict) == {}
    assert reach(tsopt.capture(lambda x: x * 2, torch.zeros(2)), verdict) == {}


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is an extra")
def test_openvino_says_so_of_what_it_compiles():
    run = tsopt.compile(captured(lambda x: x.sum(1), torch.int64), "openvino")
    assert run.highest == {"n": 384}
    assert run.called_as(run.signature).highest == {"n": 384}


def test_onnx_runtime_says_so_too():
    assert tsopt.compile(captured(lambda x: x * 2, torch.float32), "onnxruntime").highest == {"n": 24 << 10}
