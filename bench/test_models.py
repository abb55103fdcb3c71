"""Eager against compiled, one benchmark each, grouped by model. `make bench` runs it and keeps the numbers."""

from __future__ import annotations

import functools

import pytest
import torch

import tsopt
from bench.models import MODELS
from tsopt.compiler.protect import protected

BACKENDS = ("eager", "torchscript", "onnxruntime")


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> tuple[torch.nn.Module, tsopt.Example, tsopt.Program]:
    model, example = MODELS[name].load()
    return model, example, tsopt.transform(tsopt.capture(model, example))


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
@pytest.mark.parametrize("name", list(MODELS))
def test_speed(benchmark, name: str, backend: str) -> None:
    """`none` is the user's model as it is; `eager` the optimized program run by torch."""
    model, example, program = loaded(name)
    call = model if backend == "none" else tsopt.compile(program, backend)
    benchmark.group = name
    with protected(model), torch.inference_mode():
        for _ in range(3):
            call(*example.args, **example.kwargs)
        benchmark.pedantic(call, args=example.args, kwargs=example.kwargs, rounds=15, iterations=1, warmup_rounds=2)
