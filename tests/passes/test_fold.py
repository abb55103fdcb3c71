"""Constant folding: what is computed ahead, and what must not be."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from tests.passes.helpers import aten, capture, check, ops_of, run, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.passes import STANDARD, DeadCode, FoldConstants
from tsopt.passes.fold import RAISES, TOO_LARGE, TRAPS

FOLD = FoldConstants()
X = torch.randn(3, 3)


class Weighted(nn.Module):
    """`function(x, w)` over a weight."""

    def __init__(self, function, weight: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("w", weight)

    def forward(self, x):
        return self.function(x, self.w)


def folded(function, weight, x=X, ops=None, **options):
    return check((FOLD, DeadCode()), Weighted(function, weight).eval(), x, ops, **options)


def reasons(found):
    return {reason for _, reason in found.declined}


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x, w: x + (w * 2 + 1).t().relu(), ["add.Tensor"]),
        (lambda x, w: x + torch.arange(3) * 2, ["add.Tensor"]),
        (lambda x, w: x + torch.cat([w[:1], w[1:]]).softmax(0), ["add.Tensor"]),
        (lambda x, w: x + w.split(1, 1)[2], ["add.Tensor"]),
        (lambda x, w: x + w.max(0).values, ["add.Tensor"]),
        (lambda x, w: x.masked_fill(torch.ones(3, 3).tril() == 0, -1.0), ["masked_fill.Scalar"]),
    ],
)
def test_what_does_not_depend_on_the_input_is_computed_once(function, ops):
    found = folded(function, torch.randn(3, 3), ops=ops)
    assert found.after.numerics == Numerics.EXACT


def test_special_values_fold_to_the_bits_of_eager():
    weight = specials(18)[1:]  # the first is NaN, which capture refuses in a weight
    found = folded(lambda x, w: x * (w / 3 + 0.0).sin(), weight, torch.ones(17), ["mul.Tensor"])
    assert any(name.startswith("folded.") for name in found.after.weights)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.bool], ids=str)
def test_promotion_is_that_of_eager(dtype):
    weight = torch.tensor([1, 200, 255]).to(dtype)
    folded(lambda x, w: x + (w + w) * 3, weight, torch.ones(3), ["add.Tensor"])


def test_a_fold_keeps_the_strides_of_the_value():
    """[3, 4] transposed stays transposed in memory: what a view does with it must not change."""
    found = folded(lambda x, w: x.t() + (w + 1).t(), torch.randn(3, 4), torch.randn(3, 4), ["t", "add.Tensor"])
    weight = next(value for name, value in found.after.weights.items() if name.startswith("folded."))
    assert weight.stride() == (1, 4)


def test_a_view_of_a_weight_takes_no_memory():
    found = folded(lambda x, w: x + w.t(), torch.randn(3, 3), ops=["add.Tensor"])
    weight = next(iter(found.after.weights.values()))
    assert weight.data_ptr() == next(iter(found.before.weights.values())).data_ptr()


def test_the_users_weight_stays_as_it_was():
    model = Weighted(lambda x, w: x + (w * 2), torch.randn(3, 3)).eval()
    before = model.w.clone()
    check((FOLD, DeadCode()), model, X, ["add.Tensor"])
    assert torch.equal(model.w, before)


def test_nothing_to_fold_changes_nothing():
    found = folded(lambda x, w: x @ w, torch.randn(3, 3))
    assert found.done == set()


def test_fuel_stops_the_fold():
    program = capture(Weighted(lambda x, w: (x + (w * 2)) @ (w * 3), torch.randn(3, 3)), X)
    after, _ = run(program, (FOLD,), Limits(fuel=1))
    assert ops_of(after).count("mul.Tensor") == 1


# ---- guards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x + torch.rand(3),
        lambda x, w: x + torch.randn_like(w),
        lambda x, w: x + torch.bernoulli(w.sigmoid()),
        lambda x, w: x + torch.randperm(3),
        lambda x, w: x + torch.nn.functional.dropout(w, 0.5, True),
        lambda x, w: x + torch.empty(3),
        lambda x, w: x + torch.empty_like(w),
        lambda x, w: x + aten.new_empty.default(w, [3]),
    ],
)
def test_what_is_random_or_uninitialized_stays(function):
    program = capture(Weighted(function, torch.zeros(3)).eval(), torch.ones(3))
    after, records = run(program, (FOLD,))
    assert ops_of(after)[-1] == "add.Tensor"
    assert len(ops_of(after)) >= 2
    assert not any("rand" in name or "empty" in name for name in after.weights)
    assert not records[0].changed or "sigmoid" not in ops_of(after)


def test_an_expand_to_a_gigabyte_stays_an_expand():
    program = capture(lambda x: x + torch.ones(()).expand(1 << 14, 1 << 14)[0, :3], torch.ones(3))
    after, records = run(program, (FOLD,))
    assert max([w.untyped_storage().nbytes() for w in after.weights.values()], default=0) < 1 << 20
    assert TOO_LARGE in {item.reason for item in records[0].declined}


@pytest.mark.parametrize(
    "grow",
    [
        lambda w: w.repeat(1 << 13, 1 << 12),
        lambda w: torch.zeros(1 << 12, 1 << 13) + w,
        lambda w: w.expand(1 << 25).clone(),
    ],
)
def test_a_constant_of_more_than_its_share_is_not_made(grow):
    """128 MiB out of four bytes."""
    program = capture(Weighted(lambda x, w: x + grow(w).sum(), torch.ones(1)).eval(), torch.ones(3))
    after, records = run(program, (FOLD,))
    assert "sum" in ops_of(after)
    assert TOO_LARGE in {item.reason for item in records[0].declined}
    assert sum(w.untyped_storage().nbytes() for w in after.weights.values()) < 1 << 20


def test_the_limits_are_options():
    model = Weighted(lambda x, w: x + w.repeat(4), torch.ones(64))
    program = capture(model, torch.ones(256))
    grown, _ = run(program, (FoldConstants(),))
    kept, records = run(program, (FoldConstants(floor=512, growth=2.0),))
    capped, _ = run(program, (FoldConstants(ceiling=1023),))
    assert [ops_of(p) for p in (grown, kept, capped)] == [["add.Tensor"], *2 * [["repeat", "add.Tensor"]]]
    assert TOO_LARGE in {item.reason for item in records[0].declined}


def test_weights_of_two_hundred_megabytes_are_not_multiplied():
    """D26, on a smaller floor: transposes and reshapes of a large weight are views, a copy is at most twice."""
    weight = torch.randn(1 << 10, 1 << 8)
    model = Weighted(lambda x, w: x @ w.t().reshape(1 << 8, 1 << 10) @ w.repeat(1, 3), weight).eval()
    program = capture(model, torch.randn(2, 1 << 8))
    after, _ = run(program, (FoldConstants(floor=1 << 10),))
    held = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in after.weights.values()}
    assert sum(held.values()) <= 2 * weight.untyped_storage().nbytes()
    assert "repeat" in ops_of(after)


LOWEST = torch.tensor([-(2**31)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("top", "bottom"),
    [
        (torch.tensor([5]), torch.tensor([0])),
        (torch.tensor([-(2**63)]), torch.tensor([-1])),
        (LOWEST, torch.tensor([-1], dtype=torch.int32)),
        (torch.tensor([7], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)),
    ],
    ids=["zero", "int64", "int32", "uint8"],
)
@pytest.mark.parametrize(
    "op",
    [
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
    ],
    ids=["trunc", "floor", "floor_divide", "remainder", "fmod"],
)
def test_an_integer_division_that_traps_is_not_executed(op, top, bottom):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("top", top)
            self.register_buffer("bottom", bottom)

        def forward(self, x):
            return x + op(self.top, self.bottom)

    program = capture(Net().eval(), torch.ones(1))
    after, records = run(program, (FOLD,))
    assert after.text == program.text
    assert TRAPS in {item.reason for item in records[0].declined}


@pytest.mark.parametrize("op", [aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.Scalar], ids=str)
@pytest.mark.parametrize("bottom", [0, -1])
def test_a_literal_divisor_is_looked_at_too(op, bottom):
    program = capture(Weighted(lambda x, w: x + op(w, bottom), torch.tensor([-(2**63)])).eval(), torch.ones(1))
    after, records = run(program, (FOLD,))
    assert after.text == program.text
    assert TRAPS in {item.reason for item in records[0].declined}


def test_sound_integer_divisions_fold():
    folded(lambda x, w: x + w // 2 + w % -3, torch.tensor([7, -7, 0]), torch.ones(3), ["add.Tensor", "add.Tensor"])


def test_division_of_floats_by_zero_folds_to_infinity():
    folded(lambda x, w: x + w / 0.0, torch.tensor([1.0, 0.0, -1.0]), torch.ones(3), ["add.Tensor"])


def test_a_wide_scalar_over_a_narrow_tensor_traps_in_the_narrow_type():
    """A 0-d int64 does not promote int32: -2**31 by -1 is computed in int32 and kills the process."""
    code = """
        import torch
        from tsopt.compiler.capture.capture import capture
        from tsopt.compiler.rewriting.pipeline import run
        from tsopt.passes import FoldConstants

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("top", torch.tensor(-(2**31)))
                self.register_buffer("bottom", torch.tensor([-1], dtype=torch.int32))
            def forward(self, x):
                return x + torch.div(self.top, self.bottom, rounding_mode="trunc")

        program = capture(Net().eval(), torch.ones(1))
        after, records = run(program, (FoldConstants(),))
        print(records[0].declined[0].reason)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, TRAPS), found.stderr[-500:]


