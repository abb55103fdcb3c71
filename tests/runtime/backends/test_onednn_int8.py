"""Layers on integers by oneDNN: exact sums, inputs that no scale fits, and float32 where it is not worth it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tsopt
from tests.passes.quantize.models import OwnWeight
from tests.runtime.racing.helpers import fast_timings
from tsopt.compiler.graph.quantized import quantized_layer
from tsopt.errors import NoGain
from tsopt.passes.lower_precision import in_precision
from tsopt.runtime.backends import onednn_int8
from tsopt.runtime.backends.layer_sites import ACTIVATIONS as FUSED
from tsopt.runtime.backends.layer_sites import NOTHING
from tsopt.runtime.backends.onednn import OneDnnBackend, lower
from tsopt.runtime.backends.onednn_int8 import quantize, run_layer
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import Row
from tsopt.runtime.report import Report

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
NAN, INF = float("nan"), float("inf")


def has_kernel():
    try:
        torch.ops.onednn.qlinear_prepack(torch.ones(4, 4, dtype=torch.int8), [1, 4])
    except (RuntimeError, AttributeError):
        return False
    return True


pytestmark = pytest.mark.skipif(not has_kernel(), reason="this build of torch has no int8 linear kernel")


def _integers_win(ways):
    for way in ways:
        way()
    return [float(position) for position in range(len(ways))]


def _floats_win(ways):
    return [-second for second in _integers_win(ways)]


@pytest.fixture
def integers_win(monkeypatch):
    """What is chosen must not depend on how busy this machine is; whether a kernel is right is still checked."""
    monkeypatch.setattr(onednn_int8, "_best", _integers_win)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).eval()


@pytest.fixture
def program(model):
    return in_precision(tsopt.capture(model, X), "int8")


def calls_of(lowered, target):
    return [node for node in lowered.program.calls() if node.target is target]


@pytest.mark.usefixtures("integers_win")
def test_layers_run_on_integers_and_compute_what_the_program_says(program, model):
    lowered = lower(program)
    assert (lowered.on_integers, lowered.quantized) == (2, 2)
    assert not any("quantized_decomposed" in str(node.target) for node in lowered.program.calls())
    (answer,), (wanted,) = lowered.program.module()(X), program.module()(X)
    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-5)
    assert OneDnnBackend().compile(program).notes[0] == "2 of 2 layers run in int8, the others in float32"


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(64, 96), X),
        (nn.Conv2d(8, 16, 3), torch.randn(1, 8, 9, 9, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["linear", "conv2d"],
)
def test_a_weight_in_another_memory_order_is_packed_as_it_reads(layer, x):
    with torch.no_grad():
        layer.weight.data = layer.weight.transpose(0, 1).contiguous().transpose(0, 1)
    program = in_precision(tsopt.capture(layer.eval(), x), "int8")
    lowered = lower(program)
    assert lowered.on_integers == 1
    (answer,), (wanted,) = lowered.program.module()(x), program.module()(x)
    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("integers_win")
def test_what_several_layers_read_is_quantized_once():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 48)

        def forward(self, x):
            return self.q(x), self.k(x)

    lowered = lower(in_precision(tsopt.capture(Heads().eval(), X), "int8"))
    assert len(calls_of(lowered, run_layer)) == 2
    assert len(calls_of(lowered, quantize)) == 1


IMAGE = torch.randn(2, 6, 9, 8, generator=torch.Generator().manual_seed(3))
CONVOLUTIONS = [
    nn.Conv2d(6, 8, 3),
    nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(6, 4, (3, 1), padding=(2, 1), dilation=2, groups=2),
    nn.Conv2d(6, 6, 3, padding=1, groups=6),
    nn.Conv2d(6, 5, 1),
]


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(6, 8, 3, stride=2, padding=1), (2, 6, 9)),
        (nn.Conv3d(3, 4, 2, padding=1, bias=False), (1, 3, 4, 5, 6)),
        (nn.Linear(6, 4), (2, 3, 5, 6)),
    ],
    ids=str,
)
def test_layers_of_any_rank_run_on_integers(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    program = in_precision(tsopt.capture(nn.Sequential(layer).eval(), x), "int8")
    lowered = lower(program)
    assert lowered.on_integers == 1
    (answer,), (wanted,) = lowered.program.module()(x), program.module()(x)
    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-4)
    odd = x.index_fill(1, torch.tensor([0]), NAN)  # what integers cannot hold runs in float
    with torch.no_grad():
        torch.testing.assert_close(lowered.program.module()(odd)[0], layer(odd), rtol=0, atol=0.05, equal_nan=True)


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize("x", [IMAGE, IMAGE.relu(), IMAGE.contiguous(memory_format=torch.channels_last), IMAGE + 5])
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_a_convolution_adds_up_what_the_program_says(layer, x):
    """Also at the borders: padding is 0.0, which is the zero point, not 0."""
    program = in_precision(tsopt.capture(nn.Sequential(layer).eval(), x), "int8")
    lowered = lower(program)
    assert lowered.on_integers == 1
    (answer,), (wanted,) = lowered.program.module()(x), program.module()(x)
    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-4)
    assert answer.stride() == wanted.stride()


ACTIVATIONS = [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.25), nn.Tanh(), nn.SiLU(), nn.Hardswish(), nn.GELU()]
ACTIVATIONS += [nn.GELU("tanh"), nn.LeakyReLU(0.3)]


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize("odd", [None, NAN])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("layer", "x"), [(nn.Linear(64, 9), X), (nn.Conv2d(6, 8, 3), IMAGE)], ids=["linear", "conv"])
def test_an_activation_is_part_of_a_layer_whose_kernel_knows_it(layer, x, activation, odd):
    program = in_precision(tsopt.capture(nn.Sequential(layer, activation).eval(), x), "int8")
    lowered = lower(program)
    left = len([node for node in lowered.program.calls() if node.target in FUSED])
    assert left == (isinstance(layer, nn.Conv2d) and isinstance(activation, nn.GELU | nn.Tanh | nn.LeakyReLU))
    if odd is not None:
        x = x.index_fill(0, torch.tensor([1]), odd)
        program = tsopt.capture(nn.Sequential(layer, activation).eval(), x)
    (answer,), (wanted,) = lowered.program.module()(x), program.module()(x)
    torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-4 if odd is None else 0.03, equal_nan=True)


@pytest.mark.usefixtures("integers_win")
def test_an_activation_that_the_kernel_does_not_know_and_a_residual_sum_stay_behind_the_layer():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return (x + self.b(self.a(x).sigmoid())).relu()

    program = in_precision(tsopt.capture(Block().eval(), X), "int8")
    lowered = lower(program)
    assert lowered.on_integers == 2
    assert len([node for node in lowered.program.calls() if node.target in FUSED]) == 2
    torch.testing.assert_close(lowered.program.module()(X)[0], program.module()(X)[0], rtol=1e-3, atol=0.02)


def test_sums_of_the_largest_products_are_exact():
    """64 products of 255 and 127, which saturate where pairs of them are added in 16 bits."""
    largest = onednn_int8.largest_weight()
    weight = torch.full((16, 64), largest, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [1, 64])
    x = torch.full((1, 64), 255, dtype=torch.uint8)
    answer = run_layer(x, 1.0, 0, packed, weight, torch.ones(16), torch.zeros(16, dtype=torch.int64), None, (), NOTHING)
    assert answer.tolist() == [[64.0 * 255 * largest] * 16]


RANGES = {
    "normal": X,
    "zeros": X * 0,
    "one value": torch.full((5, 64), 3.0),
    "negative": -X.abs(),
    "symmetric": X.clamp(-1, 1),
    "far from zero": X + 1000,
    "large": X * 1e25,
    "small": X * 1e-15,
    "denormal": X * 1e-40,
}


@pytest.mark.parametrize("x", RANGES.values(), ids=RANGES)
def test_quantization_rounds_to_the_nearest_step(x):
    integers, scale, zero = quantize(x)
    assert integers.dtype == torch.uint8
    error = ((integers.double() - zero) * scale - x.double()).abs().max()
    assert error <= 0.501 * scale + 1e-6 * x.abs().max()
    assert (torch.tensor(0.0) / scale + zero) == zero  # 0.0 is exact


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize("x", RANGES.values(), ids=RANGES)
def test_inputs_of_any_range_keep_their_accuracy(program, model, x):
    first = nn.Sequential(model[0])
    (answer,) = lower(in_precision(tsopt.capture(first, X), "int8")).program.module()(x)
    wanted = first(x)
    assert (answer - wanted).double().norm() < 0.03 * wanted.double().norm()


@pytest.mark.usefixtures("integers_win")
@pytest.mark.parametrize("odd", [NAN, INF, -INF, 1e37])
def test_what_no_scale_fits_is_computed_in_float(program, model, odd):
    x = X.index_fill(0, torch.tensor([1]), odd)
    (answer,), wanted = lower(program).program.module()(x), model(x)
    assert torch.equal(answer.isnan(), wanted.isnan())
    assert torch.equal(answer.isinf(), wanted.isinf())
    rows = [0, 2, 3, 4]
    assert (answer[rows] - wanted[rows]).norm() < 0.03 * wanted[rows].norm()


@pytest.mark.usefixtures("integers_win")
def test_an_outlier_does_not_cost_the_other_values_their_digits(model):
    """1000 times the others, it would leave these a quarter of a step."""
    first = nn.Sequential(model[0])
    lowered = lower(in_precision(tsopt.capture(first, X), "int8")).program.module()
    outlier, rows = X.clone(), [0, 2, 3, 4]
    outlier[1, 3] = 1000.0
    (answer,), wanted = lowered(outlier), first(outlier)
    assert (answer[rows] - wanted[rows]).norm() < 0.02 * wanted[rows].norm()
    assert quantize(outlier)[1] == 0.0
    assert quantize(X)[1] > 0.0


def test_layers_that_would_not_be_faster_get_their_weights_back(program, monkeypatch):
    monkeypatch.setattr(onednn_int8, "_best", _floats_win)
    made = program.copy()
    assert onednn_int8.lower_int8(made, {}) == [False, False]
    assert not any(quantized_layer(made, node) or "quantized" in str(node.target) for node in made.calls())
    with pytest.raises(NoGain, match="no layer is faster in int8 on this machine"):
        OneDnnBackend().compile(program)


def test_what_was_measured_is_not_measured_again(program, monkeypatch):
    monkeypatch.setattr(onednn_int8, "_best", _integers_win)
    measured = json.loads(json.dumps(lower(program).faster))
    monkeypatch.setattr(onednn_int8, "_best", None)
    assert lower(program, measured).on_integers == 2
    refused = {kind: False for kind in measured}
    with pytest.raises(NoGain):
        lower(program, refused)


@pytest.mark.usefixtures("integers_win")
def test_a_kernel_that_adds_up_something_else_is_out(program, monkeypatch):
    real = onednn_int8.run_layer
    monkeypatch.setattr(onednn_int8, "run_layer", lambda *args: real(*args) * 1.01)
    assert not any(onednn_int8.lower_int8(program.copy(), {}))


@pytest.mark.usefixtures("integers_win")
def test_weights_that_this_processor_could_not_add_up_run_in_float(program, monkeypatch):
    """A program that was quantized on a machine with VNNI."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert any(int(w.abs().max()) > 64 for w in program.weights.values() if w.dtype == torch.int8)
    assert not any(onednn_int8.lower_int8(program.copy(), {}))


