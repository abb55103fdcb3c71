"""Which calls are branches of one form, which are not, and where groups fall apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import capture, check, ops_of, run
from tests.passes.merge.examples import COUNT, MERGE, WIDTH, Body, Ensemble, X, left, merged, perceptron

# ---- branches that are none, or not all ----------------------------------------------------------------------------


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


def test_branches_that_read_their_neighbours_share_what_those_read():
    """Each value is an operand of two branches, and in one group all the same."""

    class Net(Ensemble):
        def forward(self, x):
            hidden = [(m.layer(x) * m.p).relu() for m in self.members]
            pairs = zip(hidden, hidden[1:] + hidden[:1], strict=True)
            return torch.stack([(a - b.sin()) * m.q for m, (a, b) in zip(self.members, pairs, strict=True)])

    found = merged(Net(lambda i: Body(lambda h, p, q: h)), X)
    assert found.ops.count("baddbmm") == found.ops.count("relu") == 1


def test_branches_on_values_of_which_some_were_merged_before():
    """The second ensemble reads seven of the stacked values, and one that is computed as it was."""

    class Net(Ensemble):
        def forward(self, x):
            hidden = [(m.layer(x) * m.p).relu() for m in self.members]
            pairs = list(zip(self.members, hidden, strict=True))
            later = [(h * m.q).tanh().sin() for m, h in pairs[1:]]
            return torch.stack(later), torch.stack([h.cos() * m.q for m, h in pairs[:-1]])

    found = merged(Net(lambda i: Body(lambda h, p, q: h), count=COUNT + 1), X)
    assert [found.ops.count(op) for op in ("sin", "cos")] == [1, 1]


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
