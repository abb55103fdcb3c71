"""How long training takes, by estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.profiling.kernels import Timed
from tsopt.runtime.profiling.rows import profile_of
from tsopt.runtime.profiling.training import TrainingEstimate, parse_training
from tsopt.runtime.profiling.work import Work


@pytest.fixture
def profiled():
    """A call of 8 samples takes 4 ms in torch and 1 ms in an engine, and multiplies 2 million times."""
    found = profile_of("Net", {"eager + passes": Timed((), 4.0), "engine": Timed((), 1.0)}, batch=8)
    return replace(found, work=Work(macs=2_000_000))


def test_three_passes_for_each_sample_at_the_rate_of_torch(profiled):
    found = profiled.with_training(50_000, 10).training
    assert found.macs == 250_000
    assert found.rate == 5e8
    assert found.seconds == 3 * 0.0005 * 50_000 * 10
    assert profiled.training is None


def test_it_is_said_to_be_an_estimate_and_what_it_leaves_out(profiled):
    said = str(profiled.with_training(50_000, 10))
    assert said.endswith(
        "training on 50,000 samples for 10 epochs would take about 12.5 minutes: an estimate, from 3 passes of "
        "0.25 MMACs for each sample at 500 MMACs/s, as torch reaches here with a batch of 8; the optimizer, the "
        "loading of data and communication are not included"
    )
    assert said.splitlines()[-1] in profiled.with_training(50_000, 10).markdown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.5, "0.5 seconds"),
        (119, "119 seconds"),
        (150, "2.5 minutes"),
        (9_000, "2.5 hours"),
        (864_000, "10 days"),
        (1e9, "11,574 days"),
    ],
)
def test_the_unit_fits(seconds, said):
    assert f"about {said}:" in str(TrainingEstimate(1, 1, seconds * 1e6 / 3, 1e6, 1))


@pytest.mark.parametrize(
    ("count", "said"),
    [(250_000, "0.25 M"), (1.814e9, "1.81 G"), (4.5e12, "4.5 T"), (2e15, "2,000 T")],
)
def test_large_numbers_have_prefixes(count, said):
    assert f"3 passes of {said}MACs" in str(TrainingEstimate(1, 1, count, 1e9, 1))
    assert f"at {said}MACs/s" in str(TrainingEstimate(1, 1, 1e9, count, 1))


def test_a_batch_that_is_not_known_is_not_made_up(profiled):
    found = replace(profiled, batch=None).with_training(10, 1).training
    assert found.macs == 2_000_000
    assert "with one call for each sample;" in str(found)


def test_it_is_in_the_json(profiled):
    assert profiled.to_json()["training"] is None
    found = profiled.with_training(100, 2).to_json()["training"]
    assert found == {
        "samples": 100,
        "epochs": 2,
        "macs_per_sample": 250_000,
        "macs_per_second": 5e8,
        "batch": 8,
        "seconds": 0.3,
    }


def test_what_cannot_be_estimated_is_told(profiled):
    with pytest.raises(tsopt.UsageError, match="cannot be estimated") as caught:
        replace(profiled, work=Work()).with_training(1, 1)
    assert "multiply-accumulates" in caught.value.why
    for numbers in ((0, 1), (1, 0)):
        with pytest.raises(tsopt.UsageError, match="must be at least 1"):
            profiled.with_training(*numbers)


@pytest.mark.parametrize("text", ["50000", "50000x", "x10", "0x10", "5e4x10", "50000x10x2", "-1x2", "", "50,000x10"])
def test_other_texts_are_refused(text):
    with pytest.raises(tsopt.UsageError, match="is not SAMPLESxEPOCHS") as caught:
        parse_training(text)
    assert "--training 50000x10" in caught.value.fix


def test_samples_and_epochs_are_read():
    assert parse_training("50000x10") == (50_000, 10)


@pytest.mark.parametrize(
    ("shapes", "batch"), [([(8, 4)], 8), ([(8, 4), (8,)], 8), ([(8, 4), (2, 4)], None), ([()], None)]
)
def test_a_batch_is_the_first_axis_of_all_inputs(shapes, batch):
    class Sum(nn.Module):
        def forward(self, *values):
            return sum(value.sum() for value in values)

    fast = tsopt.optimize(Sum(), tuple(torch.ones(shape) for shape in shapes), backends=("eager",), seconds=0.05)
    assert fast.profile().batch == batch
