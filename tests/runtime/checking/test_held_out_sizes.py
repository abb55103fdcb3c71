"""What a program for many sizes promises: what was run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import example
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.sizes.generalize import NotGeneral
from tsopt.errors import AccuracyError, CaptureError
from tsopt.runtime.checking import held_out_sizes, other_sizes
from tsopt.runtime.checking.held_out_sizes import validate_ranges

openvino_only = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is an extra")
pytestmark = pytest.mark.filterwarnings("ignore")


def made(model, size, text):
    given = torch.randn(size)
    wanted = {"x": {0: text}}
    program = tsopt.capture(model, given, dynamic=wanted)
    return validate_ranges(model, program, example(given), seed=0, wanted=wanted)


def test_a_range_is_checked_at_its_ends_and_between():
    assert made(lambda x: x * 2, (3, 4), "batch[1..32]").checked == "batch: 1..32, checked at 1, 2, 7, 32"


def test_without_an_end_it_goes_to_twice_the_example():
    assert made(lambda x: x * 2, (20, 4), "n").checked == "n: 1..40, checked at 1, 2, 7, 40"


def test_an_end_that_nobody_asked_for_is_not_gone_to():
    """A table of positions says how long a text may be; calls that long may take minutes to check."""
    table = torch.randn(512, 4)

    def model(x):
        return x + table[: x.shape[0]]

    assert made(model, (20, 4), "n").checked == "n: 1..40, checked at 1, 2, 7, 40"
    assert made(model, (300, 4), "n").checked.startswith("n: 1..512, ")
    assert made(model, (20, 4), "n[1..512]").checked.startswith("n: 1..512, ")


def test_where_calls_are_long_a_range_ends_at_the_largest_example(monkeypatch):
    monkeypatch.setattr(held_out_sizes, "MUCH", 20 * 4 * 1.5)
    assert made(lambda x: x * 2, (20, 4), "n").checked == "n: 1..20, checked at 1, 2, 7, 20"
    assert made(lambda x: x * 2, (10, 4), "n").checked == "n: 1..20, checked at 1, 2, 7, 20"
    assert made(lambda x: x * 2, (20, 4), "n[1..100]").checked.startswith("n: 1..100, ")


@pytest.mark.parametrize(
    ("model", "low", "notes"),
    [
        (lambda x: x * 2, 0, []),
        (lambda x: x - x.max(0).values, 1, ["excluded n 0: the model itself fails at this size"]),
    ],
)
def test_no_rows_are_a_size_like_others_where_they_are_asked_for(model, low, notes):
    found = made(model, (8, 2), "n[0..16]")
    assert found.checked.startswith(f"n: {low}..16, checked at {'0, ' * (not low)}1, ")
    assert list(found.notes) == notes


def test_where_calls_are_long_a_range_grows_no_further_than_the_call(monkeypatch):
    def model(x):
        tried.append(x.shape[0])
        return (x @ x.T).softmax(-1) @ x

    tried = []
    found = made(model, (20, 4), "n")
    run = tsopt.compile(found.program, "eager")
    run.reference, run.limits = found.program, found.limits
    monkeypatch.setattr(held_out_sizes, "MUCH", 10_000)  # between a call with 60 rows and one with twice as many
    tried.clear()
    wide = held_out_sizes.widened(model, run, example(torch.randn(60, 4)))
    assert str(wide.signature.dims[0]) == "n: 1..60"
    assert max(tried) == 60
    monkeypatch.undo()
    wide = held_out_sizes.widened(model, run, example(torch.randn(60, 4)))
    assert str(wide.signature.dims[0]) == "n: 1..120"


def test_an_end_that_was_asked_for_is_reached_whatever_the_size_is_called():
    """Two sizes that are one get one of their names; here the mask has the one with an end."""

    def model(x, mask):
        return torch.cat([x, x[:1]]) * mask

    wanted = {"x": {0: "past"}, "mask": {0: "total[2..100]"}}
    calls = (torch.randn(4, 2), torch.ones(5, 2))
    program = tsopt.capture(model, calls, dynamic=wanted)
    found = validate_ranges(model, program, example(*calls), seed=0, wanted=wanted)
    assert found.checked.startswith("past: 1..99, ")


def test_steps_are_kept():
    found = made(lambda x: x.reshape(-1, 4, 2).sum(1), (8, 2), "n[1..64]")
    assert found.checked == "n: 8..64, multiples of 4, checked at 8, 12, 36, 64"


def test_several_sizes_are_tried_together():
    given = torch.randn(4, 6)
    wanted = {"x": {0: "a[1..9]", 1: "b[1..20]"}}
    program = tsopt.capture(lambda x: x.softmax(0), given, dynamic=wanted)
    found = validate_ranges(lambda x: x.softmax(0), program, example(given), seed=0, wanted=wanted)
    assert [dict(item.sizes) for item in found.held_out] == [
        {"a": 1, "b": 1}, {"a": 2, "b": 7}, {"a": 7, "b": 2}, {"a": 9, "b": 20},
        {"a": 1, "b": 20}, {"a": 9, "b": 1},
    ]  # fmt: skip


def test_a_size_that_the_model_refuses_is_none_that_is_promised():
    def model(x):
        if x.shape[0] < 3 or x.shape[0] > 20:
            raise ValueError("no such size")
        return x * 2

    found = made(model, (5, 4), "n[1..32]")
    assert found.checked.startswith("n: 3..20, checked at 3, ")


def test_one_is_a_size_like_others_where_the_program_is_right():
    found = made(lambda x: x.squeeze(0) if x.shape[0] == 1 else x, (5, 4), "n[1..8]")
    assert found.checked.startswith("n: 2..8")
    assert found.notes[0].startswith("excluded n 1: ")


def test_tokens_and_a_mask_that_is_read_by_positions_are_one_size():
    def model(x, mask):
        return x * mask[torch.arange(x.shape[0])]

    calls = [(torch.randn(n, 2), torch.ones(n, 2)) for n in (2, 6)]
    program = tsopt.capture(model, calls)
    assert len(program.signature.dims) == 2
    assert validate_ranges(model, program, example(*calls[0]), seed=0).checked == "batch: 1..8, checked at 1, 2, 7, 8"


def test_a_program_that_is_wrong_between_the_ends_is_refused():
    wrong = tsopt.capture(lambda x: x * 2, torch.randn(3, 4), dynamic={"x": {0: "n[1..32]"}})
    with pytest.raises(CaptureError, match=r"(?s)wrong at n 7.*leave dynamic out"):
        validate_ranges(lambda x: x * (3 if x.shape[0] == 7 else 2), wrong, example(torch.randn(3, 4)), seed=0)


def test_passes_that_are_wrong_at_some_size_are_found():
    found = made(lambda x: x.cos(), (3, 4), "n[1..32]")
    bad = found.program.copy()
    next(bad.calls()).target = aten.sin.default
    with pytest.raises(NotGeneral, match="at n 1: "):
        found.checked_with(bad)


def test_sizes_that_would_fill_the_memory_are_not_tried(monkeypatch):
    monkeypatch.setattr(other_sizes, "LARGEST", 1 << 16)
    found = made(lambda x: x * 2, (4, 4), "n[1..1000000000000]")
    assert found.notes[0] == "excluded n 1000000000000: not tried, because its inputs would be larger than 1 GB"
    assert found.program.signature.dims[0].high <= 4096


def test_between_round_ends_is_a_size_that_is_not():
    assert made(lambda x: x * 2, (36, 4), "n[8..72]").checked == "n: 8..72, checked at 8, 9, 47, 72"


def scaled(by):
    """A program for many sizes, with and without an end, that is right at the multiples of 4 among them."""

    def model(x):
        return x * (1 + x.shape[0] % 4)

    return model, tsopt.capture(lambda x: x * 1.0, torch.randn(8, 4), dynamic={"x": {0: by}})


@pytest.mark.parametrize("by", ["n[4..40]", "n"])
@pytest.mark.parametrize("of_many", [True, False])
def test_verify_compares_at_other_sizes_as_well(by, of_many):
    model, wrong = scaled(by)
    run = tsopt.compile(wrong, "eager")
    with pytest.raises(AccuracyError, match=r"at n \d+"):
        tsopt.verify(model, run, torch.randn(8, 4), program=wrong if of_many else None)
    assert tsopt.verify(lambda x: x * 1.0, run, torch.randn(8, 4)).ok


def test_verify_tries_no_sizes_that_the_model_does_not_take():
    def model(x):
        if x.shape[0] != 8:
            raise ValueError("8 rows")
        return x * 1.0

    _, program = scaled("n[4..40]")
    assert tsopt.verify(model, tsopt.compile(program, "eager"), torch.randn(8, 4), program=program).ok


@openvino_only
def test_a_range_does_not_grow_past_the_integers_that_an_engine_was_accepted_for():
    def model(x):
        at = torch.arange(x.shape[0]) * 80_000
        return torch.where(at < at + 40_000, x, -x)

    found = made(model, (60,), "n[2..100]")
    run = tsopt.compile(found.program, "openvino")
    run.reference, run.limits = found.program, (replace(found.program.signature.dims[0], high=None),)
    for rows, end in ((101, 202), (180, 180), (250, None)):
        wider = held_out_sizes.widened(model, run, example(torch.randn(rows)))
        assert (wider and wider.signature.dims[0].high) == end


def test_one_beside_a_large_size_is_tried():
    def model(x):
        return x * 2 if x.shape[0] == 1 and x.shape[1] > 64 else x

    wanted = {"x": {0: "n[1..8]", 1: "m[1..100]"}}
    given = torch.randn(4, 9)
    program = tsopt.capture(model, given, dynamic=wanted)
    with pytest.raises(CaptureError, match="the captured program is wrong at n 1, m 100"):
        validate_ranges(model, program, example(given), seed=0, wanted=wanted)


def test_a_range_that_grows_to_zero_leaves_out_one_where_that_is_wrong():
    def model(x):
        return x * 2 if x.shape[0] == 1 else x

    found = made(model, (4,), "n[0..8]")
    assert found.program.signature.dims[0].low == 2
    run = tsopt.compile(found.program, "eager")
    run.reference, run.limits = found.program, found.limits
    assert held_out_sizes.widened(model, run, example(torch.randn(0))) is None


def test_a_size_that_a_condition_leaves_out_does_not_end_the_range():
    def model(x):
        return x * 2 if x.shape[0] == 16000 else x

    found = made(model, (5000,), "n[1..16000]")
    assert found.checked == "n: 1..16000, checked at 1, 2, 7, 15999; only where n != 16000"


def test_an_executable_is_compared_wherever_it_would_serve():
    def model(x):
        return x * 2 if x.shape[0] * x.shape[1] == 21 else x

    given = torch.randn(5, 8)
    program = tsopt.capture(model, given, dynamic={"x": {0: "n[2..9]", 1: "m[5..9]"}})
    run = tsopt.compile(program, "eager")
    assert tsopt.verify(model, run, given, program=program).ok
    unchecked = tsopt.compile(replace(program, signature=replace(program.signature, conditions=())), "eager")
    with pytest.raises(AccuracyError, match="at n 3, m 7"):
        tsopt.verify(model, unchecked, given, program=program)


def test_one_beside_a_size_that_has_grown_is_tried():
    def model(x):
        return x * 2 if x.shape[0] == 1 and x.shape[1] > 64 else x

    given = torch.randn(4, 9)
    wanted = {"x": {0: "n", 1: "m"}}
    found = validate_ranges(model, tsopt.capture(model, given, dynamic=wanted), example(given), seed=0, wanted=wanted)
    run = tsopt.compile(found.program, "eager")
    run.reference, run.limits = found.program, found.limits
    assert held_out_sizes.widened(model, run, example(torch.randn(4, 100))) is None
    assert held_out_sizes.widened(model, run, example(torch.randn(4, 30))) is not None


@openvino_only
def test_a_range_does_not_grow_past_what_inputs_are_checked_for():
    def model(x):
        return x.cumsum(0)

    found = validate_ranges(
        *(model, tsopt.capture(model, torch.arange(60), dynamic={"x": {0: "n[2..100]"}}), example(torch.arange(60))),
        seed=0,
        wanted={"x": {0: "n[2..100]"}},
    )
    run = tsopt.compile(found.program, "openvino")
    run.reference, run.limits = found.program, (replace(found.program.signature.dims[0], high=None),)
    assert held_out_sizes.widened(model, run, example(torch.arange(101))).signature.dims[0].high == 101
    assert held_out_sizes.widened(model, run, example(torch.arange(150))) is None


def test_sizes_that_would_fill_the_memory_do_not_keep_others_from_growing(monkeypatch):
    given = torch.randn(2, 60)
    program = tsopt.capture(lambda x: x.relu(), given, dynamic={"x": {0: "n", 1: "m"}})
    n, m = program.signature.dims
    signature = replace(program.signature, dims=(replace(n, high=4), replace(m, high=100_000)))
    run = tsopt.compile(replace(program, signature=signature), "eager")
    run.reference, run.limits = program, program.signature.dims
    monkeypatch.setattr(other_sizes, "LARGEST", 40_000)  # bytes
    calls = []
    wider = held_out_sizes.widened(lambda x: calls.append(x.shape) or x.relu(), run, example(torch.randn(5, 60)))
    assert [dim.high for dim in wider.signature.dims] == [10, 100_000]
    assert max(shape.numel() for shape in calls) <= 10_000
