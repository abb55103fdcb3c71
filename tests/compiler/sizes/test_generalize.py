"""What passes make of a program for many sizes: one program for all, or a reason why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import ops_of
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.sizes.generalize import NotGeneral, through

pytestmark = pytest.mark.filterwarnings("ignore")


def captured(model, *sizes, **dynamic):
    example = tuple(torch.randn(size) for size in sizes)
    return tsopt.capture(model, example, dynamic=dynamic)


def check(program, model, *calls):
    """The program after all passes, right at other sizes than it was made from."""
    made = tsopt.transform(program)
    verify_program(made)
    run = tsopt.compile(made, "eager")
    for sizes in calls:
        given = [torch.randn(size) for size in sizes]
        torch.testing.assert_close(run(*given), model(*given))
    return made


def test_a_static_program_is_changed_as_ever():
    program = tsopt.capture(lambda x: x * 1, torch.ones(2))
    assert ops_of(through(program, lambda p: p)) == ops_of(program)


def test_layers_are_fused_for_all_sizes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).eval()
    model(torch.randn(1, 3, 8, 8))
    program = captured(model, (2, 3, 8, 8), input={0: "n"})
    made = check(program, model, [(1, 3, 8, 8)], [(7, 3, 8, 8)])
    assert "batch_norm" not in ops_of(made)


def test_numbers_that_nobody_uses_are_drawn_at_all_sizes():
    def model(x):
        torch.rand(x.shape[0])
        return x * 1 + torch.randn_like(x)

    made = tsopt.compile(tsopt.transform(captured(model, (4, 2), x={0: "n"})), "eager")
    for size in (4, 7):
        torch.manual_seed(0)
        wanted = model(torch.ones(size, 2)), torch.rand(1)
        torch.manual_seed(0)
        assert all(map(torch.equal, wanted, (made(torch.ones(size, 2)), torch.rand(1))))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x.view(x.shape[0], x.shape[1], 2, 4).exp(), ["unflatten.int", "exp"]),
        (lambda x: x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2).reshape(x.shape[0], 2, -1).exp(), None),
        (lambda x: x.reshape(x.shape[0] * x.shape[1], 8).exp(), ["flatten.using_ints", "exp"]),
        (lambda x: x.reshape(-1).exp(), ["flatten.using_ints", "exp"]),
        (lambda x: x[:, None, :, None].exp(), None),
        (lambda x: (x.unsqueeze(1).expand(-1, 3, -1, -1) * 2).flatten(0, 1), None),
        (lambda x: torch.cat([x, x[:, :1]], 1).softmax(1), None),
        (lambda x: x / x.shape[1] + torch.arange(x.shape[1])[None, :, None], None),
        (lambda x: x.sum((0, 1)) * (x.shape[0] * x.shape[1] + 3), None),
        (lambda x: x * 1 * (x.shape[0] ** 2 - x.shape[1] // 3), None),  # of no form that one could guess
        (lambda x: x * 1 * (x.shape[0] / (x.shape[1] + 1)), None),
        (lambda x: nn.functional.avg_pool1d(x, 2).flatten(1), None),
        (lambda x: torch.ones(x.shape[1], x.shape[1]).tril() @ x, None),
    ],
)
def test_numbers_become_sizes(model, expected):
    program = captured(model, (3, 5, 8), x={0: "a", 1: "b"})
    made = check(program, model, [(2, 2, 8)], [(7, 11, 8)], [(9, 3, 8)])
    if expected is not None:
        assert ops_of(made) == expected


def right_everywhere(program, model, *shapes):
    """Whether what passes make of a program is right at all of these sizes, or nothing is made of it."""
    try:
        made = tsopt.transform(program)
    except NotGeneral:
        return False
    run = tsopt.compile(made, "eager")
    for shape in shapes:
        given = [torch.randn(size) for size in shape]
        torch.testing.assert_close(run(*given), model(*given))
    return True


def framed(x):
    """As many frames as the length divided by 4, rounded; the pool has rounded down."""
    length = x.shape[1]
    return nn.functional.pad(nn.functional.avg_pool1d(x, 4), (0, (length + 2) // 4 - length // 4)) * 2


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        (lambda x: nn.functional.pad(x, (0, (8 - x.shape[1] % 8) % 8)) * 2, True),
        (lambda x: torch.cat([x[:, : x.shape[1] // 2], x[:, x.shape[1] - x.shape[1] // 2 :]], 1), True),
        (lambda x: x * (x.shape[1] % 8) + x.shape[1] // 8, True),
        (lambda x: x * (1 + x.shape[1] % 8 // 2), True),
        (lambda x: x.clamp(max=x.shape[1] // 8).clamp(max=x.shape[1] % 8), False),  # one bound, of two forms
        (lambda x: sum(nn.functional.pad(x, (0, x.shape[1] % by)).sum(1) for by in (2, 4)), None),
        (framed, False),  # nothing is padded at half of the sizes
    ],
)
@pytest.mark.parametrize(("low", "high", "traced"), [(8, 40, 16), (16, 64, 32)])
def test_what_agrees_at_round_sizes_only_is_right_at_all_others(model, changed, low, high, traced):
    program = captured(model, (3, traced), x={1: f"s[{low}..{high}]"})
    step = program.signature.dims[0].step
    found = right_everywhere(program, model, *([(3, size)] for size in range(low, high + 1, step)))
    assert changed is None or found == changed


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clamp(max=x.shape[1] - 1).clamp(max=511),
        lambda x: x.clamp(max=x.shape[1] // 8).clamp(max=99.5),
        lambda x: nn.functional.relu6(x.clamp(max=x.shape[1] // 64)),
        lambda x: nn.functional.hardtanh(x.clamp(max=x.shape[1]), 0.0, 300.0),
    ],
)
@pytest.mark.parametrize("end", ["", "[2..1000]", "[2..900000]"])
def test_a_bound_that_is_tighter_only_at_large_sizes_stays(model, end):
    def scaled(x):
        return model(x * 900)

    program = captured(scaled, (3, 16), x={1: f"n{end}"})
    assert not right_everywhere(program, scaled, [(3, 16)], [(3, 1000)])


def test_bounds_that_no_size_decides_are_merged():
    program = captured(lambda x: x.clamp(max=511).clamp(max=900).exp(), (3, 16), x={1: "n"})
    assert ops_of(tsopt.transform(program)) == ["clamp", "exp"]


class Joined(nn.Module):
    """The first rows of two tables, one after the other."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(20, 4))

    def forward(self, x):
        return torch.cat([x, self.table])[:16].sum(0)


