"""Programs in a lower precision: what is computed in it and what is not, how far the outputs may be away, who races."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import OwnInput, OwnScores, OwnWeight
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.lower_precision import LowerPrecision, in_precision
from tsopt.passes.quantize.weights import Int8Weights
from tsopt.runtime.backends import onednn
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.compare import compare

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).eval()


def lowered(model, *inputs, precision="bf16"):
    """The program in the low precision, sound; and how far its answer is away from the model's."""
    program = tsopt.capture(Net(model) if not isinstance(model, nn.Module) else model, tsopt.example(*inputs))
    made = in_precision(tsopt.transform(program), precision)
    verify_program(made)
    return made


def dtypes(program):
    """Op -> dtypes of its results, in order."""
    found: dict[str, list[str]] = {}
    for node in program.calls():
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and isinstance(node.target, torch._ops.OpOverload):
            found.setdefault(str(node.target).split(".")[1], []).append(str(value.dtype).removeprefix("torch."))
    return found


@pytest.mark.parametrize("precision", LOW)
def test_products_and_what_lies_between_them_are_low(precision):
    program = lowered(mlp(), X, precision=precision)
    low = str(LOW[precision]).removeprefix("torch.")
    assert dtypes(program) == {
        "to": [low, "float32"],
        "linear": [low, low],
        "gelu": [low],
        "layer_norm": [low],
    }
    assert {str(program.weights[name].dtype).removeprefix("torch.") for name in program.used_weights()} == {low}
    assert program.numerics == Numerics.LOSSY


def test_inputs_and_outputs_keep_their_dtypes():
    model = mlp()
    program = lowered(model, X)
    (answer,) = program.module()(X)
    assert answer.dtype == torch.float32
    assert 0 < (answer - model(X)).norm() < 0.03 * model(X).norm()


def test_the_program_that_was_given_is_left():
    program = tsopt.capture(mlp(), X)
    text, names = program.text, set(program.weights)
    in_precision(program, "bf16")
    assert (program.text, set(program.weights)) == (text, names)
    assert in_precision(program, "fp32") is program


def test_it_is_a_pass_that_is_run_where_lossy_ones_are_allowed_and_asked_for():
    program = tsopt.capture(mlp(), X)
    passes = (*tsopt.STANDARD, LowerPrecision("bf16"))
    assert tsopt.transform(program, passes).numerics < Numerics.LOSSY
    assert tsopt.transform(program, passes, level=3).numerics == Numerics.LOSSY
    assert tsopt.transform(program, level=3).numerics < Numerics.LOSSY


def test_each_product_takes_fuel_and_is_told_by_its_place():
    program = tsopt.capture(mlp(), X)
    made, (record,) = run(program, (LowerPrecision("bf16"),), Limits(Numerics.LOSSY, fuel=1))
    assert [(done.rule, done.where[:1]) for done in record.done] == [("lower_product", "0")]
    assert dtypes(made)["linear"] == ["bfloat16", "float32"]


def test_what_loses_too_much_stays_in_float32():
    found = dtypes(lowered(lambda self, x: ((x @ W).exp().sum(-1, keepdim=True).log() @ W[:1]).relu(), X))
    assert found["matmul"] == ["bfloat16"] * 2 if "matmul" in found else found["linear"] == ["bfloat16"] * 2
    assert found["exp"] == found["sum"] == found["log"] == ["float32"]
    assert found["relu"] == ["bfloat16"]


def test_positions_and_their_angles_stay_in_float32():
    """In bfloat16 257 is 256."""

    def model(self, x):
        angle = (torch.arange(300, dtype=torch.float32) + x[0, 0]).cos()
        return (x @ W).sum() + angle

    assert dtypes(lowered(model, X))["cos"] == ["float32"]


def test_a_residual_sum_is_low_and_its_other_operand_is_cast_once():
    def model(self, x):
        y = F.embedding(torch.tensor([0, 1, 2]), W) + x
        return y + y @ W, y

    found = dtypes(lowered(model, X))
    assert found["add"] == ["float32", "bfloat16"]
    assert found["to"] == ["bfloat16", "float32"]


