"""Convolutions of a CUDA graph: in the faster of two memory formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import IMAGE, Convolutions, recorded
from tsopt.runtime.backends import cudagraph
from tsopt.runtime.backends.cudagraph import CudaGraphBackend
from tsopt.runtime.bundles.opening import open_bundle


@pytest.fixture
def faster(imitation, monkeypatch):
    """Sets the seconds that the two memory formats take. Counts what is recorded."""
    layouts = []
    real = cudagraph.Recorded

    def record(forward, inputs):
        layouts.append(len(layouts))
        return real(forward, inputs)

    monkeypatch.setattr(cudagraph, "Recorded", record)
    times = iter([1.0, 1.0])

    def said(*seconds):
        nonlocal times
        times = iter(seconds)

    monkeypatch.setattr(cudagraph, "_seconds", lambda recorded: next(times))
    said.recorded = layouts
    return said


@pytest.mark.parametrize(("seconds", "last"), [((1.0, 0.9), True), ((1.0, 0.99), False), ((1.0, 1.1), False)])
def test_the_faster_layout_is_taken_and_stored(faster, seconds, last):
    faster(*seconds)
    model = Convolutions()
    made = recorded(model, IMAGE)
    assert made.options == {"precision": "fp32", "channels_last": last}
    assert ("convolutions in channels_last" in made.notes) is last
    found = made(IMAGE)
    torch.testing.assert_close(found, model(IMAGE).detach())
    assert found.is_contiguous(), "as the caller is used to"


@pytest.mark.parametrize("last", [True, False])
def test_a_layout_that_is_asked_for_is_the_only_one(faster, last):
    made = CudaGraphBackend(channels_last=last).compile(tsopt.capture(Convolutions(), (IMAGE,)))
    assert (len(faster.recorded), made.options["channels_last"]) == (1, last)


@pytest.mark.parametrize("end", [lambda y: y.view(2, -1), lambda y: torch.as_strided(y, (2, 2), (1, 1))])
def test_where_views_need_the_layout_it_stays(faster, end):
    faster(1.0, 0.1)
    model = Convolutions(end)
    made = recorded(model, IMAGE)
    assert made.options["channels_last"] is False
    torch.testing.assert_close(made(IMAGE), model(IMAGE).detach())


def test_without_convolutions_there_is_one_layout(faster):
    recorded(nn.Linear(3, 2).eval(), torch.ones(1, 3))
    assert len(faster.recorded) == 1


def test_a_bundle_is_recorded_again_in_its_layout_and_precision(faster, monkeypatch, tmp_path):
    faster(1.0, 0.5)
    made = CudaGraphBackend(precision="tf32").compile(tsopt.capture(Convolutions(), (IMAGE,)))
    made.save(tmp_path)
    opened = []
    monkeypatch.setattr(CudaGraphBackend, "unsupported", lambda self, program: [])  # on the CPU
    monkeypatch.setattr(CudaGraphBackend, "compile", lambda self, program: opened.append(self) or made)
    open_bundle(tmp_path, "cudagraph", made.options, made.signature, trust=False)
    assert opened == [CudaGraphBackend(precision="tf32", channels_last=True)]
