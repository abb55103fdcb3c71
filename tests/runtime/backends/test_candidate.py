"""Candidates as values: read from a text and written as one, called by a title, and which of them race."""

from __future__ import annotations

import importlib.util

import pytest

import tsopt
from tsopt.runtime.backends.candidate import Candidate, candidates_for, precision_in

USUAL = ["eager", "onednn", "torchscript", "onnxruntime", "onnxruntime?threads=1"]


def keys(*asked, **options):
    return [candidate.key for candidate in candidates_for(*asked, **options)]


@pytest.fixture
def openvino_is_installed(monkeypatch):
    there = importlib.util.find_spec

    def say(installed):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed if name == "openvino" else there(name))

    return say


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("eager", "eager", {}),
        ("onnxruntime?threads=1", "onnxruntime", {"threads": 1}),
        ("onnxruntime?threads=2&fused=false&opset=none", "onnxruntime", {"threads": 2, "fused": False, "opset": None}),
        ("a.b:C?mode=fast&depth=-1", "a.b:C", {"mode": "fast", "depth": -1}),
    ],
)
def test_a_text_is_read_and_written_again(spec, name, options):
    found = Candidate.parse(spec)
    assert (found.backend, dict(found.options)) == (name, options)
    assert found.key == spec
    assert Candidate.parse(found.key) == found


def test_an_option_without_a_value_is_refused():
    with pytest.raises(tsopt.UsageError, match=r"the option 'threads' in .* has no value") as caught:
        Candidate.parse("onnxruntime?threads")
    assert caught.value.fix == "write onnxruntime?threads=VALUE"


def test_a_title_names_the_engine_and_what_was_asked_of_it():
    assert Candidate.parse("onnxruntime?threads=1").title == "ONNX Runtime, 1 thread"
    assert Candidate.parse("onnxruntime?threads=2").title == "ONNX Runtime, 2 threads"
    assert Candidate.parse("a.b:C?mode=fast").title == "a.b:C, mode fast"
    with pytest.raises(tsopt.UsageError, match="unknown backend 'tensorrt'"):
        Candidate("tensorrt").title  # noqa: B018


def test_a_precision_is_a_variant_of_the_program_or_an_option_of_the_engine():
    assert Candidate.parse("eager?precision=bf16") == Candidate("eager", variant="bf16")
    assert Candidate.parse("openvino?precision=bf16") == Candidate("openvino", (("precision", "bf16"),))
    assert Candidate.parse("eager?precision=fp32") == Candidate("eager")
    assert Candidate.parse("a.b:C?precision=int4") == Candidate("a.b:C", (("precision", "int4"),))
    assert {Candidate.parse(f"{name}?precision=bf16").precision for name in ("eager", "openvino")} == {"bf16"}


def test_who_is_named_twice_races_once():
    assert keys(("eager", "onednn", "eager?precision=fp32")) == ["eager", "onednn"]


def test_what_compiles_in_seconds_races_unasked_and_openvino_where_it_is_installed(openvino_is_installed):
    openvino_is_installed(None)
    assert keys(None) == USUAL
    openvino_is_installed(True)
    assert keys(None) == [*USUAL, "openvino"]


def test_all_is_every_engine_whether_it_is_installed_or_not(openvino_is_installed):
    openvino_is_installed(None)
    assert keys("all") == [*USUAL, "openvino", "inductor"]


def test_cuda_graphs_race_for_models_on_a_gpu_alone():
    assert [key for key in keys(None, on_gpu=True) if key not in keys(None)] == ["cudagraph"]
    more = [key for key in keys("all", on_gpu=True) if key not in keys("all")]
    assert more == ["inductor?cuda_graph=true", "cudagraph"]
    assert keys(("eager",), on_gpu=True) == ["eager"]


def test_lower_precisions_race_when_they_are_asked_for():
    assert not any("precision" in key for key in keys(None))
    found = keys(("eager", "onednn", "torchscript", "onnxruntime?threads=1"), "bf16")
    assert found[4:] == ["eager?precision=bf16", "onednn?precision=bf16"]
    assert set(keys(("eager",), "auto")) == {"eager", "eager?precision=bf16", "eager?precision=fp16"}
    assert "cudagraph?precision=tf32" in keys(("cudagraph",), "auto")
    assert Candidate.parse(found[-1]).title == "torch + oneDNN, precision bf16"


def test_a_precision_that_is_asked_for_may_be_that_of_a_backend_that_is_named():
    assert keys(("onednn?precision=bf16",), "bf16") == ["onednn?precision=bf16"]
    assert keys(("torchscript", "openvino?precision=int8-static"), "int8", calibrated=True)[1:] == [
        "openvino?precision=int8-static"
    ]
    with pytest.raises(tsopt.UsageError, match="no selected backend supports bf16"):
        keys(("torchscript", "onednn?precision=fp16"), "bf16")


def test_the_precision_in_a_key():
    assert precision_in("openvino?precision=int8-weights&other_ops=bf16") == "int8-weights"
    assert [precision_in(key) for key in ("model", "parts", "my_int8.b:C", "onnxruntime?threads=1")] == ["fp32"] * 4
