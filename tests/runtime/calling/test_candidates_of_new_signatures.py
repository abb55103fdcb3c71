"""Which candidates are tried for calls with other sizes than before, and which of them serves these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import OPTIONS, outcomes
from tsopt import request as request_module
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.speedup import Timing


@pytest.fixture
def paced(monkeypatch):
    """Races of two engines at these times, without others, and which candidates took part in each."""
    times = {"eager": 2.0, "ONNX Runtime": 1.0, "TorchScript": 1.5, "eager + passes": 3.0}
    real, asked = request_module.race, []

    def race(model, captured, programs, example, settings, **options):
        asked.append([candidate.key for candidate in settings.candidates])
        return real(model, captured, programs, example, settings, **options)

    monkeypatch.setattr(request_module, "race", race)
    monkeypatch.setattr(
        race_module, "measure", lambda calls, *_, **__: {name: Timing((times[name],) * 8) for name in calls}
    )
    return times, asked


def test_where_the_winner_is_wrong_the_next_one_is_taken(paced, monkeypatch):
    _, asked = paced
    raced = request_module.race

    def wrong_for_new_signatures(*args, **options):
        found = raced(*args, **options)
        if asked[1:] == [["onnxruntime"]]:
            rows = tuple(replace(row, status="wrong", reason="other values") for row in found.rows)
            return replace(found, rows=rows, executable=None)
        return found

    monkeypatch.setattr(request_module, "race", wrong_for_new_signatures)
    monkeypatch.setattr(request_module, "COMPILED_TOGETHER", -1.0)
    model = nn.Linear(6, 3).eval()
    fast = tsopt.optimize(model, torch.randn(4, 6), **OPTIONS | {"backends": ("onnxruntime", "torchscript")})
    x = torch.randn(6, 6)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert asked == [["onnxruntime", "torchscript"], ["onnxruntime"], ["torchscript"]]


def test_for_many_sizes_those_that_compile_in_seconds_race_together(paced):
    """One that was only as fast as eager for a single size may be the fastest where sizes change."""
    times, asked = paced
    times["TorchScript"] = 2.0
    model, options = nn.Linear(6, 3).eval(), OPTIONS | {"backends": ("onnxruntime", "torchscript", "eager")}
    fast = tsopt.optimize(model, torch.randn(4, 6), **options)
    times |= {"TorchScript": 1.0, "ONNX Runtime": 3.0}
    x = torch.randn(6, 6)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert asked == [["onnxruntime", "torchscript", "eager"], ["onnxruntime", "torchscript"]]
    assert outcomes(fast)[0].startswith("captured for torchscript")
