"""Programs in a lower precision: how far the outputs may be away, and who races."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.low import X, mlp
from tests.passes.quantize.models import OwnInput, OwnScores, OwnWeight
from tsopt.compiler.graph.program import Numerics
from tsopt.passes.lower_precision import LowerPrecision, in_precision
from tsopt.passes.quantize.weights import Int8Weights
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.compare import compare

# ---- how far is too far -----------------------------------------------------------------------------------


def test_a_limit_is_of_the_whole_tensor():
    reference = torch.ones(100)
    assert compare(reference * 1.02, reference, limit=0.03).test == "limit"
    found = compare(reference * 1.05, reference, limit=0.03)
    assert (found.ok, found.reason) == (False, "relative error 5.00%, limit 3.00%")
    assert not compare(reference, torch.zeros(100), limit=0.03).ok
    assert "zeros" in compare(reference, torch.zeros(100), limit=0.03).reason


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_limit_takes_no_new_infinity_or_nan(value):
    reference = torch.ones(1000)
    result = reference.clone()
    result[7] = value
    assert not compare(result, reference, limit=0.5).ok


def test_of_classes_one_in_a_hundred_may_differ():
    reference = torch.zeros(200, dtype=torch.int64)
    for count, ok in ((2, True), (3, False)):
        result = reference.clone()
        result[:count] = 1
        assert compare(result, reference, limit=0.01).ok is ok


def test_large_inputs_have_a_wider_limit_but_may_not_overflow():
    model = lambda x: x * 2  # noqa: E731
    oracle = Oracle(model, tsopt.example(X), None)
    limit_at = {"example": 0.03, "large": 0.3}
    for kind, limit in limit_at.items():
        for factor, ok in ((0.9, True), (1.1, False)):

            def off(x, kind=kind, away=1 + limit * factor):
                is_large = bool(x.abs().max() > 50)
                return x * 2 * (away if is_large == (kind == "large") else 1.0)

            assert oracle.judge(off, precision="bf16").ok is ok, (kind, factor)
    overflows = lambda x: torch.where(x.abs() > 50, float("inf"), x * 2)  # noqa: E731
    assert "infinities" in oracle.judge(overflows, precision="fp16").reason


def far(away):
    """A model whose outputs for the example are 100 times as large as for what is drawn like it, and a candidate."""

    def model(x):
        return x.mean() * torch.ones(4) if x.std() < 1e-3 else x[:4] * 0.01

    return model, lambda x: model(x) + away


def test_outputs_near_zero_by_chance_decide_nothing():
    example = torch.ones(64)
    model, candidate = far(0.02)
    made_up = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert not compare(candidate(made_up), model(made_up), limit=0.03).ok
    oracle = Oracle(model, tsopt.example(example), None)
    oracle.expected[:] = [item for item in oracle.expected if item.inputs.kind in ("example", "drawn-1", "random")]
    assert oracle.judge(candidate, precision="bf16").ok
    assert not oracle.judge(far(0.04)[1], precision="bf16").ok


def test_small_inputs_are_not_measured_by_the_example():
    underflows = lambda x: torch.where(x.abs() < 0.05, 0.0, x * 2)  # noqa: E731
    found = Oracle(lambda x: x * 2, tsopt.example(torch.rand(64) + 1), None).judge(underflows, precision="fp16")
    assert not found.ok
    assert "on the tiny input" in found.reason


def test_beyond_the_limit_is_not_accurate_enough_and_an_infinity_is_wrong():
    oracle = Oracle(lambda x: x * 2, tsopt.example(X), None)
    found = oracle.judge(lambda x: x * 2.1, precision="bf16")
    assert (found.status, str(found)) == ("not accurate enough", f"not accurate enough: {found.reason}")
    assert oracle.judge(lambda x: x * 2 / 0, precision="bf16").status == "wrong"
    assert oracle.judge(lambda x: x * 2, precision="bf16").status == "ok"


# ---- who races --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "int3"}, "unknown precision 'int3'"),
        ({"precision": "tf32"}, "no selected backend supports tf32"),
        ({"precision": "bf16", "backends": ("torchscript",)}, "no selected backend supports bf16"),
        ({"precision": "bf16", "backends": ("nonsense",)}, "unknown backend"),
    ],
    ids=str,
)
def test_a_precision_that_nobody_has_is_refused(options, text):
    with pytest.raises(tsopt.UsageError, match=text):
        tsopt.optimize(mlp(), X, **options)


@pytest.fixture
def low_wins(monkeypatch):
    """A race that only one precision can win, whatever the clock says."""
    from tsopt.runtime.racing import race
    from tsopt.runtime.racing.speedup import Timing

    def measure(calls, inputs, **_):
        return {name: Timing((1.0, 1.01) * 4 if "bf16" in name else (9.0, 9.01) * 4, 5) for name in calls}

    monkeypatch.setattr(race, "measure", measure)


@pytest.mark.usefixtures("low_wins")
def test_what_wins_in_a_lower_precision_says_so_and_is_stored(tmp_path):
    model = mlp()
    fast = tsopt.optimize(model, X, backends=("eager",), precision="bf16", isolate=False, cache=False)
    assert (fast.report.winner, fast.report.numerics) == ("eager + passes, precision bf16", "LOSSY")
    assert "as close to eager as its precision allows" in fast.report.text
    assert not torch.equal(fast(X), model(X))
    place = fast.save(tmp_path / "m.tsopt")
    loaded = tsopt.load(place)
    assert loaded.precision == "bf16"
    assert torch.equal(loaded(X), fast(X))
    assert {tensor.dtype for tensor in load_file(place / "weights.safetensors").values()} == {torch.bfloat16}


def test_at_level_3_all_precisions_race_and_one_that_is_named_alone():
    options = {"backends": ("eager",), "level": 3, "isolate": False, "cache": False, "seconds": 0.01}
    found = tsopt.optimize(mlp(), X, **options).report
    assert [row.key for row in found.rows] == ["model", "eager", "eager?precision=bf16", "eager?precision=fp16"]
    found = tsopt.optimize(mlp(), X, precision="fp32", **options).report
    assert [row.key for row in found.rows] == ["model", "eager"]


OWN = [OwnWeight().eval(), OwnInput().eval(), OwnScores().eval()]
OWN_X = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8", "int8-weights"])
@pytest.mark.parametrize("model", OWN, ids=lambda model: type(model).__name__)
def test_a_model_that_is_quantized_already_is_not_approximated(model, precision):
    """What it rounds could not be told from what tsopt rounds, which engines do in ways of their own."""
    program = tsopt.transform(tsopt.capture(model, OWN_X))
    with pytest.raises(tsopt.errors.NoGain, match=r"the model is quantized already\n  where: .*models\.py"):
        in_precision(program, precision)
    assert tsopt.transform(program, (LowerPrecision("bf16"), Int8Weights()), level=3).numerics < Numerics.LOSSY


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_it_runs_in_full_precision_and_the_row_says_why(precision):
    model, backend = OwnInput().eval(), {"bf16": "eager", "int8": "onednn"}[precision]
    options = {"isolate": False, "cache": False, "seconds": 0.01}
    fast = tsopt.optimize(model, OWN_X, precision=precision, backends=(backend,), **options)
    (row,) = (row for row in fast.report.rows if row.key == f"{backend}?precision={precision}")
    assert (row.status, row.reason) == ("no gain", "the model is quantized already")
    with torch.no_grad():
        torch.testing.assert_close(fast(OWN_X), model(OWN_X))


def test_where_no_product_can_be_lowered_the_row_says_no_gain():
    options = {"precision": "bf16", "isolate": False, "cache": False, "seconds": 0.01}
    found = tsopt.optimize(Net(lambda self, x: x.sin() * 2), X, backends=("eager",), **options).report
    row = found.row("eager + passes, precision bf16")
    assert (row.status, row.reason) == ("no gain", "the program has no float32 matrix products to run in bf16")


@pytest.mark.usefixtures("low_wins")
@pytest.mark.parametrize("isolate", [True, False])
def test_a_program_for_many_sizes_is_lowered_and_right_at_all_of_them(isolate):
    model, options = mlp(), {"backends": ("eager",), "isolate": isolate, "cache": False}
    fast = tsopt.optimize(model, X, dynamic={"input": {0: "batch[1..9]"}}, precision="bf16", **options)
    assert fast.report.row("eager + passes, precision bf16").verdict in ("faster", "slower", "same")
    for size in (1, 9):
        x = torch.randn(size, 8)
        assert (fast(x) - model(x)).norm() < 0.03 * model(x).norm()


def test_a_candidate_in_a_lower_precision_does_not_take_the_program_as_it_is():
    from tsopt.runtime.backends.backend import compile

    with pytest.raises(tsopt.UsageError, match="the program has not been lowered to bf16"):
        compile(tsopt.capture(mlp(), X), "eager?precision=bf16")


@pytest.mark.usefixtures("low_wins")
def test_a_bundle_is_verified_by_the_limit_of_its_precision(tmp_path):
    from tsopt.cli.verify import against_model, against_record

    model = mlp()
    fast = tsopt.optimize(model, X, backends=("eager",), precision="bf16", isolate=False, cache=False)
    place = fast.save(tmp_path / "m.tsopt")
    assert "intact" in against_record(place, trust=False).verdict
    loaded = SimpleNamespace(model=model, example_input=X)
    assert "as its precision allows" in against_model(place, False, loaded, seed=0).verdict


@pytest.mark.usefixtures("low_wins")
def test_a_call_of_another_form_gets_the_same_precision():
    fast = tsopt.optimize(mlp(), X, backends=("eager",), precision="bf16", isolate=False, cache=False)
    answer = fast(X[:2])
    assert not torch.equal(answer, mlp()(X[:2]))
    assert (answer - mlp()(X[:2])).norm() < 0.03 * answer.norm()


def test_products_that_are_named_stay_in_float32():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    program = tsopt.capture(model, torch.randn(2, 8))
    made = in_precision(program, "bf16", ("2",))
    assert [str(node.meta["val"].dtype) for node in made.calls() if "linear" in str(node.target)] == [
        "torch.bfloat16",
        "torch.float32",
    ]
    with pytest.raises(tsopt.UsageError, match="keep_float 'head' matches no layer"):
        in_precision(program, "bf16", ("head",))