@pytest.mark.usefixtures("integers_win")
def test_optimize_races_it(model):
    fast = tsopt.optimize(
        model, X, precision="int8", backends=("onednn",), cache=False, isolate=False, seconds=0.05, time_all=True
    )
    row = next(row for row in fast.report.rows if row.key == "onednn?precision=int8")
    assert row.status == "ok"
    assert row.accuracy.ok
    assert "2 of 2 layers run in int8, the others in float32" in row.notes


def test_the_report_says_which_layers_run_on_integers(model, monkeypatch):
    monkeypatch.setattr(onednn_int8, "_is_faster", lambda site, shape, *_: shape[-1] == 96)
    fast_timings(monkeypatch, "torch + oneDNN, precision int8")
    given = {"precision": "int8", "backends": ("onednn",), "isolate": False, "seconds": 0.05}
    for _ in range(2):  # raced, and from the cache
        fast = tsopt.optimize(model, X, **given)
        assert fast.report.winner_key == "onednn?precision=int8"
        assert "1 of 2 layers run in int8, the others in float32" in fast.report.winning.notes
        kept = {layer.name: layer.kept for layer in fast.report.quantization}
        assert kept == {"0": "torch + oneDNN is not faster with its integers", "2": ""}
        assert "int8: 1 of 2 layers in int8" in str(fast.report)


