"""The pass: where merging pays and why not, linear layers of one input, limits, fuel and work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import Limits, Numerics, Outcome, assert_computes, aten, capture, check, ops_of, run
from tests.passes.merge.examples import (
    COUNT,
    JOINED,
    MERGE,
    MERGED,
    ODD,
    WIDTH,
    Body,
    Ensemble,
    X,
    left,
    merged,
    perceptron,
)
from tests.passes.programs import Builder, work
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT
from tsopt.passes import STANDARD
from tsopt.passes.merge import MergeBranches, boundaries, merger
from tsopt.passes.merge.merger import ISOMORPHIC, PARALLEL
from tsopt.transforms import names_of, transform, transform_with_records

# ---- reasons -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "count", "done"), [(2, 7, False), (2, 8, True), (1, 3, False), (1, 4, True)])
def test_few_branches_pay_for_one_row_only(rows, count, done):
    model = Ensemble(lambda i: Body(lambda h, p, q: F.gelu(h * p) + q), lambda ys: torch.stack(ys).mean(0), count=count)
    found = check(MERGE, model, torch.randn(rows, WIDTH))
    assert (MERGED in found.done) == done
    assert done or merger.FEW in found.reasons or count < 4


def test_few_layers_are_named():
    left(Ensemble(perceptron, count=5), X, merger.FEW)


@pytest.mark.parametrize("options", [{"large": 10}, {"matrix": 10}], ids=str)
def test_a_large_branch_is_worth_its_calls(options):
    left(Ensemble(lambda i: perceptron(act=nn.GELU)), X, merger.LARGE, what=MergeBranches(parallel=10, **options))


def test_a_wide_weight_is_worth_it_at_one_row():
    merged(Ensemble(perceptron), X[:1], what=MergeBranches(matrix=10))


def test_selecting_every_result_does_not_pay():
    left(Ensemble(lambda i: Body(lambda h, p, q: h.relu()), lambda ys: [y.flip(0) for y in ys]), X, merger.NO_GAIN)


def test_copying_large_inputs_does_not_pay():
    model = Ensemble(lambda i: Body(lambda h, p, q: h), lambda ys: torch.stack(ys).sum(0))

    class Net(Ensemble):
        def forward(self, x):
            return torch.stack([(x.roll(i, 0) * m.p).relu() + m.q for i, m in enumerate(self.members)]).sum(0)

    left(Net(lambda i: model.members[i]), torch.randn(9000, WIDTH), merger.COPIES)


def test_stacked_weights_have_a_limit():
    left(Ensemble(lambda i: perceptron(act=nn.GELU)), X, merger.NO_MEMORY, what=MergeBranches(memory=100))


def test_the_limit_of_memory_is_for_all_branches_together():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Ensemble(perceptron), Ensemble(lambda i: perceptron(act=nn.Tanh))

        def forward(self, x):
            return self.a(x), self.b(x)

    size = 4 * COUNT * (WIDTH * WIDTH + WIDTH + 4 * WIDTH + 4)
    found = check(MergeBranches(memory=size), Net().eval(), X)
    assert found.ops.count("baddbmm") == 2
    assert merger.NO_MEMORY in found.reasons


def test_a_split_that_leaves_its_branch_stays():
    """A third of one branch is read by a call that the others do not have."""

    class Net(Ensemble):
        def forward(self, x):
            thirds = [(m.layer(x) * m.p).chunk(3, -1) for m in self.members]
            return torch.stack([a.relu() * b for a, b, _ in thirds]), thirds[3][2].flip(0)

    found = check(MERGE, Net(lambda i: Body(lambda h, p, q: h)), X)
    assert boundaries.SEVERAL in found.reasons
    assert found.done == {JOINED}  # the layers


def test_views_alone_are_no_branches():
    left(lambda x: [part.reshape(-1, 2).permute(1, 0).flip(0) for part in x.chunk(8, 1)], torch.randn(2, 32))


# ---- linear layers of one input ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, *, bias: bool = True, heads: int = 2, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = (heads, groups, groups)
        self.parts = nn.ModuleList(nn.Linear(8, 4 * size, bias=bias) for size in self.sizes)
        self.out = nn.Linear(4 * heads, 8)
        self.eval()

    def forward(self, x):
        n, length, _ = x.shape
        pairs = zip(self.parts, self.sizes, strict=True)
        q, k, v = (part(x).reshape(n, length, size, 4).permute(0, 2, 1, 3) for part, size in pairs)
        y = F.scaled_dot_product_attention(q, k.mean(1, True), v.mean(1, True).expand(-1, q.shape[1], -1, -1))
        return x + self.out(y.permute(0, 2, 1, 3).flatten(2))


def joined(model: Any, x: Any, **options: Any) -> Outcome:
    found = check(MERGE, model, x, **options)
    assert found.done == {JOINED}, found.declined
    return found


@pytest.mark.sliced(8)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("groups", [2, 1], ids=["equal", "unequal"])
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 7])
def test_query_key_and_value_are_one_layer(bias, groups, batch):
    found = joined(Attention(bias=bias, groups=groups), torch.randn(batch, 5, 8))
    assert found.ops[:2] == ["linear", "split_with_sizes"]
    assert found.ops.count("linear") == 2


def test_the_standard_pipeline_joins_them():
    program = transform(capture(Attention(), torch.randn(1, 5, 8)))
    assert ops_of(program).count("linear") == 2


def test_joined_layers_side_by_side_are_one_layer():
    program = transform(capture(Ensemble(lambda i: nn.Linear(WIDTH, 2), lambda ys: torch.cat(ys, -1) * 2), X))
    assert ops_of(program) == ["linear"]


def _layers(end: Callable[[list[torch.Tensor]], Any], count: int = 3, **options: Any) -> Ensemble:
    return Ensemble(lambda i: nn.Linear(WIDTH, 2 + i, **options), end, count=count)


def _used(ys: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([y.flip(0) for y in ys], -1)


def test_layers_of_several_widths_are_joined():
    joined(_layers(_used), X)


def test_two_layers_stay_two():
    left(_layers(_used, count=2), X)


def test_layers_before_an_activation_stay():
    left(_layers(lambda ys: torch.cat([y.relu() for y in ys], -1).flip(0)), X)


def test_layers_with_and_without_bias_are_not_joined():
    model = Ensemble(lambda i: nn.Linear(WIDTH, 2, bias=i > 1), _used, count=4)
    left(model, X)


def test_layers_of_two_inputs_are_not_joined():
    left(Ensemble(lambda i: nn.Linear(WIDTH, 2), _used, lambda x, n: [x, x + 1, x - 1], 3), X)


def test_large_layers_are_worth_their_calls():
    found = check(MergeBranches(parallel=10), _layers(_used), X)
    assert (JOINED, merger.LARGE) in found.declined


def test_computed_weights_are_not_joined():
    left(lambda x, w: torch.cat([F.linear(x, w * i).flip(0) for i in range(1, 4)], -1), (X, torch.randn(2, WIDTH)))


@pytest.mark.parametrize("kind", ODD)
def test_odd_layers_are_not_joined(kind):
    left(Ensemble(lambda i: ODD[kind](), lambda ys: torch.stack([y.flip(0) for y in ys]), count=3), X)


def test_a_layer_that_is_returned_stays():
    found = joined(_layers(lambda ys: (_used(ys[:3]), ys[3]), 4), X)
    assert found.ops.count("linear") == 2


def test_layers_whose_readers_need_their_layout_stay():
    """A slice cannot be viewed as one row, nor returned in the strides of a layer by a call that keeps them."""
    left(_layers(lambda ys: torch.cat([y.view(-1).flip(0) for y in ys])), X, OTHER_LAYOUT)


def test_layers_that_are_read_by_strides_stay():
    left(_layers(lambda ys: torch.cat([torch.as_strided(y, (2,), (1,)).flip(0) for y in ys])), X, OTHER_LAYOUT)


def test_joined_weights_have_a_limit():
    left(_layers(_used), X, merger.NO_MEMORY, what=MergeBranches(memory=8))


# ---- the pass ------------------------------------------------------------------------------------------------------


def test_exact_levels_merge_nothing():
    program = capture(Ensemble(perceptron), X)
    after, records = run(program, (MERGE,), Limits(Numerics.EXACT))
    assert after is program
    assert records == []


@pytest.mark.parametrize(("name", "model"), [(MERGED, Ensemble(perceptron)), (JOINED, _layers(_used))])
def test_either_part_can_be_left_out(name, model):
    program = capture(model, X)
    assert {done.rule for done in run(program, (MERGE,))[1][0].done} == {name}
    assert run(program, (MERGE,), Limits(without=frozenset({name})))[0] is program


def test_the_parts_are_known_by_name():
    assert {MERGED, JOINED, "merge"} <= set(names_of(STANDARD))
    assert [rule.name for rule in MERGE.rules] == [MERGED, JOINED]
    assert ISOMORPHIC.numerics == PARALLEL.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_fuel_is_counted(fuel):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Ensemble(perceptron), Ensemble(lambda i: perceptron(act=nn.Tanh))
            self.c = _layers(_used)

        def forward(self, x):
            return self.a(x), self.b(x), self.c(x)

    model = Net().eval()
    program = capture(model, X)
    after, records = run(program, (MERGE,), Limits(fuel=fuel))
    assert len(records[0].done) == fuel
    assert_computes(after, model, [X], exact=False)


def test_without_fuel_nothing_more_is_tried():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _layers(_used), _layers(_used, 4)

        def forward(self, x):
            return self.a(x), self.b(x.sin())

    program = capture(Net().eval(), X)
    what = MergeBranches(parallel=3 * WIDTH * 4)
    assert merger.LARGE in {item.reason for item in run(program, (what,))[1][0].declined}
    assert run(program, (what,), Limits(fuel=0))[1][0].declined == ()


def test_what_was_done_says_where_and_how_much():
    found = merged(Ensemble(perceptron), X)
    (done,) = found.records[0].done
    size = 4 * COUNT * (WIDTH * WIDTH + WIDTH + 4 * WIDTH + 4)
    assert done.where.startswith("members.0.2, ")
    assert done.where.endswith(f"8 branches of 3 calls, {size:,} bytes of new weights")


def test_new_calls_say_where_they_come_from():
    found = merged(Ensemble(perceptron), X)
    assert all(node.meta["module"].startswith("members.0") for node in found.after.calls())


def test_the_standard_pipeline_comes_to_rest():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.attention = Ensemble(lambda i: nn.Linear(8, 8), lambda ys: sum(ys)), Attention()
            self.heads = Ensemble(lambda i: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)))

        def forward(self, x):
            y = self.attention(self.body(x).relu())
            return self.heads(y.permute(1, 0, 2)), self.heads(y[:, :2]).mean(0)

    model = Net().eval()
    x = torch.randn(2, 5, 8)
    once = transform(capture(model, x))
    assert_computes(once, model, [x], exact=False)
    again, records = transform_with_records(once)
    assert again is once, [record.done for record in records]


def _chains(branches: int, length: int) -> Any:
    """Branches of single calls on one input, joined by a stack; with one branch a chain."""
    make = Builder()
    x = make.input(torch.randn(2, 4))
    ends = []
    for _ in range(branches):
        value = make.call(aten.linear.default, x, make.weight(torch.randn(4, 4)), make.weight(torch.randn(4)))
        for i in range(length):
            value = make.call(aten.sin.default, value) if i % 2 else make.call(aten.mul.Tensor, value, 0.5)
        ends.append(value)
    return make.program(make.call(aten.stack.default, ends))


def _tree(depth: int) -> Any:
    """Every level is as many values of one kind, which fall apart into pairs."""
    make = Builder()
    level = [make.input(torch.randn(2, 4))]
    for _ in range(depth):
        level = [make.call(aten.mul.Tensor, v, make.weight(torch.randn(4))) for v in level for _ in range(2)]
    return make.program(make.call(aten.stack.default, level))


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    ("make", "small", "large", "done"),
    [
        (_chains, (200, 2), (1000, 2), 1),
        (_chains, (1, 400), (1, 2000), 0),
        (_chains, (8, 80), (8, 400), 1),
        (_chains, (5, 80), (5, 400), 0),
        (_chains, (2, 200), (2, 1000), 0),
        (_tree, (8,), (10,), 0),
    ],
    ids=["many branches", "one chain", "long branches", "too few branches", "two branches", "tree"],
)
def test_the_work_grows_with_the_graph_and_not_with_its_square(make, small, large, done):
    program, larger = make(*small), make(*large)
    growth = larger.node_count / program.node_count
    little = work(lambda: MERGE.run(program, Limits()))
    results = []
    assert work(lambda: results.append(MERGE.run(larger, Limits()))) < 1.3 * growth * little
    assert len(results[0].done) == done
