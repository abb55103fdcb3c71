"""Orders of calls: never more memory than before, less where there are branches, and everything else as it was."""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from torch import nn

from tests.passes.helpers import Limits, assert_same_bits, capture, check, ops_of, run
from tests.passes.programs import Builder, measured, random_program, work
from tsopt.compiler.analysis.liveness import Lives, peak_bytes
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics
from tsopt.passes.order import HEURISTICS, MemoryOrder, _needs

ORDER = MemoryOrder()
FACTOR = 20 if os.environ.get("TSOPT_FUZZ") else 1


def fan(branches: int, *, wide: int = 64, together: bool = True):
    """Branches that widen and narrow again; `together`: all are widened before the first is narrowed."""
    b = Builder()
    x = b.input(torch.randn(1, 4))
    grown, narrowed = [], []
    for _ in range(branches):
        grown.append(b.call(aten.repeat.default, x, [wide, 1]))
        if not together:
            narrowed.append(b.call(aten.sum.dim_IntList, grown[-1], [0]))
    if together:
        narrowed = [b.call(aten.sum.dim_IntList, value, [0]) for value in grown]
    return b.program(b.call(aten.cat.default, narrowed))


def same_calls(before, after):
    names = {node: i for i, node in enumerate(before.graph.nodes)}
    assert len(names) == len(list(after.graph.nodes))
    assert sorted(ops_of(before)) == sorted(ops_of(after))


@pytest.mark.parametrize("seed", range(40 * FACTOR))
def test_the_peak_never_rises_and_the_values_stay(seed):
    program = random_program(seed, 12 + seed % 30)
    after, (record,) = run(program, (ORDER,))
    same_calls(program, after)
    assert record.after.peak_bytes == peak_bytes(after)
    assert record.changed == (peak_bytes(after) < peak_bytes(program))
    x = torch.randn(4, 4)
    assert measured(after, x) == peak_bytes(after)
    for mine, theirs in zip(after.module()(x), program.module()(x), strict=True):
        assert_same_bits(mine, theirs)
    assert run(after, (ORDER,))[0] is after, "a second run must do nothing"


@pytest.mark.parametrize("seed", range(12 * FACTOR))
def test_it_is_near_the_best_of_all_orders(seed):
    """Finding the best is NP-complete, so a little above it is allowed."""
    program = random_program(seed, 6)
    lives, calls = Lives.of(program), list(program.calls())
    best = least_peak(calls, lives, _needs(calls))
    assert best <= peak_bytes(run(program, (ORDER,))[0]) <= 1.25 * best


def least_peak(calls, lives, needs):
    """The least peak of any order: over all sets of calls that can have been made so far."""
    least = {frozenset(): 0}
    for _ in calls:
        longer = {}
        for made, peak in least.items():
            live = {m for node in made for m in lives.made[node] if m in lives.kept or set(lives.users[m]) - made}
            held = sum(lives.size[memory] for memory in live)
            for node in calls:
                if node in made or not all(source in made for source in needs[node]):
                    continue
                top = max(peak, held + sum(lives.size[memory] for memory in lives.made[node]))
                key = made | {node}
                longer[key] = min(top, longer.get(key, top))
        least = longer
    return least[frozenset(calls)]


@pytest.mark.parametrize("branches", [2, 3, 7, 100])
def test_branches_that_widen_and_narrow_are_made_one_after_the_other(branches):
    _, (record,) = run(fan(branches), (ORDER,))
    alone = peak_bytes(fan(branches, together=False))
    assert record.before.peak_bytes == branches * 64 * 16 + 16
    assert record.after.peak_bytes == alone
    assert record.done[0].rule == "memory_order"
    assert record.done[0].where == f"peak {record.before.peak_bytes:,} -> {alone:,} bytes"
    assert record.numerics == Numerics.EXACT