@pytest.mark.parametrize("traced", [8, 30])
def test_a_slice_may_end_before_a_size_or_behind_it(traced):
    model = Joined()
    program = captured(model, (traced, 4), x={0: "n[2..64]"})
    right_everywhere(program, model, *([(size, 4)] for size in (2, 10, 15, 16, 17, 30, 64)))


def test_one_size_may_be_larger_than_another_or_smaller():
    def model(x, y):
        return nn.functional.pad(x, (0, max(0, y.shape[1] - x.shape[1]))) * 2

    program = captured(model, (3, 6), (3, 9), x={1: "a[4..12]"}, y={1: "b[4..12]"})
    assert right_everywhere(program, model, *([(3, a), (3, b)] for a in range(4, 13) for b in range(4, 13)))


def test_a_result_that_is_wrong_where_no_pass_was_tried_is_found():
    def change(program):
        made = program.copy()
        call = next(made.calls())
        with made.graph.inserting_before(call):
            shorter = made.graph.call_function(aten.slice.Tensor, (call.args[0], 1, 0, -2))
            call.args = (made.graph.call_function(aten.constant_pad_nd.default, (shorter, [0, 2])),)
        return made

    program = captured(lambda x: x.cos(), (3, 8), x={1: "n[1..64]"})
    with pytest.raises(
        NotGeneral, match=r"(?s)right only at some sizes.*at n 1: a result is \[3, 2\] instead of \[3, 1\]"
    ):
        through(program, change)


def test_a_constant_that_holds_nan_is_the_same_at_all_sizes():
    model = nn.Module()
    model.register_buffer("limits", torch.tensor([1.0, float("nan"), 7.0]))
    model.forward = lambda x: x.fmin(model.limits.clamp(max=5))
    program = tsopt.capture(model.eval(), torch.ones(2, 3), dynamic={"x": {0: "n"}}, allow_nan=True)
    assert "clamp" in ops_of(program)
    assert ops_of(check(program, model, [(5, 3)])) == ["fmin"]


def test_a_constant_that_hangs_on_the_size_is_not_general():
    def change(program):
        made = program.copy()
        node = next(made.calls())
        made.weights["c"] = torch.full((), float(node.meta["val"].shape[0]))
        with made.graph.inserting_before(node):
            held = made.graph.create_node("get_attr", "c")
        held.meta["val"] = made.fake_mode.from_tensor(made.weights["c"], static_shapes=True)
        node.args = (node.args[0], held)
        return made

    program = captured(lambda x: x * 2.0, (3, 4), x={0: "n"})
    with pytest.raises(NotGeneral, match=r"(?s)different graphs at different sizes.*the constant c differs"):
        through(program, change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda node, n: setattr(node, "target", (aten.add, aten.sub, aten.div)[n % 3].Tensor),
            "the called op differs",
        ),
        (lambda node, n: setattr(node, "args", (node.args[0], float(n))), "an argument has the values"),
        (lambda node, n: setattr(node, "args", (node.args[0], n * n * n + 1)), "is not one that the model computes"),
    ],
)
def test_what_hangs_on_the_size_in_another_way_is_not_general(change, words):
    def changed(program):
        made = program.copy()
        change(next(made.calls()), made.signature.inputs[0].type.shape[0])
        return made

    program = captured(lambda x: x * 2.0, (3, 4), x={0: "n"})
    with pytest.raises(NotGeneral, match=words):
        through(program, changed)


def test_what_pays_by_size_is_decided_near_the_traced_sizes():
    def change(program):
        made = program.copy()
        if made.signature.inputs[0].type.shape[0] > 50:
            next(made.calls()).target = aten.sin.default
        return made

    program = captured(lambda x: x.cos(), (3, 4), x={0: "n[1..64]"})
    assert ops_of(through(program, change)) == ["cos"]