@pytest.fixture
def saved(model, tmp_path):
    """A bundle whose winner runs on integers: a race would choose by the clock."""
    program = in_precision(tsopt.capture(model, X), "int8")
    key = "onednn?precision=int8"
    rows = (Row("eager"), Row("torch + oneDNN, precision int8", key=key))
    report = Report(
        model="Sequential", rows=rows, winner_key=key, why="chosen", nodes=(3, 3), environment=environment()
    )

    def refuse(example):
        raise tsopt.BackendError("no other form")

    executable = OneDnnBackend().compile(program)
    executable.precision = "int8"
    return Optimized(model, program, executable, report, tsopt.example(X), refuse, "capture").save(tmp_path / "m.tsopt")


@pytest.mark.usefixtures("integers_win")
def test_a_bundle_holds_the_integers_and_runs_on_them(model, saved):
    loaded = tsopt.load(saved)
    assert loaded.backend == "onednn"
    assert 0 < (loaded(X) - model(X)).norm() < 0.03 * model(X).norm()
    stored = load_file(saved / "weights.safetensors")
    assert [w.dtype for w in stored.values() if w.dim() == 2] == [torch.int8] * 2


@pytest.mark.usefixtures("integers_win")
def test_a_bundle_runs_in_float_where_integers_are_no_gain(model, saved, monkeypatch):
    monkeypatch.setattr(onednn_int8, "_best", _floats_win)
    loaded = tsopt.load(saved)
    assert loaded.backend == "eager"
    assert (loaded(X) - model(X)).norm() < 0.02 * model(X).norm()


