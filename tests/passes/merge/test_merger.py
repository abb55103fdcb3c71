"""Branches of one form become one computation, linear layers of one input one layer; where not, and why not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import (
    Limits,
    Numerics,
    Outcome,
    Repeat,
    assert_computes,
    aten,
    capture,
    check,
    ops_of,
    run,
)
from tests.passes.programs import Builder
from tsopt.api import names_of, transform, transform_with_records
from tsopt.compiler.rewrite import OTHER_LAYOUT
from tsopt.passes import STANDARD, CommonSubexpressions, DeadCode
from tsopt.passes.merge import MergeBranches, joins, merger
from tsopt.passes.merge.merger import ISOMORPHIC, PARALLEL

MERGE = MergeBranches()
ANY = MergeBranches(few=3, few_rows=3)  # three branches are enough
MERGED, JOINED = "isomorphic_branches", "parallel_linear"
COUNT = 8
WIDTH = 6
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Ensemble(nn.Module):
    """`make(i)` for each branch; `end` brings the results together; `begin` gives each branch its input."""

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        end: Callable[[list[torch.Tensor]], Any] = torch.stack,
        begin: Callable[[torch.Tensor, int], Any] | None = None,
        count: int = COUNT,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.members = nn.ModuleList(make(i) for i in range(count))
        self.end, self.begin = end, begin or (lambda x, count: [x] * count)
        self.eval()

    def forward(self, x):
        inputs = self.begin(x, len(self.members))
        return self.end([member(value) for member, value in zip(self.members, inputs, strict=True)])


class Body(nn.Module):
    """A linear layer, then `after(h, p, q)` with two vectors of its own."""

    def __init__(self, after: Callable[..., torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.p, self.q = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.after = after

    def forward(self, x):
        return self.after(self.layer(x), self.p, self.q)


def perceptron(_: int = 0, *, bias: bool = True, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), act(), nn.Linear(WIDTH, 4, bias=bias))


def merged(model: nn.Module, x: Any, ops: list[str] | None = None, *, what: Any = MERGE, **options: Any) -> Outcome:
    """The branches are merged, and the four facts hold."""
    found = check(what, model, x, ops, **options)
    assert MERGED in found.done, found.declined
    return found


def left(model: Any, x: Any, reason: str | None = None, *, what: Any = MERGE) -> Outcome:
    """Nothing is done."""
    found = check(what, model, x)
    assert found.done == set(), found.ops
    if reason:
        assert reason in found.reasons, found.declined
    return found


# ---- ensembles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_an_ensemble_is_one_product_a_layer(rows, dtype):
    model = Ensemble(perceptron).to(dtype)
    merged(model, torch.randn(rows, WIDTH, dtype=dtype), ["expand", "baddbmm", "relu", "baddbmm"])


def test_layers_without_bias_are_plain_products():
    model = Ensemble(lambda i: perceptron(bias=False), lambda ys: torch.stack(ys).mean(0))
    merged(model, X, ["expand", "matmul", "relu", "matmul", "mean.dim"])


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.LogSigmoid, nn.ELU])
def test_activations_are_applied_once(act):
    assert len(merged(Ensemble(lambda i: perceptron(act=act)), X).ops) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_merged(dtype):
    merged(Ensemble(perceptron).to(dtype), X.to(dtype))


@pytest.mark.parametrize("shape", [(WIDTH,), (2, 3, WIDTH), (1, 1, WIDTH), (2, 0, WIDTH)], ids=str)
def test_inputs_of_any_rank_are_rows(shape):
    merged(Ensemble(perceptron), torch.randn(shape))


BODIES: dict[str, Callable[..., torch.Tensor]] = {
    "layer norm": lambda h, p, q: F.layer_norm(h, (WIDTH,), p, q),
    "layer norm, no shift": lambda h, p, q: F.layer_norm(h, (WIDTH,), p),
    "layer norm, plain": lambda h, p, q: F.layer_norm(h, (WIDTH,)),
    "rms norm": lambda h, p, q: F.rms_norm(h, (WIDTH,), p),
    "residual": lambda h, p, q: h + F.gelu(h) * p,
    "scale, shift, literal": lambda h, p, q: (h * p + q) * 0.5 - 1,
    "a scalar of its own": lambda h, p, q: h * p[0],
    "where": lambda h, p, q: torch.where(h > q, h, -h),
    "softmax": lambda h, p, q: h.softmax(-1),
    "log softmax over rows": lambda h, p, q: h.log_softmax(0),
    "mean": lambda h, p, q: h - h.mean(-1, keepdim=True),
    "sum of all axes": lambda h, p, q: h / (1 + h.abs().sum((0, 1))),
    "variance by hand": lambda h, p, q: h * (h.pow(2).mean(1, True) + q).rsqrt(),
    "largest": lambda h, p, q: h - h.amax(0, keepdim=True),
    "cumsum": lambda h, p, q: h.cumsum(1),
    "gated halves": lambda h, p, q: (lambda a, b: torch.cat([a * b.sigmoid(), b], -1))(*h.chunk(2, -1)),
    "rotated halves": lambda h, p, q: torch.cat([-h[:, 3:], h[:, :3]], -1) * p,
    "beside a shared value": lambda h, p, q: torch.cat([h * p, X], 1),
    "reshape and transpose": lambda h, p, q: (h * q).reshape(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH) + p,
    "permute": lambda h, p, q: torch.tanh((h * q).permute(1, 0)),
    "a column": lambda h, p, q: h.select(1, 2) * h[:, 1] + 1,
    "unsqueeze": lambda h, p, q: (h.unsqueeze(0) * p.unsqueeze(1).unsqueeze(1)).sum(0),
    "expand": lambda h, p, q: h.relu().unsqueeze(1).expand(-1, 2, -1) * p,
    "product with itself": lambda h, p, q: (h * q) @ h.transpose(0, 1),
    "product with a shared value": lambda h, p, q: torch.tanh(h) @ X.t(),
    "attention": lambda h, p, q: F.scaled_dot_product_attention(*((h * p).unsqueeze(0),) * 3),
    "attention of heads": lambda h, p, q: (
        F.scaled_dot_product_attention(*((h * p).reshape(1, 3, 2, 3).transpose(2, 3),) * 3) * q[0]
    ),
    "attention with a mask": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=X.reshape(3, 1, 6, 1)[:, :, :2]
    ),
    "attention with a mask of its own": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=h[:2, :2]
    ),
    "attention with one mask for all": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=X[:2, :2]
    ),
    "cast": lambda h, p, q: ((h * p).double() + q).float(),
    "integers": lambda h, p, q: (h * 10).int() // 3 + 1,
    "masked": lambda h, p, q: (h * p).masked_fill(h > 0, 0.25),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_branches_do_is_done_once(name):
    """The text has a call for each op, not for each branch."""
    clean = Repeat((DeadCode(), CommonSubexpressions(), MERGE))  # no checks of dtypes, no repeats: as in the pipeline
    also = [torch.randn(3, WIDTH), 100 * X]
    found = merged(Ensemble(lambda i: Body(BODIES[name])), X, what=clean, also=also)
    assert len(found.ops) < 20
    assert all(found.ops.count(op) < COUNT for op in found.ops)


def test_scale_and_shift_of_norms_are_one_call():
    model = Ensemble(lambda i: Body(BODIES["layer norm"]), lambda ys: torch.stack(ys).relu())
    merged(model, X, ["expand", "baddbmm", "layer_norm", "addcmul", "relu"])


def test_a_norm_that_branches_share_keeps_its_weights():
    norm = nn.LayerNorm(WIDTH)
    model = Ensemble(lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU()))
    found = merged(model, X, ["expand", "baddbmm", "layer_norm", "relu"])
    assert sum(1 for name in found.after.weights if name.endswith("stacked")) == 2


# ---- inputs -----------------------------------------------------------------------------------------------------

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
    "values of their own": (lambda x, n: [x.roll(i, 0) for i in range(n)], (3, WIDTH), ["stack"]),
    "one column": (lambda x, n: [x[:, i : i + 1].expand(3, WIDTH) for i in range(n)], (3, COUNT), ["expand"]),
}


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


# ---- results ----------------------------------------------------------------------------------------------------

EXITS: dict[str, tuple[Callable[[list[torch.Tensor]], Any], list[str], list[str]]] = {
    "stacked": (torch.stack, [], ["stack", "select.int"]),
    "stacked behind": (lambda ys: torch.stack(ys, -1), ["permute"], ["stack", "select.int"]),
    "stacked and summed": (lambda ys: torch.stack(ys, 1).sum(1), ["permute", "sum.dim_IntList"], ["stack"]),
    "side by side": (lambda ys: torch.cat(ys, -1), ["permute", "reshape"], ["cat"]),
    "rows": (lambda ys: torch.cat(ys), ["reshape"], ["cat", "permute"]),
    "among others": (lambda ys: torch.cat([ys[0] + 1, *ys, ys[1]], 1), ["cat", "select.int"], []),
    "added": (sum, ["sum.dim_IntList"], ["select.int"]),
    "added in a tree": (
        lambda ys: ((ys[0] + ys[1]) + (ys[2] + ys[3])) + ((ys[4] + ys[5]) + (ys[6] + ys[7])),
        ["sum.dim_IntList"],
        ["add.Tensor", "select.int"],
    ),
    "added with a literal": (lambda ys: sum(ys, start=2.0), ["sum.dim_IntList", "add.Tensor"], ["select.int"]),
    "added to one of them": (lambda ys: ys[0].sin() + sum(ys[1:], start=ys[0]), ["sum.dim_IntList"], []),
    "added, and one of them again": (lambda ys: sum(ys) + ys[0], ["select.int", "sum.dim_IntList"], []),
    "added twice": (lambda ys: sum(ys[1:], start=ys[0] + ys[1]), ["select.int"], ["sum.dim_IntList"]),
    "subtracted": (lambda ys: ys[0] - ys[1] - ys[2] - ys[3] - ys[4] - ys[5] - ys[6] - ys[7], ["select.int"], []),
    "the mean, and one of them": (lambda ys: (torch.stack(ys).mean(0), ys[3]), ["mean.dim", "select.int"], ["stack"]),
    "stacked in both ways": (lambda ys: (torch.stack(ys), torch.stack(ys, 1)), ["clone", "permute"], ["stack"]),
    "stacked backwards": (lambda ys: torch.stack(ys[::-1]), ["select.int", "stack"], []),
    "a view of one": (lambda ys: (ys[2].reshape(-1), torch.stack(ys).amax(0)), ["select.int", "reshape"], ["stack"]),
}


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


def test_a_call_between_the_branches_moves_behind_them():
    class Net(Ensemble):
        def forward(self, x):
            total = x.new_zeros(4)
            for member in self.members:
                total = total + member(x).argmax(-1, keepdim=True).sum()
            return total

    layers = lambda i: nn.Sequential(*perceptron(), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())  # noqa: E731
    merged(Net(layers), X)


# ---- branches that are none, or not all ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        lambda: perceptron(act=nn.GELU),
        lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 4)),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4, bias=False)),
    ],
    ids=["op", "shape", "bias"],
)
def test_a_branch_of_another_form_stays_out(other):
    model = Ensemble(lambda i: other() if i == 4 else perceptron(), lambda ys: torch.stack(ys).mean(0), count=9)
    found = merged(model, X)
    assert found.ops.count("linear") == 2
    assert found.ops.count("baddbmm") == 2


def test_a_branch_that_goes_on_is_merged_as_far_as_it_is_equal():
    layers = lambda i: nn.Sequential(*perceptron(), *[nn.ReLU()] * (i == 4))  # noqa: E731
    found = merged(Ensemble(layers, lambda ys: torch.stack(ys).mean(0), count=9), X)
    assert "linear" not in found.ops


def test_a_branch_with_another_literal_stays_out():
    model = Ensemble(lambda i: Body(lambda h, p, q: (h * (2 if i == 1 else 3) + p).relu()), count=9)
    found = merged(model, X)
    assert found.ops.count("linear") <= 1


def test_layers_one_behind_the_other_are_no_branches():
    layers = [part for _ in range(12) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    left(nn.Sequential(*layers).eval(), X)


def test_a_running_sum_is_no_branch():
    class Net(Ensemble):
        def forward(self, x):
            h = x
            for member in self.members:
                h = h + member(h)
            return h

    left(Net(lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))), X)


@pytest.mark.parametrize(
    "random", [lambda h: h * torch.rand_like(h), lambda h: F.dropout(h, 0.5, True)], ids=["rand", "dropout"]
)
def test_random_calls_stay_as_many_as_they_are(random):
    model = Ensemble(lambda i: Body(lambda h, p, q: random((h * p).relu())))
    program = capture(model, X, eval_mode=True)
    count = sum(op in ("rand_like", "dropout") for op in ops_of(program))
    after, _ = run(program, (MERGE,))
    assert count == COUNT
    assert sum(op in ("rand_like", "dropout") for op in ops_of(after)) == COUNT


def test_random_calls_keep_their_order():
    """A draw before the branches, one that reads the first branch, one after all."""

    class Net(Ensemble):
        def forward(self, x):
            noise = torch.rand(3, 1)
            values = [member(x * noise) for member in self.members]
            first = torch.bernoulli(values[0].sigmoid())
            return torch.stack(values).sum(0) + first + torch.randn(3, 1)

    program = capture(Net(perceptron), X)
    after, records = run(program, (MERGE,))
    draws = lambda p: [op for op in ops_of(p) if op.startswith(("rand", "bernoulli"))]  # noqa: E731
    assert records[0].done
    assert draws(after) == draws(program)


def test_weights_that_branches_share_are_not_stacked():
    shared = nn.Linear(WIDTH, WIDTH)
    model = Ensemble(lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), shared, nn.Tanh()))
    merged(model, X, ["expand", "baddbmm", "relu", "linear", "tanh"])


def test_two_branches_with_one_weight_are_branches():
    shared = perceptron()
    merged(Ensemble(lambda i: shared[0:3] if i in (2, 5) else perceptron()), X)


def test_a_weight_that_is_used_elsewhere_stays():
    class Net(Ensemble):
        def forward(self, x):
            return super().forward(x).sum(0) + (x @ self.members[0][0].weight)[:, :4]

    found = merged(Net(perceptron), X)
    assert "members.0.0.weight" in found.after.weights
    assert "members.1.0.weight" not in found.after.weights


def test_the_weights_of_the_model_are_left_alone():
    model = Ensemble(perceptron)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged(model, X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_0d_values_promote_as_they_did():
    """A float32 matrix times a float64 number is float32; times a stack of such numbers it would be float64."""

    class Net(Ensemble):
        def forward(self, x):
            return torch.stack([(m.layer(x) * m.p[0].double()).relu() for m in self.members])

    found = check(MERGE, Net(lambda i: Body(lambda h, p, q: h)), X)
    assert found.ops.count("mul.Tensor") == COUNT


# ---- groups that fall apart ----------------------------------------------------------------------------------------


def test_two_ensembles_on_two_values_are_two():
    class Net(Ensemble):
        def forward(self, x):
            values = [torch.sin(x), torch.cos(x)]
            return tuple(
                torch.stack([m(value) for m in self.members[i * COUNT : (i + 1) * COUNT]]).mean(0)
                for i, value in enumerate(values)
            )

    found = merged(Net(perceptron, count=2 * COUNT), X)
    assert "stack" not in found.ops


def test_an_ensemble_on_two_values_of_one_kind_is_cut_by_value():
    class Net(Ensemble):
        def __init__(self) -> None:
            super().__init__(perceptron, count=2 * COUNT)
            self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).eval()

        def forward(self, x):
            half = len(self.members) // 2
            values = [first(x) for first in self.first]
            return torch.stack([m(values[i // half]) for i, m in enumerate(self.members)]).mean(0)

    found = merged(Net(), X)
    assert found.ops.count("expand") == 2
    assert found.ops.count("baddbmm") == 4


def test_branches_with_two_results_of_one_kind_are_cut_by_result():
    class Net(Ensemble):
        def __init__(self) -> None:
            super().__init__(lambda i: Body(lambda h, p, q: (h * p).relu()))
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2 * COUNT)).eval()

        def forward(self, x):
            hidden = [m(x) for m in self.members]
            means = [self.heads[2 * i](h).tanh() for i, h in enumerate(hidden)]
            scales = [self.heads[2 * i + 1](h).tanh() for i, h in enumerate(hidden)]
            return torch.stack(means), torch.stack(scales).sum(0)

    found = merged(Net(), X)
    assert found.ops.count("baddbmm") == 3
    assert not {"stack", "select.int", "linear"} & set(found.ops)


# ---- reasons ----------------------------------------------------------------------------------------------------


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
    assert joins.SEVERAL in found.reasons
    assert found.done == {JOINED}  # the layers


def test_views_alone_are_no_branches():
    left(lambda x: [part.reshape(-1, 2).permute(1, 0).flip(0) for part in x.chunk(8, 1)], torch.randn(2, 32))


# ---- linear layers of one input -------------------------------------------------------------------------------------


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


# ---- the pass ---------------------------------------------------------------------------------------------------


def test_exact_levels_merge_nothing():
    program = capture(Ensemble(perceptron), X)
    after, records = run(program, (MERGE,), Limits(Numerics.EXACT))
    assert after is program
    assert records[0].declined == ()


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


@pytest.mark.parametrize(
    ("branches", "length", "done"), [(1000, 2, 1), (1, 2000, 0), (8, 400, 1), (5, 400, 0), (2, 1000, 0)]
)
def test_large_graphs_take_linear_time(branches, length, done):
    program = _chains(branches, length)
    start = time.perf_counter()
    changes = MERGE.run(program, Limits())
    assert time.perf_counter() - start < 3
    assert len(changes.done) == done


def test_a_tree_of_branches_takes_linear_time():
    """Every level is as many values of one kind, which fall apart into pairs."""
    make = Builder()
    level = [make.input(torch.randn(2, 4))]
    for _ in range(10):
        level = [make.call(aten.mul.Tensor, v, make.weight(torch.randn(4))) for v in level for _ in range(2)]
    program = make.program(make.call(aten.stack.default, level))
    start = time.perf_counter()
    MERGE.run(program, Limits())
    assert time.perf_counter() - start < 3
