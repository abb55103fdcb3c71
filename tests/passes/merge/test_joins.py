"""How values come into merged branches and how results leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.passes.helpers import call, capture, ops_of, run
from tests.passes.merge.examples import COUNT, MERGE, WIDTH, Body, Ensemble, X, merged, perceptron

# ---- inputs --------------------------------------------------------------------------------------------------------

ENTRIES: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[str]]] = {
    "chunks of the last axis": (lambda x, n: x.chunk(n, -1), (3, COUNT * WIDTH), ["reshape", "permute"]),
    "split rows": (lambda x, n: x.split(3), (COUNT * 3, WIDTH), ["reshape"]),
    "select on the middle": (lambda x, n: [x[:, i] for i in range(n)], (3, COUNT, WIDTH), ["permute"]),
    "unbind": (lambda x, n: x.unbind(0), (COUNT, 3, WIDTH), []),
    "select on the front": (lambda x, n: [x[i] for i in range(n)], (COUNT, 3, WIDTH), []),
    "slices": (lambda x, n: [x[..., i * WIDTH : (i + 1) * WIDTH] for i in range(n)], (3, COUNT * WIDTH), ["reshape"]),
    "a part of it": (lambda x, n: [x[i + 1] for i in range(n)], (COUNT + 3, 3, WIDTH), ["slice.Tensor"]),
    "backwards": (lambda x, n: [x[n - 1 - i] for i in range(n)], (COUNT, 3, WIDTH), ["stack"]),
    "every second": (lambda x, n: [x[2 * i] for i in range(n)], (2 * COUNT, 3, WIDTH), ["stack"]),
    "overlapping": (lambda x, n: [x[i : i + 3] for i in range(n)], (COUNT + 3, WIDTH), ["stack"]),
    "strided slices": (
        lambda x, n: [x[:, 2 * i * WIDTH : 2 * (i + 1) * WIDTH : 2] for i in range(n)],
        (3, 2 * COUNT * WIDTH),
        ["stack"],
    ),
    "slices of nothing": (lambda x, n: [x[3 * (n - i) : 3 * (n - i - 1)] for i in range(n)], (50, WIDTH), ["stack"]),
    "the first of two results": (lambda x, n: [x.roll(i, 0).frexp()[0] for i in range(n)], (3, WIDTH), ["stack"]),
    "values of their own": (lambda x, n: [x.roll(i, 0) for i in range(n)], (3, WIDTH), ["stack"]),
    "one column": (lambda x, n: [x[:, i : i + 1].expand(3, WIDTH) for i in range(n)], (3, COUNT), ["expand"]),
}


@pytest.mark.sliced(6)
@pytest.mark.parametrize("name", ENTRIES)
def test_inputs_are_stacked_by_a_view_where_they_are_neighbours(name):
    begin, shape, wanted = ENTRIES[name]
    model = Ensemble(perceptron, lambda ys: torch.stack(ys).sum(0), begin)
    found = merged(model, torch.randn(shape))
    assert all(op in found.ops for op in wanted)
    assert ("stack" in found.ops) == ("stack" in wanted)


def test_inputs_of_the_model_are_stacked():
    class Net(Ensemble):
        def forward(self, *xs):
            return torch.stack([m(x) for m, x in zip(self.members, xs, strict=True)]).mean(0)

    layers = lambda i: nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(4, 4))  # noqa: E731
    merged(
        Net(layers),
        tuple(X + i for i in range(COUNT)),
        ["stack", *["baddbmm", "relu", "baddbmm", "tanh", "baddbmm", "mean.dim"]],
    )


def test_inputs_may_be_computed_in_different_ways():
    begin = lambda x, n: [x.roll(i, 0) if i % 2 else x.flip(i % 4 // 2) for i in range(n)]  # noqa: E731
    layers = lambda i: nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(4, 4))  # noqa: E731
    assert merged(Ensemble(layers, begin=begin), X).ops.count("baddbmm") == 3


def test_heads_on_one_of_two_equal_inputs_are_found():
    class Net(Ensemble):
        def forward(self, x, y):
            return torch.stack([m(x[:, i]) for i, m in enumerate(self.members)]).mean(0) + y[0, 0, :4]

    pair = (torch.randn(3, COUNT, WIDTH), torch.randn(3, COUNT, WIDTH))
    assert "stack" not in merged(Net(perceptron), pair).ops


def test_parts_inside_of_branches_are_not_their_inputs():
    """Three thirds each, of eight branches: not 24 branches."""

    def gates(h, p, q):
        a, b, c = (h * p).chunk(3, -1)
        return torch.cat([a.sigmoid() * b.tanh(), c.sigmoid()], -1)

    found = merged(Ensemble(lambda i: Body(gates)), X)
    assert found.ops.count("sigmoid") == 2


def test_heads_in_a_loop_are_one_attention():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(12, 3) for _ in range(3)) for _ in range(COUNT))

        def forward(self, x):
            out = []
            for q, k, v in self.heads:
                scores = (q(x) @ k(x).transpose(-2, -1) / 3**0.5).softmax(-1)
                out.append(scores @ v(x))
            return torch.cat(out, -1)

    torch.manual_seed(0)
    found = merged(Heads().eval(), torch.randn(2, 5, 12))
    assert [found.ops.count(op) for op in ("baddbmm", "matmul", "softmax.int")] == [3, 2, 1]


@pytest.mark.parametrize("start", [0, None], ids=["sum", "loop"])
def test_experts_with_a_gate_are_one_sum(start):
    class Experts(Ensemble):
        def __init__(self) -> None:
            super().__init__(lambda i: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)))
            self.gate = nn.Linear(WIDTH, COUNT).eval()

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            total = start
            for i, member in enumerate(self.members):
                term = weights[:, i : i + 1] * member(x)
                total = term if total is None else total + term
            return total

    found = merged(Experts(), X)
    assert found.ops.count("sum.dim_IntList") == 1
    assert found.ops.count("add.Tensor") <= 1


# ---- results -------------------------------------------------------------------------------------------------------


def _doubled(y: torch.Tensor) -> torch.Tensor:
    return y + y


def _with_sine(y: torch.Tensor, ys: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return sum(ys, start=y), y.sin()


EXITS: dict[str, tuple[Callable[[list[torch.Tensor]], Any], list[str], list[str]]] = {
    "stacked": (torch.stack, [], ["stack", "select.int"]),
    "stacked behind": (lambda ys: torch.stack(ys, -1), ["permute"], ["stack", "select.int"]),
    "stacked and summed": (lambda ys: torch.stack(ys, 1).sum(1), ["permute", "sum.dim_IntList"], ["stack"]),
    "side by side": (lambda ys: torch.cat(ys, -1), ["permute", "reshape"], ["cat"]),
    "rows": (lambda ys: torch.cat(ys), ["reshape"], ["cat", "permute"]),
    "among others": (lambda ys: torch.cat([ys[0] + 1, *ys, ys[1]], 1), ["cat", "select.int"], []),
    "side by side backwards": (lambda ys: torch.cat(ys[::-1]), ["select.int", "cat"], []),
    "nothing of them, beside others": (
        lambda ys: torch.cat([ys[0].new_ones(3, 2), *(y.flatten()[:0] for y in ys)], 1),
        ["cat"],
        ["linear"],
    ),
    "turned one by one": (lambda ys: torch.stack([y.flip(0) for y in ys]), ["select.int", "flip"], []),
    "added": (sum, ["sum.dim_IntList"], ["select.int"]),
    "added in a tree": (
        lambda ys: ((ys[0] + ys[1]) + (ys[2] + ys[3])) + ((ys[4] + ys[5]) + (ys[6] + ys[7])),
        ["sum.dim_IntList"],
        ["add.Tensor", "select.int"],
    ),
    "added with a literal": (lambda ys: sum(ys, start=2.0), ["sum.dim_IntList", "add.Tensor"], ["select.int"]),
    "added to one of them": (lambda ys: ys[0].sin() + sum(ys[1:], start=ys[0]), ["sum.dim_IntList"], []),
    "added, and one of them again": (lambda ys: sum(ys) + ys[0], ["select.int", "sum.dim_IntList"], []),
    "added with a part twice": (
        lambda ys: sum(ys[3:], start=ys[0] + ((ys[1] + ys[2]) + ys[1])),
        ["select.int"],
        ["sum.dim_IntList"],
    ),
    "added, a part doubled": (lambda ys: sum(ys[2:], start=_doubled(ys[0] + ys[1])), ["select.int"], ["linear"]),
    "added, scaled on the way": (lambda ys: sum(ys[2:], start=(ys[0] + ys[1]) * 2), ["select.int"], []),
    "added, the last one twice": (lambda ys: torch.add(sum(ys[:-1]), ys[-1], alpha=2), ["select.int"], []),
    "added, the first of the sums read": (lambda ys: _with_sine(ys[0] + ys[1], ys[2:]), ["select.int"], ["linear"]),
    "added in double": (
        lambda ys: sum(ys[1:], start=ys[0] + ys[0].double().sin()),
        ["select.int"],
        ["sum.dim_IntList"],
    ),
    "added as integers": (lambda ys: sum((10 * y).int() for y in ys), ["select.int"], ["sum.dim_IntList"]),
    "added twice": (lambda ys: sum(ys[1:], start=ys[0] + ys[1]), ["select.int"], ["sum.dim_IntList"]),
    "subtracted": (lambda ys: ys[0] - ys[1] - ys[2] - ys[3] - ys[4] - ys[5] - ys[6] - ys[7], ["select.int"], []),
    "the mean, and one of them": (lambda ys: (torch.stack(ys).mean(0), ys[3]), ["mean.dim", "select.int"], ["stack"]),
    "stacked in both ways": (lambda ys: (torch.stack(ys), torch.stack(ys, 1)), ["clone", "permute"], ["stack"]),
    "stacked, and flat as it was copied": (
        lambda ys: (torch.stack(ys), torch.stack(ys, -1).permute(2, 0, 1).reshape(-1)),
        ["clone"],
        ["stack"],
    ),
    "stacked backwards": (lambda ys: torch.stack(ys[::-1]), ["select.int", "stack"], []),
    "a view of one": (lambda ys: (ys[2].reshape(-1), torch.stack(ys).amax(0)), ["select.int", "reshape"], ["stack"]),
}


@pytest.mark.sliced(6)
@pytest.mark.parametrize("name", EXITS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_results_leave_by_views_where_they_can(name, bias):
    end, there, gone = EXITS[name]
    layers = lambda i: nn.Sequential(*perceptron(bias=bias), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())  # noqa: E731
    found = merged(Ensemble(layers, end), X)
    assert all(op in found.ops for op in there)
    assert not any(op in found.ops for op in gone)


def test_results_that_are_all_returned_share_no_memory():
    layers = lambda i: nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())  # noqa: E731
    found = merged(Ensemble(layers, tuple), X)
    assert found.ops.count("clone") == COUNT - 1


def test_a_value_inside_a_branch_may_be_returned_too():
    class Net(Ensemble):
        def forward(self, x):
            inner = [member[:2](x) for member in self.members]
            return torch.stack([m[2](h) for m, h in zip(self.members, inner, strict=True)]), inner[4]

    assert "select.int" in merged(Net(perceptron), X).ops


@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.permute(1, 0), lambda y: y[:, 1:]])
def test_views_of_results_keep_their_layout(view):
    """The stack of chunks is laid out otherwise than the chunks; the pipeline compares the strides of outputs."""
    layers = lambda i: Body(lambda h, p, q: (h * p).relu() + q)  # noqa: E731

    class Net(Ensemble):
        def forward(self, x):
            values = [(part * m.p).relu() + m.q for m, part in zip(self.members, x.chunk(COUNT, -1), strict=True)]
            return torch.stack(values).sum(), view(values[0] * 1.5), view(values[1])

    merged(Net(layers), torch.randn(3, COUNT * WIDTH))


def test_what_reads_a_result_learns_its_new_layout():
    def end(ys):
        joined = torch.stack(ys, -1)
        return (joined.relu().sin() @ torch.ones(COUNT, 2)).contiguous()

    found = merged(Ensemble(perceptron, end), X)
    assert "stack" not in found.ops
    assert "clone" not in found.ops


def test_a_result_that_is_read_by_strides_is_copied_into_its_old_layout():
    found = merged(Ensemble(perceptron, lambda ys: torch.as_strided(torch.stack(ys, -1), (4,), (3,), 1) + 1), X)
    assert "clone" in found.ops


def test_draws_from_a_result_are_those_they_were():
    """Numbers are drawn in the order of memory."""
    model = Ensemble(perceptron, lambda ys: torch.bernoulli(torch.stack(ys, -1).sigmoid()))
    after, records = run(capture(model, X), (MERGE,))
    assert records[0].done
    assert "clone" in ops_of(after)
    torch.manual_seed(3)
    wanted = model(X)
    torch.manual_seed(3)
    assert torch.equal(call(after, X), wanted)


def test_a_result_that_the_branches_read_again_keeps_its_layout():
    """What is computed on stacks is typed before it is known in which layout the result is put there."""

    class Net(Ensemble):
        def forward(self, x):
            hidden = [(m.layer(x) * m.p).relu() for m in self.members]
            joined = torch.stack(hidden, -1)
            own = [(h * m.q).unsqueeze(-1) for m, h in zip(self.members, hidden, strict=True)]
            return torch.stack([(joined * value).sin() for value in own])

    found = merged(Net(lambda i: Body(lambda h, p, q: h)), X)
    assert found.ops.count("sin") == found.ops.count("clone") == 1


def test_a_call_between_the_branches_moves_behind_them():
    class Net(Ensemble):
        def forward(self, x):
            total = x.new_zeros(4)
            for member in self.members:
                total = total + member(x).argmax(-1, keepdim=True).sum()
            return total

    layers = lambda i: nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())  # noqa: E731
    merged(Net(layers), X)
