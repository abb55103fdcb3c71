"""What real data and the user's metric decide in a race, in the bundle of its winner, and in its audits."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

import tsopt
from tests.passes.quantize.models import Residual, images, mlp, seeded
from tests.runtime.racing.helpers import fast_timings
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.errors import AccuracyError, BundleError
from tsopt.runtime.bundles import known_bundles
from tsopt.runtime.calling.audit import executable_difference
from tsopt.runtime.checking import accuracy
from tsopt.runtime.checking.criterion import criterion_of

TITLE = "OpenVINO, precision int8-static"
NEEDS_VNNI = pytest.mark.skipif(
    largest_weight() < 127, reason="int8-weights does not race on a processor without VNNI instructions"
)


@pytest.fixture
def int8_wins(monkeypatch):
    fast_timings(monkeypatch, TITLE)


def optimized(model=None, example=None, *, backends=("openvino",), **options):
    model = Residual().eval() if model is None else model
    example = images(1)[0] if example is None else example
    given = {"precision": "int8", "calibration": images(16), "seconds": 0.1, "isolate": False, "cache": False} | options
    return tsopt.optimize(model, example, backends=backends, **given)


@pytest.fixture(scope="module")
def won():
    """A model, and what it is optimized to, for tests that only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        fast_timings(patch, TITLE)
        model = Residual().eval()
        return model, optimized(model)


def test_the_winner_runs_in_int8_and_says_by_what_it_was_judged(won):
    model, fast = won
    assert fast.report.winner == TITLE
    assert fast.report.numerics == "LOSSY"
    assert any(
        note.startswith("relative error ") and "on 8 inputs, limit 4.40%" in note for note in fast.report.winning.notes
    )
    assert "int8: 3 of 3 layers in int8; lowest SQNR" in str(fast.report)
    assert fast.report.calibration == "16 inputs"
    x = images(1, 50)[0]
    with torch.no_grad():
        assert float((fast(x) - model(x)).norm() / model(x).norm()) < 0.05
    layers = json.loads(json.dumps(fast.report.to_json()))["quantization"]
    assert {item["name"] for item in layers} == {"stem", "inner", "head"}
    losses = [item["output_sqnr"] if item["output_sqnr"] is not None else item["sqnr"] for item in layers]
    assert losses == sorted(losses), "those that lose most come first"
    assert "| head | linear |" in fast.report.markdown


def test_an_example_that_is_not_like_the_data_does_not_decide(int8_wins):
    assert optimized(example=images(1)[0] * 1000).report.winner == TITLE


def test_what_loses_too_much_on_the_data_is_not_accurate_enough(int8_wins, monkeypatch):
    monkeypatch.setattr("tsopt.quantization.variants.SAFE", 1e9)
    monkeypatch.setattr("tsopt.runtime.checking.criterion.RELATIVE_ERROR", 1e-4)
    row = optimized().report.row(TITLE)
    assert row.status in ("not accurate enough", "no gain")
    assert "relative error" in row.reason


def test_the_metric_has_the_last_word(int8_wins):
    model, inputs = Residual().eval(), torch.cat(images(8, 90))
    with torch.no_grad():
        wanted = model(inputs)

    def likeness(candidate):
        return -float((candidate(inputs) - wanted).abs().max())

    fine = optimized(model, metric=likeness, max_drop=10.0)
    assert fine.report.winner == TITLE
    assert any(note.startswith("metric -0.0") for note in fine.report.winning.notes)
    strict = optimized(model, metric=likeness, max_drop=1e-7)
    assert strict.report.winner != TITLE
    assert all(layer.kept for layer in strict.report.quantization)


class Cached(torch.nn.Module):
    """Writes its keys to a buffer, or to an input."""

    def __init__(self):
        super().__init__()
        self.keys, self.head = mlp(64, 64, 64), mlp(64, 8)
        self.register_buffer("cache", torch.zeros(8, 1, 64))

    def forward(self, x, place, out=None):
        keys = self.keys(x)[:1]
        (self.cache if out is None else out).index_copy_(0, place, keys[None])
        return self.head(x)


@pytest.mark.parametrize("given", [(), (torch.zeros(8, 1, 64),)], ids=["buffer", "input"])
@pytest.mark.parametrize("metric", [None, "top1"])
def test_what_calls_write_is_judged_on_the_data(int8_wins, monkeypatch, given, metric):
    data = [(torch.randn(16, 64, generator=seeded(i)), torch.tensor([i % 8]), *given) for i in range(16)]
    fast = optimized(Cached().eval(), data[0], calibration=data, metric=metric)
    assert fast.report.winner == TITLE
    what = "input 2" if given else "the model's state"
    if metric is not None:
        (said,) = (note for note in fast.report.winning.notes if "other outputs: relative error" in note)
        assert f"({what}) on 8 inputs, limit 4.40%" in said
    monkeypatch.setattr("tsopt.runtime.checking.criterion.RELATIVE_ERROR", 1e-4)
    strict = optimized(Cached().eval(), data[0], calibration=data, metric=metric)
    assert all(layer.kept for layer in strict.report.quantization if layer.name.startswith("keys"))


