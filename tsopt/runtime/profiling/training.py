"""An estimate of how long it takes to train a model, from a forward pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tsopt.errors import UsageError
from tsopt.runtime.rendering import three_digits

# A backward pass multiplies about twice as much as a forward pass: for gradients of inputs, and of weights. See section
# 2.1 of Kaplan et al., "Scaling Laws for Neural Language Models", 2020, arXiv:2001.08361.
PASSES = 3
UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60))
PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6))
LEAST = 2  # of a unit, to be the one that is shown
NOT_INCLUDED = "the optimizer, the loading of data and communication are not included"
ASKED = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """How long training takes, if it multiplies as fast as forward passes do.

    Attributes:
        samples: in the training data.
        epochs: how many times each sample is used.
        macs: multiply-accumulates of a forward pass for one sample.
        rate: multiply-accumulates per second of torch's own forward passes on this machine.
        batch: samples in each of these; None where the inputs do not agree on a first axis, and a call counts as one.
    """

    samples: int
    epochs: int
    macs: float
    rate: float
    batch: int | None

    @property
    def seconds(self) -> float:
        return PASSES * self.macs * self.samples * self.epochs / self.rate

    def __str__(self) -> str:
        batch = "one call for each sample" if self.batch is None else f"a batch of {self.batch}"
        return (
            f"training on {self.samples:,} samples for {self.epochs:,} epochs would take about "
            f"{_duration(self.seconds)}: an estimate, from {PASSES} passes of {_scaled(self.macs)}MACs for each "
            f"sample at {_scaled(self.rate)}MACs/s, as torch reaches here with {batch}; {NOT_INCLUDED}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "epochs": self.epochs,
            "macs_per_sample": self.macs,
            "macs_per_second": self.rate,
            "batch": self.batch,
            "seconds": self.seconds,
        }


def parse_training(text: str) -> tuple[int, int]:
    """(samples, epochs) of `50000x10`. Raises UsageError for anything else."""
    found = ASKED.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--training {text!r} is not SAMPLESxEPOCHS",
            fix="pass the number of samples and of epochs, for example --training 50000x10",
        )
    return int(found[1]), int(found[2])


def _duration(seconds: float) -> str:
    for name, size in UNITS:
        if seconds >= LEAST * size:
            return f"{three_digits(seconds / size)} {name}"
    return f"{three_digits(seconds)} seconds"


def _scaled(count: float) -> str:
    """`1.81 G` of 1,814,000,000."""
    prefix, size = next((item for item in PREFIXES if count >= item[1]), PREFIXES[-1])
    return f"{three_digits(count / size)} {prefix}"