def test_results_of_several_are_typed_anew():
    def model(self, x):
        a, b = (x @ W).chunk(2, -1)
        values, places = (a * b).max(-1)
        return values, places

    program = lowered(model, X)
    assert dtypes(program)["mul"] == ["bfloat16"]
    assert [str(node.meta["val"].dtype) for node in program.outputs] == ["torch.float32", "torch.int64"]


def test_a_number_that_the_low_precision_has_not_stays_beside_float32():
    mask = torch.eye(8, dtype=torch.bool)
    program = lowered(lambda self, x: (W @ x.t() @ x @ W).masked_fill(mask, -3e38), X, precision="fp16")
    assert dtypes(program)["masked_fill"] == ["float32"]


@pytest.mark.parametrize(
    "model",
    [
        lambda self, x, hidden: (x @ W @ x.t()).masked_fill(hidden, -1000000000).softmax(-1) @ x,
        lambda self, x, hidden: torch.where(hidden, -1000000000, x @ W @ x.t()).softmax(-1) @ x,
        lambda self, x, hidden: (x @ W @ x.t() + 100000).softmax(-1) @ x,
        lambda self, x, hidden: (x @ W).clamp(-100000, 100000) @ W,
    ],
    ids=["masked_fill", "where", "sum", "clamp"],
)
def test_so_does_a_whole_number(model):
    hidden = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    program = lowered(model, X, hidden, precision="fp16")
    with torch.no_grad():
        (found,), wanted = program.module()(X, hidden), model(None, X, hidden)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_sizes_are_no_such_numbers():
    rows = torch.randn(70_000, 8, generator=torch.Generator().manual_seed(0))
    program = lowered(lambda self, x: (x @ W).reshape(1, 70_000, 8).relu() @ W, rows, precision="fp16")
    assert set(dtypes(program)["relu"]) == {"float16"}


LOWEST = torch.finfo(torch.float32).min


def seen_by(scores, x):
    return scores.softmax(-1) @ x


MASKED = {
    "sum": lambda self, x, m: seen_by(x @ W @ x.t() + (1.0 - m.float()) * LOWEST, x),
    "moved": lambda self, x, m: seen_by(x @ W @ x.t() + ((1.0 - m.float()) * LOWEST)[None].expand(1, 3, 3)[0], x),
    "filled": lambda self, x, m: seen_by(x @ W @ x.t() + torch.zeros_like(x[:, :3]).masked_fill(m == 0, LOWEST), x),
    "chosen": lambda self, x, m: seen_by(x @ W @ x.t() + torch.where(m == 0, LOWEST, 0.0), x),
    "a constant": lambda self, x, m: seen_by(x @ W @ x.t() + (1.0 - m.float()) * torch.tensor(LOWEST), x),
    "attention": lambda self, x, m: F.scaled_dot_product_attention(
        *(y[None, None] for y in (x @ W, x, x)), attn_mask=(1.0 - m.float()) * LOWEST
    ),
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("model", MASKED.values(), ids=MASKED)
def test_computed_masks_of_the_lowest_number_stay_finite(precision, model):
    m = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    program = lowered(model, X, m, precision=precision)
    with torch.no_grad():
        (found,), wanted = program.module()(X, m), model(None, X, m)
    assert wanted.isfinite().all()
    assert found.isfinite().all()
    torch.testing.assert_close(found[..., [0, 2], :], wanted[..., [0, 2], :], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("precision", LOW)
def test_a_computed_mask_keeps_its_infinities(precision):
    """Where all that is left is hidden by the lowest number, what is hidden by -inf stays so."""

    def model(self, x, m):
        return seen_by(x @ W @ x.t() + ((1.0 - m.float()) * LOWEST).masked_fill(m == 2, -torch.inf), x)

    m = torch.tensor([[2, 2, 0], [1, 1, 2], [0, 2, 2]])
    program = lowered(model, X, m, precision=precision)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X, m)[0], model(None, X, m), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("precision", LOW)
def test_masks_of_the_lowest_number_stay_finite(precision):
    """-inf in a whole row would be NaN after softmax."""
    mask = torch.full((3, 3), torch.finfo(torch.float32).min)
    program = lowered(lambda self, x: (x @ W @ x.t() + mask).softmax(-1), X, precision=precision)
    assert program.module()(X)[0].isfinite().all()


@pytest.mark.parametrize("precision", LOW)
def test_so_do_sums_with_them(precision):
    """Scores of -128, of rows that are hidden as a whole: in float16, -65504 - 128 would be -inf."""
    mask, x = torch.tensor([[LOWEST] * 3, [LOWEST] * 3, [0.0] * 3]), 4 * torch.ones(3, 8)
    program = lowered(lambda self, x: (x @ -torch.eye(8) @ x.t() + mask).softmax(-1), x, precision=precision)
    torch.testing.assert_close(program.module()(x)[0], torch.full((3, 3), 1 / 3), rtol=0.02, atol=0)


@pytest.mark.parametrize("precision", LOW)
def test_a_constant_mask_keeps_its_infinities_and_its_lowest_numbers(precision):
    mask = torch.tensor([[-torch.inf, LOWEST, LOWEST], [0, LOWEST, -torch.inf], [0, 0, 0]])

    def model(self, x, rows):
        return seen_by(x @ W @ x.t() + mask.index_select(0, rows), x)

    rows = torch.tensor([0, 1, 2])
    program = lowered(model, X, rows, precision=precision)
    (found,), wanted = program.module()(X, rows), model(None, X, rows)
    assert wanted.isfinite().all()
    assert found.isfinite().all()
    torch.testing.assert_close(found[1:], wanted[1:], rtol=0.05, atol=0.05)


LIMIT = torch.tensor(100_000.0)


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        (lambda self, x: (x @ torch.eye(8)).clamp(-100_000, 100_000) @ (W / 64), 1),
        (lambda self, x: (x * 70_000) @ (W / 64), 70_000),
        (lambda self, x: torch.where(x > 50_000, 100_000.0, x) @ (W / 64), 1),
        (lambda self, x: torch.minimum(x @ torch.eye(8), LIMIT) @ (W / 64), 1),
    ],
    ids=["clamp", "factor", "where", "constant"],
)
def test_what_float16_has_stays_where_larger_numbers_are_possible(model, unit):
    """Larger than half of its largest number, 65504."""
    x = torch.eye(3, 8) * torch.tensor([[40_000.0], [-60_000.0], [3.0]]) / unit
    program = in_precision(tsopt.capture(Net(model), x), "fp16")
    torch.testing.assert_close(program.module()(x)[0], model(None, x), rtol=0.01, atol=0.01)