def test_a_metric_that_only_the_engine_fails_refuses_it(int8_wins, monkeypatch):
    """The program as torch runs it is fine, the engine's executable is not."""
    monkeypatch.setattr("tsopt.quantization.measurements.compile", lambda program, backend, **_: "simulated")
    found = optimized(
        metric=lambda m: 1.0 if getattr(m, "_called", m) == "simulated" or _is_model(m) else 0.5, max_drop=0.1
    )
    assert found.report.row(TITLE).status == "not accurate enough"
    assert "metric 0.5, eager 1: a drop of 0.5, limit 0.1" in found.report.row(TITLE).reason


def _is_model(candidate):
    return not isinstance(getattr(candidate, "_called", candidate), tsopt.Executable)


def test_audits_accept_what_the_data_has_shown(won):
    model, fast = won
    exe = fast.executable
    assert 0.044 <= exe.tolerance < 0.2
    assert executable_difference(exe, model, tsopt.example(images(1, 70)[0])) == ""
    assert "relative error" in executable_difference(exe, model, tsopt.example(images(1, 70)[0] * 50))


def test_a_bundle_keeps_the_tolerance(int8_wins, tmp_path):
    model = Residual().eval()
    fast = optimized(model, images(1)[0] * 1.5)
    place = fast.save(tmp_path / "m.tsopt")
    loaded = tsopt.load(place)
    assert (loaded.precision, loaded.tolerance) == ("int8-static", fast.executable.tolerance)
    assert torch.equal(loaded(images(1)[0]), fast(images(1)[0]))
    tsopt.verify(model, loaded, images(1)[0], precision=loaded.precision)
    with pytest.raises(AccuracyError, match="relative error"):
        tsopt.verify(model, loaded, images(1)[0] * 1e4, precision=loaded.precision)


