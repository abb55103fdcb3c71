"""Calibration data whose memory is written again: calls keep what it held."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compiler.calls.calibrated import first, read, rows
from tsopt.compiler.calls.calibration_again import readable_again


class Reused:
    """A loader that fills the same memory with each item."""

    def __init__(self, buffer, count, wrapped=lambda buffer: buffer):
        self.buffer, self.count, self.wrapped = buffer, count, wrapped

    def __iter__(self):
        for i in range(self.count):
            self.buffer[:] = i
            yield self.wrapped(self.buffer)


class Numbered(Reused):
    __iter__ = None

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.buffer[:] = i
        return self.buffer


@pytest.mark.parametrize("make", [np.empty, torch.empty], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "data_of",
    [
        lambda buffer: Reused(buffer, 4),
        lambda buffer: iter(Reused(buffer, 4)),
        lambda buffer: Reused(buffer, 4, lambda x: (x, 7)),
        lambda buffer: Reused(buffer, 4, lambda x: {"input": x}),
        lambda buffer: Numbered(buffer, 4),
        lambda buffer: readable_again(iter(Reused(buffer, 4))),
        lambda buffer: readable_again(iter(Reused(buffer, 4, lambda x: ({"input": x}, 7)))),
    ],
    ids=["loader", "generator", "targets", "keywords", "dataset", "list", "nested list"],
)
@pytest.mark.parametrize("count", [1, 2, 3], ids=lambda count: f"{count} rows")
def test_a_loader_may_fill_the_same_memory_again(make, data_of, count):
    found = read(data_of(make((count, 3), dtype=(np if make is np.empty else torch).float32)))
    given = sorted(i for i in range(4) for _ in range(count))
    assert sorted(torch.cat(first(found))[:, 0].tolist()) == given[: len(given) // 2 * 2]


def test_what_is_done_to_an_input_later_does_not_reach_the_calls():
    data = [rows(2), rows(2, 6)]
    found = read(data)
    data[0].zero_()
    assert torch.equal(first(found)[0], rows(2))
