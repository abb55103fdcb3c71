"""Programs in a lower precision: what is computed in it and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.low import LOW, W, X, mlp
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.lower_precision import LowerPrecision, in_precision
from tsopt.runtime.backends import onednn
from tsopt.runtime.backends.backend import get_backend


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
def test_bits_are_read_from_float32(precision):
    program = lowered(lambda self, x: F.linear(x, W).view(torch.int32), X, precision=precision)
    assert program.outputs[0].meta["val"].shape == X.shape
    assert dtypes(program) == {
        "to": [str(LOW[precision])[6:], "float32"],
        "linear": [str(LOW[precision])[6:]],
        "view": ["int32"],
    }


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
