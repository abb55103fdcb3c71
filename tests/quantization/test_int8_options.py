"""Which candidates a lower precision adds, and what is refused."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.quantize.models import mlp
from tests.quantization.helpers import quantized, records, rows
from tsopt.errors import UsageError
from tsopt.runtime.backends.candidate import Candidate, candidates_for


def test_data_without_a_precision_is_an_error():
    with pytest.raises(UsageError, match="calibration, metric, max_drop and keep_float have no effect"):
        tsopt.optimize(mlp(4, 4), rows(1, 4)[0], calibration=rows(2, 4))


def test_data_adds_the_calibrated_candidates(monkeypatch):
    monkeypatch.setattr("tsopt.runtime.backends.candidate.computes_in_bfloat16", lambda: False)

    def keys(precision, calibrated):
        found = candidates_for(("onednn", "onnxruntime", "openvino"), precision, calibrated=calibrated)
        return [candidate.key for candidate in found if "int8" in candidate.key]

    own = ["onednn?precision=int8", "onnxruntime?precision=int8-weights", "openvino?precision=int8-weights"]
    static = ["onnxruntime?precision=int8-static", "openvino?precision=int8-static"]
    assert keys("int8", False) == own
    assert keys("int8", True) == keys("auto", True) == [*own, *static]
    assert keys("auto", False) == []
    assert keys("bf16", True) == []


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_other_ops_are_tried_in_bfloat16_where_the_cpu_has_it(monkeypatch, calibrated):
    def keys():
        found = candidates_for(("onnxruntime", "openvino"), "int8", calibrated=calibrated)
        return [candidate.key for candidate in found if "other_ops" in candidate.key]

    monkeypatch.setattr("tsopt.runtime.backends.candidate.computes_in_bfloat16", lambda: True)
    variants = ("int8-weights", "int8-static")[: 1 + calibrated]
    assert keys() == [f"openvino?other_ops=bf16&precision={variant}" for variant in variants]
    assert [Candidate.parse(key).key for key in keys()] == keys()
    assert Candidate.parse(keys()[0]).title == "OpenVINO, other ops bf16, precision int8-weights"
    assert Candidate.parse(keys()[0]).in_full_precision() == Candidate("openvino")
    monkeypatch.setattr("tsopt.runtime.backends.candidate.computes_in_bfloat16", lambda: False)
    assert keys() == []


def test_compile_cannot_calibrate():
    with pytest.raises(UsageError, match="int8-static needs calibration data"):
        tsopt.compile(tsopt.capture(mlp(4, 4), rows(1, 4)[0]), "openvino?precision=int8-static")


def test_a_candidate_in_full_precision():
    for key in ("openvino?precision=int8-static", "openvino?precision=bf16", "openvino"):
        assert Candidate.parse(key).in_full_precision() == Candidate("openvino")
    assert Candidate.parse("onnxruntime?threads=1").in_full_precision().key == "onnxruntime?threads=1"


@pytest.mark.parametrize("keep_float", ["10", None, 3, [nn.ReLU()], b"head"])
def test_patterns_are_a_collection_of_texts(keep_float):
    with pytest.raises(UsageError, match="keep_float must be a tuple of module paths"):
        tsopt.optimize(mlp(4, 4), torch.randn(1, 4), precision="int8", keep_float=keep_float)


def test_patterns_without_a_lower_precision_are_an_error():
    with pytest.raises(UsageError, match="keep_float have no effect without a lower precision"):
        tsopt.optimize(mlp(4, 4), torch.randn(1, 4), keep_float=("0",))


@pytest.mark.parametrize("max_drop", ["1%", True, float("nan")])
def test_a_drop_is_a_number(max_drop):
    with pytest.raises(UsageError, match="max_drop must be 0 or more"):
        tsopt.optimize(mlp(4, 4), torch.randn(1, 4), precision="int8", max_drop=max_drop)


@pytest.mark.parametrize(
    ("precision", "calibrated"), [("auto", True), ("int8", True), ("bf16", False), ("fp16", False)]
)
def test_engines_that_lower_all_layers_together_do_not_race_with_layers_in_float32(monkeypatch, precision, calibrated):
    monkeypatch.setattr("tsopt.runtime.backends.candidate.computes_in_bfloat16", lambda: True)

    def keys(keep_float):
        found = candidates_for(
            *(("eager", "onednn", "openvino", "cudagraph"), precision), calibrated=calibrated, keep_float=keep_float
        )
        return {candidate.key for candidate in found if candidate.precision != "fp32"}

    left_out = keys(False) - keys(True)
    assert left_out
    assert all("other_ops=bf16" in key or "openvino?precision=" in key or key.endswith("tf32") for key in left_out)
    assert not any("other_ops" in key or key == "openvino?precision=bf16" for key in keys(True))
    assert keys(True), "those that run what a pass has lowered"


@pytest.mark.parametrize("key", ["openvino?precision=bf16", "openvino?other_ops=bf16&precision=int8-static"])
def test_an_engine_that_is_asked_for_and_cannot_keep_layers_is_refused(key):
    with pytest.raises(UsageError, match=r"openvino\?.*bf16.* cannot keep layers in float32") as caught:
        tsopt.optimize(mlp(4, 4), rows(1, 4)[0], backends=(key,), calibration=rows(2, 4), keep_float=("0",))
    assert caught.value.fix == "leave out this candidate, or keep_float"


@pytest.mark.parametrize(
    ("precision", "backend", "said", "fix"),
    [
        ("bf16", "openvino", "bf16", "add one of: .*onednn.*"),
        ("tf32", "cudagraph", "tf32", "leave out keep_float"),
        ("auto", "openvino", "a lower precision", "add one of: .*onednn.*"),
    ],
)
def test_a_precision_in_which_nobody_keeps_layers_is_refused(precision, backend, said, fix):
    with pytest.raises(UsageError, match=f"no selected backend supports {said} with some layers in float32\n.*{fix}"):
        candidates_for((backend,), precision, keep_float=True)


def test_a_third_of_the_time_is_for_reading(monkeypatch):
    class Slow(list):
        def __getitem__(self, number):
            now[0] += 1
            return super().__getitem__(number)

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = quantized(mlp(32, 32), rows(1)[0], calibration=Slow(rows(100)), seconds=60.0)
    assert found.calibration == "20 inputs; more would take too long for the budget"
    assert records(found)
