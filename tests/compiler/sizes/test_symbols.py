"""What is captured for many sizes: which are one, their ranges, and the models that decide by a size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import ops_of
from tsopt.compiler.calls.signature import DERIVED
from tsopt.compiler.sizes.specialize import specialize
from tsopt.errors import CaptureError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(n, width=4):
    return torch.randn(n, width)


def dims(program):
    return {dim.name: (dim.low, dim.high, dim.step) for dim in program.signature.dims}


def test_the_axes_that_differ_are_dynamic_and_named():
    program = tsopt.capture(nn.Linear(4, 2).eval(), [rows(1), rows(8)])
    assert dims(program) == {"batch": (1, None, 1)}
    assert program.signature.inputs[0].axes == ("batch", None)
    assert program.signature.outputs[0].axes == ("batch", None)
    assert ops_of(program) == ["linear"]


def test_names_and_ranges_are_the_users():
    program = tsopt.capture(lambda x: x * 2, rows(3), dynamic={"x": {0: "n[1..32]", 1: "m"}})
    assert dims(program) == {"n": (1, 32, 1), "m": (1, None, 1)}


def test_sizes_that_the_model_makes_equal_are_one():
    program = tsopt.capture(lambda x, y: x + y, [(rows(2), rows(2)), (rows(3), rows(3))])
    assert [item.axes for item in program.signature.inputs] == [("batch", None), ("batch", None)]


def test_sizes_that_are_equal_by_chance_are_not_tied():
    program = tsopt.capture(lambda x, y: (x * 2, y + 1), [(rows(2), rows(2)), (rows(3), rows(3))])
    assert [item.axes for item in program.signature.inputs] == [("batch", None), ("batch_2", None)]
    run = tsopt.compile(program, "eager")
    assert [value.shape[0] for value in run(rows(5), rows(7))] == [5, 7]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda cache: cache["keys"] + cache["values"], [(None, "cache_1"), (None, "cache_1")]),
        (lambda cache: (cache["keys"] * 2, cache["values"] * 2), [(None, "cache_keys_1"), (None, "cache_values_1")]),
    ],
)
def test_a_size_is_named_by_its_argument_and_axis_and_by_its_path_if_there_are_two(model, names):
    calls = [({"keys": rows(4, width), "values": rows(4, width)},) for width in (3, 5)]
    assert [item.axes for item in tsopt.capture(model, calls).signature.inputs] == names


def test_one_name_is_one_size():
    wanted = {"x": {0: "n"}, "y": {0: "n"}}
    program = tsopt.capture(lambda x, y: (x * 2, y + 1), (rows(2), rows(2)), dynamic=wanted)
    with pytest.raises(tsopt.SignatureError, match="n is 5 and 7 in the same call"):
        tsopt.compile(program, "eager")(rows(5), rows(7))


def test_two_names_for_one_size_are_refused():
    with pytest.raises(CaptureError, match=r"(?s)a and b must be the same size.*give all of them the name a"):
        tsopt.capture(lambda x, y: x + y, (rows(2), rows(2)), dynamic={"x": {0: "a"}, "y": {0: "b"}})


def test_a_size_that_the_model_has_as_a_number_is_refused():
    with pytest.raises(CaptureError, match=r"axis 1 of x must be 4 in this model"):
        tsopt.capture(lambda x: x @ torch.ones(4, 2), rows(3), dynamic={"x": {1: "n"}})


def test_a_bound_that_the_model_has_is_its_range():
    places = torch.randn(16, 4)
    program = tsopt.capture(lambda x: x + places[: x.shape[0]], rows(3), dynamic={"x": {0: "n"}})
    assert dims(program) == {"n": (1, 16, 1)}


def test_a_branch_on_a_size_ends_the_range():
    def model(x):
        return x * 2 if x.shape[0] < 10 else x * 3

    assert dims(tsopt.capture(model, rows(3), dynamic={"x": {0: "n"}})) == {"n": (1, 9, 1)}
    assert dims(tsopt.capture(model, rows(12), dynamic={"x": {0: "n"}})) == {"n": (10, None, 1)}


def test_a_branch_on_a_multiple_is_a_step():
    def model(x):
        return x.reshape(-1, 2, 4).sum(1) if x.shape[0] % 2 == 0 else x

    assert dims(tsopt.capture(model, rows(6), dynamic={"x": {0: "n"}})) == {
        "n": (4, None, 2)
    }  # two rows make one, which torch.export takes for another program


def test_a_branch_on_what_follows_from_a_size_ends_the_range():
    def model(x):
        half = x[::2]
        return half * 2 if half.shape[0] > 4 else half

    assert dims(tsopt.capture(model, rows(16), dynamic={"x": {0: "n"}})) == {"n": (9, None, 1)}


def test_a_model_that_decides_by_one_size_is_refused_with_the_place():
    def model(x):
        return x * 2 if x.shape[0] % 7 == 3 else x

    with pytest.raises(
        CaptureError, match=r"(?s)the model specializes on a size: .*x\.shape\[0\].*where: .*test_symbols"
    ):
        tsopt.capture(model, rows(10), dynamic={"x": {0: "n"}})


def test_an_example_beyond_the_range_is_refused():
    with pytest.raises(UsageError, match="the example has n = 40"):
        tsopt.capture(lambda x: x * 2, rows(40), dynamic={"x": {0: "n[1..32]"}})


def test_a_size_that_bounds_another_is_one_with_it_where_all_examples_have_it_so():
    def model(x, mask):
        return x * mask[: x.shape[0]]

    program = tsopt.capture(model, [(rows(2), rows(2)), (rows(5), rows(5))])
    assert dims(program) == {"batch": (1, None, 1)}


def test_outputs_whose_sizes_follow_from_others_are_derived():
    program = tsopt.capture(lambda x: x.flatten(), rows(3), dynamic={"x": {0: "n"}})
    assert program.signature.outputs[0].axes == (DERIVED,)


def test_a_number_from_sizes_is_part_of_the_program():
    program = tsopt.capture(lambda x: x.sum(0) / x.shape[0], [rows(2), rows(5)])
    x = rows(7)
    torch.testing.assert_close(tsopt.compile(program, "eager")(x), x.mean(0))
    assert "int = aten.sym_size.int(%x, 0)" in program.text
    assert program.text.startswith("program Model  # batch: 1..")


def test_a_range_may_be_long():
    program = tsopt.capture(lambda x: x.flatten(), rows(3), dynamic={"x": {0: "n[1..1000000000]"}})
    assert dims(program) == {"n": (1, 1000000000, 1)}


def test_a_root_of_a_size_is_part_of_the_program():
    program = tsopt.capture(lambda x: x / x.shape[0] ** 0.5, [rows(2), rows(5)])
    x = rows(7)
    torch.testing.assert_close(tsopt.compile(program, "eager")(x), x / 7**0.5)


def test_a_size_that_becomes_a_number_of_pythons_own_is_fixed():
    with pytest.raises(CaptureError, match=r"(?s)axis 0 of x must be 5.*as a constant"):
        tsopt.capture(lambda x: x / math.sqrt(x.shape[0]), [rows(2), rows(5)])


def test_what_values_decide_is_refused_as_ever():
    with pytest.raises(tsopt.GraphBreakError, match="data-dependent"):
        tsopt.capture(lambda x: x * 2 if x.sum() > 0 else x, [rows(2), rows(5)])


def far(x):
    return x * 2 if x.shape[0] == 16000 else x


def of_both(x):
    return x * 2 if x.shape[0] * x.shape[1] == 24 else x


def by_remainder(x):
    return x * 2 if (x.shape[0] + x.shape[1]) % 64 == 63 else x


@pytest.mark.parametrize(
    ("model", "shape", "other"),
    [
        (far, (5000, 2), (16000, 2)),
        (of_both, (5, 7), (4, 6)),
        (of_both, (5, 7), (24, 1)),
        (by_remainder, (3, 5), (60, 3)),
    ],
)
def test_what_ranges_do_not_say_calls_are_asked(model, shape, other):
    program = tsopt.capture(model, rows(*shape), dynamic={"x": {0: "n", 1: "m"}})
    run = tsopt.compile(program, "eager")
    beyond, n, m = rows(*other), *program.signature.dims
    wide = run.called_as(replace(run.signature, dims=(replace(n, high=None), replace(m, high=None))))
    assert wide.accepts((beyond,), {}) is None
    with pytest.raises(tsopt.SignatureError, match=r"(?s)do not satisfy .*[nm].* != \d+.*where: .*test_symbols.py"):
        wide(beyond)
    for x in (rows(*shape), rows(shape[0] + 1, shape[1]), rows(3, 3)):
        assert torch.equal(wide(x), model(x))


def test_sizes_whose_ranges_say_everything_have_no_further_conditions():
    def model(x):
        return x * 2 if 3 < x.shape[0] + 1 < 100 and x.shape[0] != 300 else x

    assert not tsopt.capture(model, rows(9), dynamic={"x": {0: "n"}}).signature.conditions


def test_guards_are_taken_as_they_were_traced():
    """ShapeEnv.simplify makes a floor of a truncation, which is another number below zero."""

    def model(x):
        return x * 2 if math.trunc((10 - x.shape[0]) / 4) == -1500 else x

    program = tsopt.capture(model, rows(100), dynamic={"x": {0: "n"}})
    run = tsopt.compile(program, "eager")
    for n in (6010, 6013):
        assert run.accepts((rows(n),), {}) is None
    assert run.accepts((rows(6014),), {}) is not None


def test_a_branch_that_cannot_be_checked_is_refused():
    with pytest.raises(CaptureError, match=r"cannot be checked for each call: .*x\.shape\[0\]"):
        tsopt.capture(lambda x: x * 2 if 2 ** x.shape[0] > 1000 else x, rows(20), dynamic={"x": {0: "n"}})


def test_the_text_of_a_program_at_given_sizes_has_no_conditions():
    program = tsopt.capture(of_both, rows(5, 7), dynamic={"x": {0: "n", 1: "m"}})
    assert "only where n * m != 24" in program.text
    assert "only where" not in specialize(program, {"n": 5, "m": 6}).text


class Pairs(nn.Module):
    """Adds rows up in pairs where that is possible."""

    def forward(self, x):
        return (x.reshape(-1, 2, 4).sum(1) if x.shape[0] % 2 == 0 else x).tanh()


@pytest.mark.parametrize(
    ("model", "examples", "why"),
    [
        (Pairs(), [rows(5), rows(8)], "batch is 5, expected .*multiples of 2"),
        (Pairs(), [rows(8), rows(5)], "batch is 5, expected .*multiples of 2"),
        (lambda x: x * 2 if x.shape[0] > 5 else x - 1, [rows(3), rows(8)], r"batch is 3, expected 6\.\."),
        (lambda x: x * 2 if x.numel() != 77 else x - 1, [rows(7, 11), rows(12, 14)], "!= 77 does not hold"),
    ],
)
def test_a_program_is_for_all_of_its_examples(model, examples, why):
    with pytest.raises(CaptureError, match=f"(?s)differs between the examples.*in another one .*{why}"):
        tsopt.capture(model, examples)


@pytest.mark.parametrize("size", [1, 9])
def test_an_example_outside_of_its_range_is_refused(size):
    with pytest.raises(UsageError, match=f"the example has n = {size}, outside its range"):
        tsopt.capture(lambda x: x * 2, [rows(4), rows(size)], dynamic={"x": {0: "n[2..8]"}})


def test_an_example_without_rows_is_in_the_range():
    assert dims(tsopt.capture(nn.Linear(4, 2).eval(), [rows(0), rows(8)])) == {"batch": (0, None, 1)}


@pytest.mark.parametrize(
    "count",
    [
        lambda n: math.ceil(n / 4),
        lambda n: math.floor(n / 3) + math.ceil((n + 1) / 7),
        lambda n: math.trunc(n * n / 5),
        lambda n: math.ceil(2 * n / n),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "torchscript", "onnxruntime"])
def test_a_quotient_of_sizes_is_rounded_as_in_python(count, backend):
    program = tsopt.capture(lambda x: x.new_zeros(count(x.shape[0])) + x[0, 0], [rows(64), rows(128)])
    run = tsopt.compile(program, backend)
    (dim,) = program.signature.dims
    for size in range(max(dim.low, 1), 50):
        assert run(rows(size)).shape == (count(size),), size


@pytest.mark.parametrize("count", [lambda n: math.floor(n * 0.29), lambda n: round(n / 4)])
def test_sizes_that_engines_would_round_otherwise_are_captured_one_by_one(count):
    """In float32, the 29 hundredths of 100 are 29; in Python they are 28."""

    def model(x):
        return x.new_zeros(count(x.shape[0])) + x[0, 0]

    with pytest.raises(CaptureError, match="computes with sizes in an unsupported way") as error:
        tsopt.capture(model, [rows(64), rows(128)])
    assert not isinstance(error.value, tsopt.GraphBreakError), "it is one graph at one size"
    assert tsopt.compile(tsopt.capture(model, rows(100)), "eager")(rows(100)).shape == (count(100),)


class Step(nn.Module):
    """Attention of one more token, under a mask over the cache and itself."""

    def forward(self, x, keys, mask):
        keys = torch.cat([keys, x], 1)
        if mask.shape[1] < keys.shape[1]:
            raise ValueError("the mask is too short")
        return (x @ keys.mT).masked_fill(~mask[:, None, : keys.shape[1]], -1e9).softmax(-1) @ keys


def step(past):
    return torch.randn(2, 1, 4), torch.randn(2, past, 4), torch.ones(2, past + 1, dtype=torch.bool)


@pytest.mark.parametrize("pasts", [(0, 5), (0, 1), (1, 0)])
def test_an_empty_cache_is_in_the_range_of_one_that_has_grown(pasts):
    model = Step()
    program = tsopt.capture(model, [step(past) for past in pasts])
    assert dims(program) == {"keys_1": (0, None, 1)}
    run = tsopt.compile(program, "eager")
    for past in (0, 1, 6):
        call = step(past)
        torch.testing.assert_close(run(*call), model(*call))


@pytest.mark.parametrize("past", [0, 3])
def test_a_range_from_zero_stays_where_another_size_is_one_larger(past):
    wanted = {"keys": {1: "past[0..30]"}, "mask": {1: "covered[1..31]"}}
    assert dims(tsopt.capture(Step(), step(past), dynamic=wanted)) == {"past": (0, 30, 1)}


def test_an_example_of_another_kind_than_its_trace_is_told_so():
    def model(x):
        return x * 2 if x.shape[0] % 2 == 0 else x

    with pytest.raises(CaptureError, match=r"too small in the example(?s:.*)has n = 1, and was traced with n = 2,"):
        tsopt.capture(model, rows(1), dynamic={"x": {0: "n"}})