def test_a_balanced_tree_needs_a_buffer_for_each_level():
    """Sethi and Ullman: 1,024 leaves, all made first, need 1,024 buffers; in the best order 11."""
    b = Builder()
    x = b.input(torch.randn(250))
    level = [b.call(aten.sin.default, x) for _ in range(1024)]
    while len(level) > 1:
        level = [b.call(aten.add.Tensor, *pair) for pair in zip(level[::2], level[1::2], strict=True)]
    _, (record,) = run(b.program(level[0]), (ORDER,))
    assert record.before.peak_bytes == 1025 * 1000
    assert record.after.peak_bytes == 12 * 1000


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList([nn.Linear(*size) for _ in range(6)]) for size in ((8, 256), (256, 8)))

    def forward(self, x):
        wide = [torch.relu(layer(x)) for layer in self.up]
        return torch.stack([layer(value) for layer, value in zip(self.down, wide, strict=True)]).sum(0)


def test_a_model_of_branches_needs_less():
    found = check(ORDER, Branchy().eval(), torch.randn(4, 8), exact=True)
    assert peak_bytes(found.after) < 0.4 * peak_bytes(found.before)


@pytest.mark.parametrize(
    "model",
    [lambda x: x.sin().cos().tanh(), lambda x: x + 1, lambda x: x, lambda x: (x + 1).t().reshape(-1)],
    ids=["chain", "one call", "no call", "views"],
)
def test_where_nothing_is_gained_nothing_is_moved(model):
    program = capture(model, torch.randn(3, 4))
    assert run(program, (ORDER,))[0] is program


def draws():
    """Two random calls; with the second before the first, less memory would do."""
    b = Builder()
    x = b.input(torch.ones(1, 8))
    first = b.call(aten.rand_like.default, b.call(aten.expand.default, x, [64, 8]))
    second = b.call(aten.rand_like.default, b.call(aten.repeat.default, x, [64, 1]))
    return b.program(b.call(aten.mul.Tensor, first, b.call(aten.sum.default, second)))


def test_random_calls_keep_their_order():
    program = draws()
    expand, first, repeat, second, total, product = program.calls()
    other = [repeat, second, total, expand, first, product]
    assert Lives.of(program).peak(other) < peak_bytes(program)
    assert run(program, (ORDER,))[0] is program


def test_checks_keep_their_order():
    b = Builder()
    x = b.input(torch.ones(1, 4))
    wide = [b.call(aten.repeat.default, x, [64, 1]) for _ in range(3)]
    sums = [b.call(aten.sum.default, value) for value in wide]
    for number, value in enumerate(reversed(sums)):
        b.call(aten._assert_async.msg, value, f"check {number}")
    program = b.program(b.call(aten.stack.default, sums))
    after, (record,) = run(program, (ORDER,))
    assert record.changed
    checks = [node.args[1] for node in after.calls() if node.target is aten._assert_async.msg]
    assert checks == ["check 0", "check 1", "check 2"]


def test_without_fuel_nothing_is_moved():
    program = fan(3)
    assert run(program, (ORDER,), Limits(fuel=0))[0] is program


def test_every_heuristic_gives_an_order_of_the_same_calls():
    for seed in range(20):
        program = random_program(seed, 30)
        calls = list(program.calls())
        lives, needs = Lives.of(program), _needs(calls)
        shuffled = calls[:]
        random.Random(seed).shuffle(shuffled)
        for heuristic in HEURISTICS:
            order = heuristic(calls, lives, needs)
            place = {node: i for i, node in enumerate(order)}
            assert place.keys() == set(calls)
            assert all(place[source] < place[node] for node in calls for source in needs[node])


@pytest.mark.parametrize(
    "make", [fan, lambda n: chain(3 * n), lambda n: readers(3 * n)], ids=["fan", "chain", "readers"]
)
def test_the_work_grows_with_the_number_of_calls(make):
    """Counted in calls of functions, which noise does not change."""
    small, large = (work(functools.partial(run, make(n), (ORDER,))) for n in (40, 400))
    assert large < 12 * small


def chain(length: int):
    b = Builder()
    value = b.input(torch.randn(4))
    for _ in range(length):
        value = b.call(aten.sin.default, value)
    return b.program(value)


def readers(count: int):
    """One value that everybody reads."""
    b = Builder()
    value = b.call(aten.sin.default, b.input(torch.randn(4)))
    return b.program(b.call(aten.stack.default, [b.call(aten.cos.default, value) for _ in range(count)]))
