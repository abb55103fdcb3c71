"""Calibrated int8 in ONNX Runtime and OpenVINO: exact sums, fused kernels, and files from another processor."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import (
    Attention,
    Bounds,
    OwnInput,
    OwnScores,
    OwnWeight,
    Residual,
    Sequences,
    Video,
    images,
    mlp,
    seeded,
    sequences,
)
from tests.passes.quantize.test_scores import answer, rounded, with_rounded_scores
from tests.passes.quantize.test_static import calibrated
from tests.runtime.racing.helpers import fast_timings
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import largest_weight, rounded_values
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import BackendError
from tsopt.passes.quantize.static import StaticInt8
from tsopt.passes.quantize.weights import Int8Weights
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.onnx import int8_inputs, int8_weights
from tsopt.runtime.onnx.ort_int8 import with_integer_products
from tsopt.runtime.racing import environment

ENGINES = ("onnxruntime", "openvino")


def compiled(made, engine):
    return compile_by(made, engine)


@pytest.mark.sliced(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv1d", "conv3d"])
def test_sums_are_exact(engine, kind):
    """The probe of 64 products of 255 and 127, which kernels that add pairs in 16 bits get wrong."""
    weight, largest = torch.full((4, 64), 127.0), largest_weight()
    x = torch.full((1, 64), 255.0)
    if kind != "linear":
        spatial = [1] * int(kind[4])
        weight, x = weight.view(4, 64, *spatial), x.view(1, 64, *spatial).repeat(1, 1, *[3] * len(spatial))
    made, _ = calibrated(lambda self, x: getattr(F, kind)(x, weight), x, largest=largest)
    found = compiled(made, engine)(x)
    assert torch.allclose(found, torch.full_like(found, 64 * 255 * 127.0), rtol=1e-6), "2,072,640 each"


@pytest.mark.sliced(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Residual().eval(), images(1)[0]),
        (Sequences().eval(), torch.randn(2, 3, 20, generator=seeded(0))),
        (Video().eval(), torch.randn(1, 3, 4, 6, 6, generator=seeded(0))),
        (Bounds().eval(), 8 * images(1)[0]),
        (mlp(16, 32, 8), torch.randn(5, 16, generator=seeded(0))),
        (mlp(16, 32, 8), torch.randn(2, 5, 16, generator=seeded(0))),
    ],
    ids=["images", "1-D", "3-D", "bounds", "rows", "sequences"],
)
def test_engines_compute_what_the_program_says(engine, model, x):
    made, _ = calibrated(model, x, largest=largest_weight())
    with torch.no_grad():
        wanted, eager = made.module()(x)[0], model(x)
    found = compiled(made, engine)(x)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
    assert float((found - eager).norm() / eager.norm()) < 0.04


@pytest.mark.skipif(largest_weight() < 127, reason="sums of signed 8-bit products saturate on this processor")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fused", [True, False])
def test_engines_compute_attention_with_rounded_scores(engine, fused):
    calls = sequences(4)
    made, program = rounded(Attention().eval(), *calls)
    options = {"fused": fused} if engine == "onnxruntime" else {}
    found, wanted = compile_by(made, engine, **options)(calls[0]), answer(program, calls[0])
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.sliced(1)
@pytest.mark.skipif(largest_weight() < 127, reason="sums of signed 8-bit products saturate on this processor")
@pytest.mark.parametrize("engine", ENGINES)
def test_attention_with_rounded_scores_takes_any_size(engine):
    model, calls = Attention().eval(), sequences(4)
    program = tsopt.transform(tsopt.capture(model, [calls[0], torch.randn(3, 7, 16)]))
    made = with_rounded_scores(program, *calls)
    assert rounded_values(made)
    for shape in ((2, 5, 16), (3, 7, 16), (4, 6, 16)):
        x = torch.randn(*shape, generator=seeded(0)) / 2
        with torch.no_grad():
            found, wanted = compile_by(made, engine)(x), model(x)
        assert float((found - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize(("engine", "count"), [("onnxruntime", 0), ("openvino", 2)])
def test_scores_are_rounded_for_the_engine_that_has_kernels_for_them(engine, count):
    made, _ = rounded(Attention().eval(), *sequences(2))
    model = get_backend(Candidate(engine))._exported(made)
    assert sum(node.op_type == "QuantizeLinear" for node in model.model.graph) == count


def test_calls_with_infinities_in_queries_are_served_by_torch():
    """Softmax of an infinite score is NaN, that of the largest integer is not."""
    calls = sequences(2)
    model = Net(lambda self, x: F.scaled_dot_product_attention(x[:1], x[1:], x[1:]))
    made, _ = rounded(model, *calls)
    x = calls[0].clone()
    x[0, 0, 0] = math.inf
    wanted = model(x)
    assert bool(wanted.isnan().any())
    assert torch.equal(compile_by(made, "openvino")(x).isnan(), wanted.isnan())


@pytest.mark.parametrize(("bias", "count"), [(True, 7), (False, 6)])
def test_linear_layers_are_the_runtimes_own_operator(bias, count):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4, bias=bias).eval()
    made, _ = calibrated(model, torch.randn(3, 8, generator=seeded(0)))
    lowered = with_integer_products(made)
    (call,) = (node for node in lowered.graph.nodes if node.args and "MatMulIntegerToFloat" in str(node.args[0]))
    assert len(call.args[1]) == count
    assert not any("linear" in str(node.target) for node in lowered.graph.nodes)


def int8_weights_of(model, x):
    program = tsopt.transform(tsopt.capture(model, x))
    return run(program, (Int8Weights(),), Limits(Numerics.LOSSY))[0]


@pytest.mark.sliced(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("model", "x"),
    [(Residual().eval(), images(1)[0]), (mlp(16, 32, 8), torch.randn(5, 16, generator=seeded(0)))],
    ids=["convolutions", "rows"],
)
def test_nan_and_infinities_are_where_eager_has_them(engine, bad, model, x):
    """Rounded to 8 bits, NaN would be an ordinary number."""
    programs = [calibrated(model, x, largest=largest_weight())[0]]
    if isinstance(model, torch.nn.Sequential):
        programs.append(int8_weights_of(model, x))
    odd = x.clone()
    odd.view(-1)[3] = bad
    for program in programs:
        run_int8 = compiled(program, engine)
        with torch.no_grad():
            wanted, usual = model(odd), model(x)
        found = run_int8(odd)
        assert not wanted.isfinite().all()
        for of in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(of(found), of(wanted))
        finite = wanted.isfinite()
        assert float((found - wanted)[finite].norm() / wanted[finite].norm().clamp(min=1e-9)) < 0.04
        assert float((run_int8(x) - usual).norm() / usual.norm()) < 0.04


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_with_infinities_is_served_by_the_engine(engine, monkeypatch):
    monkeypatch.setattr(int8_inputs, "without_rounding", lambda program: pytest.fail("served by torch"))

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x, mask):
            x = self.inner(x)
            return self.outer(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(2, 6, 16, generator=seeded(0))
    mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    found = compiled(int8_weights_of(model, (x, mask)), engine)(x, mask)
    with torch.no_grad():
        assert float((found - model(x, mask)).norm() / model(x, mask).norm()) < 0.04


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bundle_in_int8_refuses_nan(engine, tmp_path):
    executable, files = bundle_of(engine, tmp_path, largest_weight())
    backend = tsopt.runtime.backends.table.info_of(engine).load()
    load = backend.load_runner(files, executable.signature, json.loads(json.dumps(executable.options)))
    with pytest.raises(BackendError, match="contains NaN or infinity"):
        load([torch.full_like(images(1)[0], math.nan)])


def test_one_outlier_channel_keeps_the_accuracy(monkeypatch):
    fast_timings(monkeypatch, wins="OpenVINO, precision int8-static")
    model = mlp(32, 64, 8)
    with torch.no_grad():
        model[2].weight[:, 0] /= 1000  # what follows expects a channel a thousand times as large
        model[0].weight[0] *= 1000
    x = torch.randn(64, 32, generator=seeded(0))
    found = tsopt.optimize(
        *(model, x[:1]),
        precision="int8",
        calibration=[x[i : i + 1] for i in range(64)],
        backends=("openvino",),
        time_all=True,  # or the times of first calls, which are real, may leave it out
        seconds=0.1,
        isolate=False,
        cache=False,
    )
    assert found.report.winner == "OpenVINO, precision int8-static"
    with torch.no_grad():
        answer = torch.cat([found(x[i : i + 1]) for i in range(64)])
        error = float((answer - model(x)).norm() / model(x).norm())
    assert error < 0.044


def hide_vnni(monkeypatch):
    here = environment.environment()
    flags = tuple(flag for flag in here.flags if flag not in int8_weights.EXACT)
    monkeypatch.setattr(environment, "environment", lambda: type(here)(**{**here.to_json(), "flags": flags}))


def bundle_of(engine, tmp_path, largest):
    made, _ = calibrated(Residual().eval(), *images(1), largest=largest)
    executable = compiled(made, engine)
    (tmp_path / "files").mkdir()
    executable.save(tmp_path / "files")
    return executable, tmp_path / "files"


@pytest.mark.parametrize("engine", ENGINES)
def test_large_weights_are_refused_where_sums_would_saturate(engine, tmp_path, monkeypatch):
    executable, files = bundle_of(engine, tmp_path, 127)
    hide_vnni(monkeypatch)
    assert executable.options["int8_weights"] == 127
    backend = tsopt.runtime.backends.table.info_of(engine).load()
    with pytest.raises(BackendError, match="not safe on this processor\n  why: they go up to 127"):
        backend.load_runner(files, executable.signature, json.loads(json.dumps(executable.options)))
    with pytest.raises(BackendError, match="not safe on this processor"):
        bundle_of(engine, tmp_path / "again", 127)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_seven_bits_load_anywhere(engine, tmp_path, monkeypatch):
    hide_vnni(monkeypatch)
    executable, files = bundle_of(engine, tmp_path, 64)
    backend = tsopt.runtime.backends.table.info_of(engine).load()
    run = backend.load_runner(files, executable.signature, executable.options)
    assert torch.equal(run([images(1)[0]])[0], executable(images(1)[0]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_and_a_concatenation_of_very_different_scales(engine):
    kernels = [torch.randn(4, 3, 3, 3, generator=seeded(i)) * scale for i, scale in enumerate((1.0, 100.0, 0.01))]
    last = torch.randn(2, 8, 1, 1, generator=seeded(9))

    def forward(self, x):
        a, b, c = (F.conv2d(x, kernel) for kernel in kernels)
        return F.conv2d(torch.cat([(a + b).relu(), c.relu()], 1), last), c

    x = torch.rand(1, 3, 6, 6, generator=seeded(5))
    made, _ = calibrated(forward, x)
    with torch.no_grad():
        wanted = Net(forward)(x)
    for found, right in zip(compiled(made, engine)(x), wanted, strict=True):
        assert float((found - right).norm() / right.norm()) < 0.03


def test_a_program_in_float32_says_nothing_of_integers():
    program = tsopt.capture(Residual().eval(), images(1)[0])
    assert int8_weights.to_options(program) == {}
    assert "int8_weights" not in compile_by(program, "onnxruntime").options
    int8_weights.check({})


def test_a_layer_without_parameters_stays_in_float32():
    program = tsopt.capture(Net(lambda self, x: F.linear(x, torch.ones(2, 3))), torch.ones(1, 3))
    assert StaticInt8({}).qparams == {}
    assert with_integer_products(program).text == program.text


@pytest.mark.slow
def test_engines_in_processes_of_their_own_know_the_ops_of_int8():
    """Their parent has prepared exports before it reads the program, which registers these ops."""
    fast = tsopt.optimize(
        Residual().eval(),
        images(1)[0],
        precision="int8",
        calibration=images(8),
        backends=("onnxruntime", "openvino"),
        cache=False,
        seconds=0.1,
    )
    rows = [row for row in fast.report.rows if "int8-static" in row.key]
    assert len(rows) >= 2
    assert not any(row.status in ("failed", "unsupported") for row in rows), rows


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "model", [OwnWeight().eval(), OwnInput().eval(), OwnScores().eval()], ids=lambda m: type(m).__name__
)
def test_what_the_users_own_model_rounds_is_computed_as_it_says(engine, model):
    """Without the user's rounding, or with rounding of ours, the error would be 1 % and more; infinities are cut."""
    x = torch.randn(1, 2, 64, 64, generator=seeded(0))
    own = compiled(tsopt.transform(tsopt.capture(model, x)), engine)
    odd = x.clone()
    odd[0, 0, 0, 0] = math.inf
    with torch.no_grad():
        for given in (x, odd) if isinstance(model, OwnInput) else (x,):
            wanted = model(given)
            assert wanted.isfinite().all()
            assert float((own(given) - wanted).norm() / wanted.norm()) < 1e-4
