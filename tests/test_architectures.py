"""Tiny models of many architectures: right by torch and by ONNX Runtime or refused by name, and left as they were.

The first of each kind that is one graph, three of them in every run, all with TSOPT_FUZZ=1; TSOPT_ARCHITECTURES
chooses: `3/8`, `all`, or names. The whole table, with what `optimize` makes of each, is bench/results/coverage.md.
"""

from __future__ import annotations

import os

import pytest
import torch
import transformers

import tsopt
from bench.architectures import ARCHITECTURES
from bench.untouched import changed, state_of
from tsopt.runtime.checking.accuracy import Oracle

pytestmark = pytest.mark.filterwarnings("ignore")


def chosen():
    wanted = os.environ.get("TSOPT_ARCHITECTURES") or ("all" if os.environ.get("TSOPT_FUZZ") else "")
    if not wanted:
        whole = [(item.kind, name) for name, item in ARCHITECTURES.items() if name not in NOT_ONE_GRAPH]
        return list(dict(reversed(whole)).values())
    if wanted == "all":
        return list(ARCHITECTURES)
    if "/" in wanted:
        place, count = map(int, wanted.split("/"))
        return list(ARCHITECTURES)[place::count]
    return wanted.split(",")


VALUES = "the model has data-dependent control flow"
NUMBER = "the model uses a Python number computed from tensor values"
EXPORT = "torch.export cannot capture the model"
CONVERTED = "the model converts its own weights while it runs"
# What is not a single graph, and by which words it is refused. This list may only shrink.
NOT_ONE_GRAPH = {
    "longformer": VALUES,
    "reformer": NUMBER,
    "switch_transformers": CONVERTED,
    "led": VALUES,
    "encodec": VALUES,
    "vilt": VALUES,
    "llava": NUMBER,
    "time_series_transformer": VALUES,
    "informer": EXPORT,
    "autoformer": EXPORT,
}
# What is not verified after the passes, and why: outputs or inputs that only eager gives. May only shrink.
NOT_BY_TORCH: dict[str, str] = {}
# What ONNX Runtime does not take, or answers otherwise, and why. May only shrink.
NOT_BY_ONNX_RUNTIME = NOT_BY_TORCH | {
    "bit": "exceed rtol",
}


def test_there_are_enough_and_the_lists_are_about_them():
    assert len(ARCHITECTURES) >= 80
    assert len({item.kind for item in ARCHITECTURES.values()}) >= 10
    assert {*NOT_ONE_GRAPH, *NOT_BY_TORCH, *NOT_BY_ONNX_RUNTIME} <= set(ARCHITECTURES)
    assert len(NOT_ONE_GRAPH) + len(NOT_BY_TORCH) <= 0.12 * len(ARCHITECTURES)
    assert len(NOT_ONE_GRAPH) + len(NOT_BY_ONNX_RUNTIME) <= 0.2 * len(ARCHITECTURES)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("name", chosen())
def test_it_is_right_or_refused_by_name_and_left_as_it_was(name, monkeypatch):
    # torch.compile, in a test before, turns these checks off, which is what time_series_transformer breaks at.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    transformers.logging.set_verbosity_error()
    model, call = ARCHITECTURES[name].load()
    before = state_of(model, call)
    if name in NOT_ONE_GRAPH:
        with pytest.raises(tsopt.GraphBreakError, match=NOT_ONE_GRAPH[name]):
            tsopt.capture(model, call)
        assert not changed(before, state_of(model, call))
        return
    program = tsopt.capture(model, call)
    better = tsopt.transform(program)
    oracle = Oracle(model, call, program)
    for backend, known in (("eager", NOT_BY_TORCH), ("onnxruntime", NOT_BY_ONNX_RUNTIME)):
        failure = judged(oracle, better, backend)
        assert bool(failure) == (name in known), failure
        assert known.get(name, "") in failure
    assert not changed(before, state_of(model, call))
    if name not in NOT_BY_TORCH:
        torch.manual_seed(1)
        other = tsopt.example(**ARCHITECTURES[name].call())
        verdict = Oracle(model, other, program, seed=7, few=True).judge(tsopt.compile(better, "eager"))
        assert verdict.ok, verdict


def judged(oracle, program, backend):
    """Why a backend cannot have the program; nothing where it is right."""
    try:
        verdict = oracle.judge(tsopt.compile(program, backend))
    except tsopt.BackendError as error:
        return str(error)
    return "" if verdict.ok else verdict.reason