@pytest.mark.usefixtures("integers_win")
def test_an_input_that_the_program_does_not_round_stays_in_float(model):
    program = in_precision(tsopt.capture(model, X), "int8-weights")
    lowered = lower(program)
    assert (lowered.on_integers, lowered.quantized, lowered.layers) == (0, 0, 2)
    torch.testing.assert_close(lowered.program.module()(X)[0], program.module()(X)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("integers_win")
def test_an_int8_weight_of_the_users_own_model_is_read_as_it_says():
    model = OwnWeight().eval()
    lowered = lower(tsopt.transform(tsopt.capture(model, X)))
    assert lowered.quantized == 0
    torch.testing.assert_close(lowered.program.module()(X)[0], model(X), rtol=1e-4, atol=1e-5)


def test_an_empty_input_is_left_as_it_is():
    """It has no range: the rows that a mask selects may be none."""
    assert quantize(X[:0])[1:] == (0.0, 0)


@pytest.mark.usefixtures("integers_win")
def test_a_sequence_leaves_in_the_order_in_memory_of_eager():
    x = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(5))
    lowered = lower(in_precision(tsopt.capture(nn.Sequential(nn.Conv1d(6, 8, 3, padding=1)).eval(), x), "int8"))
    assert lowered.on_integers == 1
    assert lowered.program.module()(x)[0].is_contiguous()