def test_an_op_that_raises_stays():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(4, 2))
            self.register_buffer("index", torch.tensor([0, 9]))

        def forward(self, x):
            return x + nn.functional.embedding(self.index, self.table)

    program = capture(Net().eval(), torch.ones(2, 2))
    after, records = run(program, (FOLD,))
    assert after.text == program.text
    assert any(item.reason.startswith(RAISES) for item in records[0].declined)
    assert "IndexError" in records[0].declined[0].reason


def test_an_output_does_not_become_a_weight():
    found = folded(lambda x, w: (x + w, w * 2), torch.randn(3, 3))
    assert ("fold_constant", "an output would share memory with a weight") in found.declined
    assert found.ops == ["add.Tensor", "mul.Tensor"]


def test_what_an_output_is_computed_from_is_folded():
    found = folded(lambda x, w: (x + w, (w.t() @ w * 2).sigmoid().view(-1)), torch.randn(3, 3))
    assert sorted(found.ops) == ["add.Tensor", "sigmoid", "view"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, q: (q.t(), x + q),
        lambda x, q: (q.reshape(-1), x @ q),
        lambda x, q: (q[0], q[1:], x + q),
    ],
)
def test_an_output_does_not_become_a_view_of_a_weight(function):
    """`w + 1` is new memory in each call; folded, its view would be the program's own weight."""
    folded(lambda x, w: function(x, w + 1), torch.randn(3, 3))