def test_an_invalid_tolerance_is_refused(won, tmp_path):
    from tsopt.runtime.bundles.members import MANIFEST, digest_of

    place = won[1].save(tmp_path / "m.tsopt")
    manifest = json.loads((place / MANIFEST).read_text())
    for value in (0.0, -1.0, 2.0, 1, "0.1", True, [0.1]):
        manifest["tolerance"] = value
        manifest["sha256"] = digest_of({key: item for key, item in manifest.items() if key != "sha256"})
        (place / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(BundleError, match="invalid tolerance"):
            tsopt.load(place, probe=False)


def test_the_onnx_file_of_an_int8_winner_is_int8(int8_wins, tmp_path):
    import onnx

    fast = optimized(backends=("openvino", "onnxruntime"))
    fast.verified("onnxruntime", fused=False).save(tmp_path / "m.onnx")
    ops = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert ops.count("QuantizeLinear") >= 3
    assert fast.verified("torchscript").precision == "fp32"


def test_another_signature_runs_in_full_precision(int8_wins, monkeypatch):
    fast = optimized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(torch.cat(images(3)))
    assert not any("int8" in outcome for _, outcome in fast.report.signatures)


def test_without_vnni_instructions_int8_weights_do_not_race(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    fast = optimized(mlp(64, 64, 64), torch.randn(1, 64, generator=seeded(0)), calibration=None)
    (row,) = (row for row in fast.report.rows if row.name == "OpenVINO, precision int8-weights")
    assert (row.verdict, row.reason.split(" (")[0]) == (
        "no gain",
        "integer weights need a processor with VNNI instructions",
    )


@NEEDS_VNNI
def test_a_signature_for_which_int8_is_not_accurate_enough_runs_in_full_precision(monkeypatch):
    title = "OpenVINO, precision int8-weights"
    fast_timings(monkeypatch, title)
    fast = optimized(mlp(64, 64, 64), torch.randn(1, 64, generator=seeded(0)), calibration=None)
    assert fast.report.winner == title
    monkeypatch.setattr("tsopt.runtime.checking.criterion.RELATIVE_ERROR", 1e-9)
    fast_timings(monkeypatch, "OpenVINO")
    with torch.no_grad():
        fast(torch.randn(3, 64, generator=seeded(1)))
    ((_, outcome),) = fast.report.signatures
    assert outcome.startswith("captured for openvino, ")
    assert f"; not chosen: {title}: " in outcome
    assert "relative error" in outcome


@NEEDS_VNNI
def test_another_signature_is_judged_by_the_call_and_not_by_generated_inputs(monkeypatch):
    title = "OpenVINO, precision int8-weights"
    fast_timings(monkeypatch, title)
    fast = optimized(mlp(64, 64, 64), torch.randn(1, 64, generator=seeded(0)), calibration=None)
    monkeypatch.setitem(accuracy.LIMITS, "int8-weights", 1e-9)  # on generated inputs
    with torch.no_grad():
        fast(torch.randn(3, 64, generator=seeded(1)))
    ((_, outcome),) = fast.report.signatures
    assert outcome.startswith("captured for openvino")
    assert "not chosen" not in outcome


def test_a_partitioned_model_runs_in_full_precision_and_says_so():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(8, 8)

        def forward(self, x):
            y = self.inner(x)
            return y * 2 if float(y.sum()) > 0 else y

    calls = [torch.randn(1, 8, generator=seeded(i)) for i in range(4)]
    with pytest.warns(UserWarning, match="this one is partitioned, and runs in full precision"):
        optimized(Broken().eval(), calls[0], calibration=calls, frontend="parts", backends=("onednn",))


def test_the_cache_knows_the_data(monkeypatch):
    from tsopt.runtime.racing import cached_race

    class Found(BaseException):
        """Ends `optimize` where the cache is asked."""

    def key_of_race(**options):
        def find(key, *_):
            raise Found(key)

        monkeypatch.setattr(cached_race.cache, "find", find)
        monkeypatch.setattr(cached_race, "race", lambda *_, **__: find(None))
        with pytest.raises(Found) as caught:
            optimized(cache=True, **options)
        return caught.value.args[0]

    usual = key_of_race()
    assert usual == key_of_race()
    others = [key_of_race(calibration=[x * 2 for x in images(16)]), key_of_race(max_drop=0.5)]
    assert len({usual, *others}) == 3
    assert key_of_race(metric=lambda m: 1.0) is None, "a function may be another one tomorrow"


@pytest.mark.sliced(1)
@pytest.mark.parametrize("data", [iter, np.stack])
def test_another_signature_needs_no_calibration(int8_wins, monkeypatch, data):
    """A generator is empty by then, and an array has no truth value."""
    fast = optimized(calibration=data([image.numpy() for image in images(16)]))
    fast_timings(monkeypatch, "OpenVINO")
    with torch.no_grad():
        fast(torch.cat(images(3)))
    ((_, outcome),) = fast.report.signatures
    assert outcome.startswith("captured for openvino")


@pytest.mark.parametrize("metric", ["cosine", "top1", None])
def test_classes_that_differ_are_a_drop(metric):
    model, data = Residual().eval(), [tsopt.example(image) for image in images(8)]

    def classes(x):
        return model(x).argmax(-1)

    signature = tsopt.capture(classes, images(1)[0]).signature
    criterion = criterion_of(classes, data, metric, 0.01, signature)
    assert criterion.judge(classes).ok
    assert not criterion.judge(lambda x: classes(x) + 1).ok


@pytest.mark.parametrize("metric", ["sqnr", "cosine"])
def test_complex_outputs_are_compared_as_numbers(metric):
    data = [tsopt.example(image) for image in images(4)]

    def spectrum(x):
        return torch.fft.fft(x)

    signature = tsopt.capture(spectrum, images(1)[0]).signature
    criterion = criterion_of(spectrum, data, metric, None if metric == "sqnr" else 0.01, signature)
    assert criterion.judge(lambda x: spectrum(x) * 1.001).ok
    assert not criterion.judge(lambda x: spectrum(x).conj()).ok


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("variant", ["int8-static", pytest.param("int8-weights", marks=NEEDS_VNNI)])
def test_a_bundle_in_int8_can_be_loaded_on_another_machine(monkeypatch, tmp_path, backend, variant):
    name = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}[backend]
    fast_timings(monkeypatch, f"{name}, precision {variant}")
    data = [torch.randn(8, 64, generator=seeded(i)) for i in range(8)]
    calibration = None if variant != "int8-static" else data
    fast = optimized(mlp(64, 64, 64), data[0], calibration=calibration, backends=(backend,))
    assert fast.report.winner == f"{name}, precision {variant}"
    place = fast.save(tmp_path / "m.tsopt")
    known_bundles.forget_all()
    loaded = tsopt.load(place)
    assert torch.equal(loaded(data[1]), fast(data[1]))
