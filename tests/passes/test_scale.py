"""Large programs: the time that STANDARD takes grows with their size, not with its square, and no depth is too deep."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.passes.helpers import run
from tests.passes.programs import Builder, work
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import Values
from tsopt.passes import STANDARD

FUZZ = bool(os.environ.get("TSOPT_FUZZ"))
SMALL, LARGE = (1_000, 10_000) if FUZZ else (100, 1_000)
WORK = 5_000  # calls of functions for each node
LONGEST_VIEW = 50


def layers(calls: int) -> Program:
    """A deep network: layers, activations, and what passes take out of it."""
    b = Builder()
    x = b.input(torch.randn(4, 4))
    weight, bias = b.weight(torch.randn(4, 4)), b.weight(torch.randn(4))
    for number in range(calls // 12):
        x = b.call(aten.linear.default, x, weight, bias)
        x = b.call(aten.relu.default, b.call(aten.mul.Tensor, x, 1))
        x = b.call(aten.add.Tensor, b.call(aten.dropout.default, x, 0.5, False), 0.5)
        x = b.call(aten.transpose.int, b.call(aten.transpose.int, x, 0, 1), 0, 1)
        x = b.call(aten.add.Tensor, x, b.call(aten.mul.Tensor, bias, float(number)))
        x = b.call(aten.tanh.default, b.call(aten.clone.default, x))
        x = b.call(aten.reshape.default, x, [4, 4])
    return b.program(x)


def chain(step: Callable[[Builder, torch.fx.Node, int], torch.fx.Node], rows: int = 4) -> Callable[[int], Program]:
    """The same step again and again."""

    def make(calls: int) -> Program:
        b = Builder()
        x = b.input(torch.rand(rows, 4) + 0.5)
        for number in range(calls):
            x = step(b, x, number)
        return b.program(x)

    return make


def views(step: Callable[[Builder, torch.fx.Node, int], torch.fx.Node]) -> Callable[[int], Program]:
    """A chain of views, broken here and there: torch keeps for each view all of those that it was made of."""
    return chain(lambda b, x, n: step(b, x, n) if n % LONGEST_VIEW else b.call(aten.neg.default, x))


def moved_ones(b: Builder, x: torch.fx.Node, number: int) -> torch.fx.Node:
    """A permutation that only moves axes of size 1: as a reshape, it has other strides there."""
    x = b.call(aten.permute.default, b.call(aten.unsqueeze.default, x, 1), [0, 2, 1])
    return b.call(aten.tanh.default, b.call(aten.squeeze.dim, x, 2))


def branches(*, returned: bool) -> Callable[[int], Program]:
    """Eight calls a branch; joined in the end, or each returned."""

    def make(calls: int) -> Program:
        b = Builder()
        x = b.input(torch.randn(4, 4))
        ends = []
        for number in range(calls // 8):
            y = b.call(aten.linear.default, b.call(aten.mul.Tensor, x, 1), b.weight(torch.randn(4, 4)))
            y = b.call(aten.relu.default, b.call(aten.add.Tensor, y, float(number)))
            y = b.call(aten.view.default, b.call(aten.reshape.default, y, [16]), [4, 4])
            ends.append(b.call(aten.mul.Tensor, b.call(aten.sum.dim_IntList, y, [0]), 1))
        return b.program(*ends) if returned else b.program(b.call(aten.cat.default, ends))

    return make


def constants(calls: int) -> Program:
    """Half of the calls can be made ahead of time."""
    b = Builder()
    x, c = b.input(torch.randn(4)), b.weight(torch.randn(4))
    for number in range(calls // 2):
        c = b.call(aten.sin.default, b.call(aten.add.Tensor, c, float(number)) if number % 2 else c)
        x = b.call(aten.atan2.default, x, c)
    return b.program(x)


GRAPHS: dict[str, Callable[[int], Program]] = {
    "layers": layers,
    "branches joined": branches(returned=False),
    "branches returned": branches(returned=True),
    "constants": constants,
    "nothing to do": chain(lambda b, x, n: b.call(aten.sin.default, x)),
    "products": chain(lambda b, x, n: b.call(aten.mul.Tensor, x, 1.0 + n)),
    # Small terms: sums of large ones are left as they are, so that a longer chain would be another task.
    "sums": chain(lambda b, x, n: b.call(aten.add.Tensor, x, float(n % 3))),
    "nothing at all": chain(lambda b, x, n: b.call(aten.mul.Tensor, x, 1)),
    "transposes": views(lambda b, x, n: b.call(aten.transpose.int, x, 0, 1)),
    "reshapes": views(lambda b, x, n: b.call(aten.reshape.default, x, [16] if n % 2 == 0 else [4, 4])),
    "casts": chain(lambda b, x, n: b.call(aten.to.dtype, x, torch.float64 if n % 2 == 0 else torch.float32)),
    "gates": chain(lambda b, x, n: b.call(aten.mul.Tensor, x, b.call(aten.sigmoid.default, x))),
    "residuals": chain(lambda b, x, n: b.call(aten.add.Tensor, x, b.call(aten.relu.default, x))),
    "one row": chain(moved_ones, rows=1),
}


QUICK = ("layers", "branches joined", "constants", "nothing to do", "gates", "transposes", "one row")


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS if FUZZ else QUICK)
def test_ten_times_the_calls_are_about_ten_times_the_work(name):
    """Counted in calls of functions, which a busy machine does not change."""
    first, small, large = (GRAPHS[name](calls) for calls in (SMALL // 10, SMALL, LARGE))
    assert large.node_count >= 9 * small.node_count
    run(first, STANDARD)  # torch makes some things once and keeps them
    # The small one first: types of calls are kept, and the large one makes all calls of the small one.
    little = work(lambda: run(small, STANDARD))
    assert work(lambda: run(large, STANDARD)) <= 12 * little


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "branches joined", "branches returned"])
def test_a_large_program_is_little_work_for_each_node(name):
    """Whatever a node costs, however many there are, shows here: the number is twice what it was when written."""
    program = GRAPHS[name](10_000 if FUZZ else 2_000)
    results = []
    assert work(lambda: results.append(run(program, STANDARD))) < WORK * program.node_count
    [(after, _)] = results
    assert after.node_count < 0.7 * program.node_count


@pytest.mark.parametrize("name", ["layers", "residuals"])
def test_depth_is_no_limit(name):
    """Deeper than Python's stack: whatever recurses over the graph fails here."""
    program = GRAPHS[name](2_400)
    x = (torch.rand(4, 4) + 0.5) * 0
    after, _ = run(program, STANDARD)
    for item in (program, after):
        assert bool(Values.on(item, (x,))[item.outputs[0]].isfinite().all())