def test_a_check_on_constants_is_not_folded_away():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flag", torch.tensor(False))

        def forward(self, x):
            torch._assert_async(self.flag, "never")
            return x + 1

    program = capture(Net().eval(), torch.ones(2))
    after, _ = run(program, (FOLD,))
    assert ops_of(after) == ops_of(program)


@pytest.mark.slow
def test_a_chain_of_doublings_stops_at_the_ceiling():
    """H21: `cat` with itself sixty times."""

    def model(x, w):
        for _ in range(26):
            w = torch.cat([w, w])
        return x + w[:3]

    program = capture(Weighted(model, torch.ones(4)).eval(), torch.ones(3))
    after, records = run(program, (FoldConstants(floor=1 << 12),))
    assert TOO_LARGE in {item.reason for item in records[0].declined}
    assert sum(w.untyped_storage().nbytes() for w in after.weights.values()) < 1 << 20


# ---- equal constants ------------------------------------------------------------------------------------------


def table(x):
    places = torch.arange(x.shape[-1])
    return (places[None] - places[:, None]).abs() * 0.5


def test_a_table_that_every_layer_computes_is_one_weight():
    found = check((FOLD, DeadCode()), lambda x: ((x + table(x)).tanh() + table(x)).tanh() * table(x), X)
    assert [*map(tuple, (weight.shape for weight in found.after.weights.values()))] == [(3, 3)]


def test_tables_of_other_numbers_stay_apart():
    found = check((FOLD, DeadCode()), lambda x: (x + table(x)).tanh() + table(x) * 2 + table(x) * 2.0, X)
    assert len(found.after.weights) == 3


def test_a_weight_that_is_computed_at_each_call_is_one():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    found = check((FOLD, DeadCode()), lambda x: layer(layer(x).tanh()), X)
    assert len([weight for weight in found.after.weights.values() if weight.dim() == 2]) == 1


def test_a_table_that_rules_make_for_every_layer_is_one_weight():
    """Attention asks for another shape of the mask, which is made behind the first folding."""

    def model(x):
        for _ in range(3):
            x = ((x @ x.transpose(1, 2) - table(x @ x.transpose(1, 2))).softmax(-1) @ x).tanh()
        return x

    found = check(STANDARD, model, torch.randn(2, 5, 4))
    assert len(found.after.weights) == 1