def test_whole_numbers_and_float64_stay():
    def model(self, x, i):
        return (x @ W).double() @ torch.eye(8, dtype=torch.float64), i * 2

    program = lowered(model, X, torch.arange(3))
    kinds = dtypes(program)
    assert "float64" in [*kinds.get("linear", []), *kinds.get("matmul", [])]
    assert kinds["mul"] == ["int64"]


def test_state_is_written_in_its_own_dtype():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(3, 8))

        def forward(self, x):
            self.last.copy_(x @ W)
            return self.last + 1

    model = Memory().eval()
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, X)), "eager?precision=bf16")
    made(X)
    assert made.state[0].dtype == torch.float32
    assert torch.allclose(made.state[0], X @ W, atol=0.1)


@pytest.mark.parametrize("model", [lambda self, x: x.sin() * 2, lambda self, x: (x.double() @ W.double()).float()])
def test_a_model_without_such_products_gains_nothing(model):
    with pytest.raises(tsopt.errors.NoGain, match="no float32 matrix products"):
        lowered(model, X)


@pytest.mark.parametrize("backend", ["eager", "onednn", "openvino"])
def test_backends_compute_in_it(monkeypatch, backend):
    # Which kernel is faster depends on the machine; here every layer is oneDNN's.
    monkeypatch.setattr(onednn, "_is_faster", lambda *_: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    x = torch.randn(16, 64)
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, x)), f"{backend}?precision=bf16")
    verdict = tsopt.verify(model, made, x, precision="bf16")
    assert (made.precision, verdict.test) == ("bf16", "limit")
    with pytest.raises(tsopt.AccuracyError):
        tsopt.verify(model, made, x)


@pytest.mark.parametrize("name", ["eager", "onednn", "openvino", "inductor", "cudagraph"])
def test_a_precision_that_a_backend_has_not(name):
    with pytest.raises(tsopt.UsageError, match=f"{name} does not support precision 'int3'") as caught:
        get_backend(f"{name}?precision=int3")
    assert "bf16" in caught.value.fix


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
