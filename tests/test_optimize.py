"""The one call, and its stages by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.backends.candidate import candidates_for

FAST = {"backends": ("eager",), "seconds": 0.01}


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    label: str = "none"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0) -> Result:
        hidden = self.fc(x) * 1
        return Result(hidden * mask * scale, (hidden, x + 1), label="net")


@pytest.fixture(scope="session")
def net():
    torch.manual_seed(3)
    return Net().eval()


@pytest.fixture(scope="session")
def example():
    generator = torch.Generator().manual_seed(4)
    return tsopt.example(torch.randn(2, 4, generator=generator), mask=torch.ones(2, 3), scale=2.0)


@pytest.fixture(scope="session")
def full(net, example):
    """The whole race, run once."""
    return tsopt.optimize(net, example, seconds=0.1)


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.logits, wanted.logits.detach())
    assert type(found.hidden) is tuple
    for mine, theirs in zip(found.hidden, wanted.hidden, strict=True):
        torch.testing.assert_close(mine, theirs.detach())
    assert found.label == wanted.label


# ---- drop-in ------------------------------------------------------------------------------------------------


def test_it_returns_what_the_model_returned(full, net, example):
    x = torch.randn(2, 4)
    assert_same(full(x, mask=torch.zeros(2, 3), scale=2.0), net(x, mask=torch.zeros(2, 3), scale=2.0))
    assert_same(full(*example.args, **example.kwargs), net(*example.args, **example.kwargs))


def test_every_candidate_has_a_row(full, example):
    names = ["eager", *dict.fromkeys(candidate.title for candidate in candidates_for(None) if not candidate.options)]
    assert names[1:5] == ["eager + passes", "torch + oneDNN", "TorchScript", "ONNX Runtime"]
    plain = [row for row in full.report.rows if "?" not in row.key]  # others join where their engine is fast
    assert [row.name for row in plain] == names
    assert {row.status for row in full.report.rows} <= {"ok", "no gain", "not checked"}
    assert full.report.row("eager").verdict == "baseline"
    assert full.report.winner in [row.name for row in full.report.rows]
    assert full.report.speedup >= 1


def test_the_winner_is_never_slower(full):
    winner = full.report.row(full.report.winner)
    assert winner.verdict in ("faster", "baseline")


def test_another_constant_is_another_form_and_right(full, net):
    x, mask = torch.randn(2, 4), torch.ones(2, 3)
    assert_same(full(x, mask=mask, scale=5.0), net(x, mask=mask, scale=5.0))
    assert_same(full(x, mask=mask), net(x, mask=mask))


@pytest.mark.parametrize(
    ("model", "example", "call"),
    [
        (lambda x: x * 2, torch.ones(3), lambda f: f(torch.full((3,), 5.0))),
        (lambda a, b: a - b, (torch.ones(3), torch.zeros(3)), lambda f: f(torch.ones(3), torch.full((3,), 2.0))),
        (
            lambda a, b: {"d": a - b},
            {"b": torch.ones(3), "a": torch.zeros(3)},
            lambda f: f(a=torch.ones(3), b=torch.zeros(3))["d"],
        ),
        (lambda xs: xs[0] + xs[1]["k"], ([torch.ones(2), {"k": torch.ones(2)}],), lambda f: f([ONE, {"k": ONE * 2}])),
        (lambda x, flag=True: -x if flag else x, (torch.ones(2), False), lambda f: f(ONE, False)),
        (lambda x: (x, None, "text", 3), torch.ones(2), lambda f: torch.tensor(f(ONE)[3])),
    ],
    ids=["tensor", "tuple", "dict", "nested", "flag", "constants"],
)
def test_examples_of_every_form(model, example, call):
    assert torch.equal(call(tsopt.optimize(model, example, **FAST)), call(model))


ONE = torch.ones(2)


def test_an_exported_program_is_taken():
    exported = torch.export.export(nn.Linear(3, 2).eval(), (torch.ones(1, 3),))
    fast = tsopt.optimize(exported, torch.ones(1, 3), **FAST)
    torch.testing.assert_close(fast(torch.full((1, 3), 2.0)), exported.module()(torch.full((1, 3), 2.0)).detach())


def test_an_optimized_model_may_be_optimized_again(net, example):
    first = tsopt.optimize(net.fc, torch.ones(1, 4), **FAST)
    torch.testing.assert_close(
        tsopt.optimize(first.model, torch.ones(1, 4), **FAST)(ONE.new_ones(1, 4)), first(torch.ones(1, 4))
    )


# ---- modes ----------------------------------------------------------------------------------------------------


def test_a_model_in_training_mode_is_refused_where_it_matters():
    with pytest.raises(tsopt.CaptureError, match="training mode") as caught:
        tsopt.optimize(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.ones(1, 2), **FAST)
    assert "eval_mode=True" in caught.value.fix


def test_eval_mode_computes_as_in_eval_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    fast = tsopt.optimize(model, torch.randn(4, 2), eval_mode=True, **FAST)
    assert model.training
    x = torch.randn(4, 2)
    found = fast(x)
    new_shape = fast(torch.ones(3, 2))
    torch.testing.assert_close(found, model.eval()(x).detach())
    torch.testing.assert_close(new_shape, model(torch.ones(3, 2)).detach())


# ---- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_new_signature": "ignore"}, "on_new_signature='ignore'"),
        ({"backends": "eager"}, "backends must be a tuple"),
        ({"backends": ("tensorrt",)}, "unknown backend 'tensorrt'"),
        ({"threads": 0}, "threads must be an integer from 1 to 1024, got 0"),
        ({"threads": 10**6}, "threads must be an integer from 1 to 1024, got 1000000"),
        ({"threads": True}, "threads must be an integer from 1 to 1024, got True"),
        ({"threads": "2"}, "threads must be an integer from 1 to 1024, got '2'"),
        ({"backends": ("torchscript?threads=1000000",)}, "threads must be an integer from 1 to 1024"),
        ({"seconds": 0}, "seconds must be a number greater than 0, got 0"),
        ({"seconds": "1"}, "seconds must be a number greater than 0, got '1'"),
        ({"seconds": float("nan")}, "seconds must be a number greater than 0, got nan"),
        ({"budget": "1"}, "budget must be a number greater than 0, got '1'"),
        ({"memory": True}, "memory must be a number greater than 0, got True"),
        ({"level": 4}, "unknown optimization level 4"),
        ({"level": [2]}, r"unknown optimization level \[2\]"),
        ({"without": "dce"}, "without must be a tuple of names, got a string"),
        ({"without": ("mul_by_seven",)}, "'mul_by_seven'"),
    ],
)
def test_an_option_that_is_none_is_named(options, text):
    with pytest.raises(tsopt.UsageError, match=text) as caught:
        tsopt.optimize(torch.relu, torch.ones(2), **{**FAST, **options})
    assert caught.value.fix


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ([torch.ones(2)], "example_input is a list"),
        (np.ones(2, dtype=np.float32), "numpy array"),
        ("x", "is a str"),
        ({1: torch.ones(2)}, "is a dict"),
    ],
)
def test_an_example_that_is_none_is_named(example, text):
    with pytest.raises(tsopt.UsageError, match=text):
        tsopt.optimize(torch.relu, example, **FAST)


def test_a_model_that_fails_on_its_example_shows_its_own_error():
    with pytest.raises(tsopt.CaptureError, match="fails on the example") as caught:
        tsopt.optimize(nn.Linear(3, 2).eval(), torch.ones(1, 4), **FAST)
    assert "mat1 and mat2" in caught.value.why


def test_levels_decide_which_passes_run():
    def passes(level):
        return tsopt.optimize(lambda x: x * 1 + 0, torch.ones(2), level=level, **FAST).report

    assert passes(0).passes == ()
    assert passes(0).nodes[0] == passes(0).nodes[1]
    assert passes(1).numerics == "EXACT"
    assert passes(1).nodes[1] < passes(1).nodes[0]


def test_rules_can_be_left_out():
    report = tsopt.optimize(lambda x: x * 1, torch.ones(2), without=("times_one",), **FAST).report
    assert report.nodes == (1, 1)


def test_progress_is_told_each_step():
    told: list[str] = []
    tsopt.optimize(lambda x: x * 1, torch.ones(2), progress=told.append, **FAST)
    assert told[0] == "capture"
    assert any(text.startswith("pass ") for text in told)
    assert any(text.startswith("compile eager + passes (1 of ") for text in told)
    assert any(text.startswith("time: ") for text in told)


def test_a_new_shape_is_captured_once_and_right(net):
    fast = tsopt.optimize(net.fc, torch.ones(1, 4), **FAST)
    for rows in (2, 2):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), net.fc(x).detach())
    assert len(fast.report.signatures) <= 1


@pytest.mark.parametrize("policy", ["eager", "error", "capture"])
def test_every_policy_answers_as_the_model_or_refuses(net, policy):
    fast = tsopt.optimize(net.fc, torch.ones(1, 4), on_new_signature=policy, **FAST)
    x = torch.randn(3, 4)
    if policy == "error":
        with pytest.raises(tsopt.SignatureError):
            fast(x)
    else:
        torch.testing.assert_close(fast(x), net.fc(x).detach())


# ---- the report ---------------------------------------------------------------------------------------------


def test_the_text_says_who_won_and_why(full):
    text = full.report.text
    assert text.splitlines()[0].startswith(f"Net: {full.report.winner} wins, ")
    assert all(row.name in text for row in full.report.rows)
    assert "op nodes" in text
    assert "torch " in text.splitlines()[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_a_printed_report_is_as_wide_as_the_terminal(full, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, str(full.report).splitlines())) <= width


def test_the_markdown_is_two_tables(full):
    lines = full.report.markdown.splitlines()
    assert lines[0].startswith("### Net: ")
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8, 9}


def test_the_json_survives_a_round_trip(full):
    found = json.loads(json.dumps(full.report.to_json(), allow_nan=False))
    assert json.dumps(found) == json.dumps(full.report.to_json())
    assert [row["name"] for row in found["rows"]] == [row.name for row in full.report.rows]
    assert all(row["accuracy"]["ok"] for row in found["rows"][1:] if row["status"] == "ok")
    assert found["winner"] == full.report.winner


def test_files_and_forms_are_added_to_a_copy(full):
    more = full.report.with_files([("onnx", "m.onnx")]).with_signature("f32[7]", "eager")
    assert "onnx: m.onnx" in more.text
    assert more.to_json()["signatures"][-1] == ["f32[7]", "eager"]
    assert "m.onnx" not in full.report.text


def test_a_bundle_of_the_winner_computes_the_same(full, net, tmp_path):
    place = full.save(tmp_path / "net.tsopt")
    x, mask = torch.randn(2, 4), torch.ones(2, 3)
    loaded = tsopt.load(place, trust=True)
    torch.testing.assert_close(loaded(x, mask=mask, scale=2.0).logits, net(x, mask=mask, scale=2.0).logits.detach())


# ---- a stage at a time --------------------------------------------------------------------------------------


def test_the_stages_by_hand(net, example):
    program = tsopt.capture(net, example)
    better = tsopt.transform(program)
    assert better.node_count < program.node_count
    executable = tsopt.compile(better, "torchscript")
    assert tsopt.verify(net, executable, example).ok
    found = tsopt.benchmark(net, {"ts": executable}, example, seconds=0.01)
    assert found.row("ts").timing.p50 > 0
    assert_same(executable(*example.args, **example.kwargs), net(*example.args, **example.kwargs))


def test_transform_leaves_its_program_alone(net, example):
    program = tsopt.capture(net, example)
    before = program.fingerprint(contents=True)
    tsopt.transform(program)
    assert program.fingerprint(contents=True) == before


def test_fuel_stops_the_rewriting():
    program = tsopt.capture(lambda x: (x * 1 + 1) * 1, torch.ones(2))
    assert tsopt.transform(program, fuel=0).node_count == program.node_count
    assert tsopt.transform(program, fuel=1).node_count > tsopt.transform(program).node_count


def test_an_iterator_is_left_as_it_is():
    scales = iter([2.0, 3.0])
    with pytest.raises(tsopt.CaptureError, match="an input is an iterator"):
        tsopt.optimize(scaled_by_each, (torch.ones(2), scales))
    assert list(scales) == [2.0, 3.0]


@pytest.mark.parametrize("hybrid", [False, True])
def test_calls_with_an_iterator_are_those_of_the_model(always_faster, hybrid):
    options = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",), "audit": 1.0}
    if hybrid:
        fast = tsopt.hybridize(scaled_by_each, **options)
    else:
        fast = tsopt.optimize(scaled_by_each, (torch.ones(2), [2.0, 3.0]), **options)
    with torch.no_grad():
        fast(torch.ones(2), [2.0, 3.0])
        for end in range(2, 150):
            assert fast(torch.ones(2), iter([1.0, end])).tolist() == [end, end]
            assert fast(torch.ones(2), (x for x in [1.0, end])).tolist() == [end, end]
    report = tsopt.report(fast).reports[0] if hybrid else fast.report
    assert report.signatures == (("an iterator among the arguments", "runs in eager mode: a call consumes it"),)


def scaled_by_each(x, scales):
    for scale in scales:
        x = x * scale
    return x


def test_attributes_of_tensors_are_read_by_the_model_itself(always_faster):
    def function(x):
        return x.tanh() * getattr(x, "scale", 1.0)

    options = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
    fast = tsopt.optimize(function, torch.ones(2), **options)
    plain, scaled = torch.ones(2), torch.ones(2)
    scaled.scale = 3.0
    scaled.other = plain.other = 1
    for _ in range(2):
        torch.testing.assert_close(fast(plain), plain.tanh())
        torch.testing.assert_close(fast(scaled), scaled.tanh() * 3)
    assert fast.executable.accepts((plain,), {}) is not None
    with pytest.raises(tsopt.CaptureError, match="the model reads the attribute 'scale' of an input"):
        tsopt.capture(function, scaled)
    torch.testing.assert_close(tsopt.optimize(function, scaled, **options)(scaled), scaled.tanh() * 3)
