"""Chains of moves around axes of size 1 and 0: every pass keeps the invariants and the values."""

from __future__ import annotations

import pytest
import torch

from tests.passes.random_layouts import chain
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes import STANDARD

MISTAKEN = (233, 266)  # a convolution behind, whose layout depends on a stride of an axis of size 1


def check(seed: int) -> None:
    function, x = chain(seed)
    before = capture(function, x)
    after, _ = run(before, STANDARD)
    with torch.no_grad():
        (wanted,), (found,) = (p.module()(x.clone(memory_format=torch.preserve_format)) for p in (before, after))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"seed {seed}")
    # Not the layout: torch's fake reshape gives axes of size 1 other strides than its real one.


@pytest.mark.parametrize("part", range(8))
def test_moves_around_axes_of_size_one(part, fuzz_factor):
    for seed in range(part * 10_000, part * 10_000 + 4 * fuzz_factor):
        check(seed)


@pytest.mark.parametrize("seed", MISTAKEN)
def test_a_layout_that_depends_on_a_stride_of_size_one_is_kept(seed):
    check(seed)
