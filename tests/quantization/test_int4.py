"""The int4 variant: as many weights in 4 bits as the criterion accepts, and what is said of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.quantize.models import images, mlp, seeded
from tests.quantization.helpers import layers, quantized, rows
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.errors import NoGain
from tsopt.quantization import measurements
from tsopt.runtime.backends.candidate import Candidate, candidates_for
from tsopt.runtime.checking.criterion import Judgement
from tsopt.runtime.layer_table import LayerRecord, layer_table, lines, summary

pytestmark = pytest.mark.skipif(
    largest_weight() < 127, reason="int8 weights, which the others have, need VNNI instructions"
)
LAX = {"metric": "cosine", "max_drop": 0.5}


def made(model, data, **options):
    found = quantized(model, data[0], wanted=("int4",), calibration=data, **options)
    return found.variants["int4"], found.layers["int4"]


def test_all_weights_have_four_bits_where_that_is_accurate_enough():
    program, records = made(mlp(96, 64, 32), rows(8, 96), **LAX)
    assert [layer.group for layer in layers(program)] == [32, 32]
    assert [(item.precision, item.kept, item.wider) for item in records] == [("int4", "", "")] * 2
    assert (records[0].bytes_float, records[0].bytes_int8) == (4 * 64 * 96, 64 * 96 // 2 + 9 * 64 * 96 // 32 // 2)
    assert all(15 < item.sqnr < 30 for item in records)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_as_many_as_the_criterion_accepts(monkeypatch, most):
    def judged(self, made, by):
        count = sum(layer.group is not None for layer in layers(made))
        return Judgement(count <= most, 0.0, 1.0, f"{count} are too many")

    monkeypatch.setattr(measurements.Measurements, "_judged", judged)
    program, records = made(mlp(64, 64, 64, 64), rows(8, 64))
    assert len(layers(program)) == 3
    assert sum(layer.group is not None for layer in layers(program)) == most
    narrow = [item for item in records if item.precision == "int4"]
    assert len(narrow) == most
    assert {item.wider for item in records if item not in narrow} <= {
        "the layers in int4 together exceed the accuracy limit"
    }


def test_the_layer_that_loses_most_has_eight_bits(monkeypatch):
    def judged(self, made, by):
        return Judgement(sum(layer.group is not None for layer in layers(made)) < 3, 0.0, 1.0, "")

    monkeypatch.setattr(measurements.Measurements, "_judged", judged)
    model = mlp(64, 64, 64, 64)
    with torch.no_grad():
        model[2].weight[:, ::8] *= 6.0  # in each group a few large weights leave few steps for the others
        model[0].weight[::8] /= 6.0
        model[0].bias[::8] /= 6.0
    program, records = made(model, rows(16, 64))
    assert [item.precision for item in records] == ["int4", "int8", "int4"]
    assert [layer.group for layer in layers(program)] == [32, None, 32]


def test_a_layer_that_loses_too_much_by_itself_has_eight_bits(monkeypatch):
    monkeypatch.setattr("tsopt.quantization.variants.LOWEST_SQNR_IN_INT4", 100.0)
    program, records = made(mlp(64, 64), rows(8, 64), **LAX)
    assert [layer.group for layer in layers(program)] == [None]
    assert [(item.precision, item.wider) for item in records] == [("int8", "SQNR in int4 below 100 dB")]


def test_layers_that_stay_in_float_in_int8_do_so_in_int4(monkeypatch):
    def judged(self, made, by):
        return Judgement(len(layers(made)) < 3, 0.0, 1.0, "")

    monkeypatch.setattr(measurements.Measurements, "_judged", judged)
    program, records = made(mlp(64, 64, 64, 64), rows(8, 64))
    assert [layer.group for layer in layers(program)] == [64, 64]
    assert sorted(item.precision for item in records) == ["fp32", "int4", "int4"]


def test_without_any_layer_in_int8_there_is_none_in_int4(monkeypatch):
    monkeypatch.setattr(measurements.Measurements, "_judged", lambda *_: Judgement(False, 1.0, 0.5, "too much"))
    program, records = made(mlp(64, 64), rows(8, 64))
    assert isinstance(program, NoGain)
    assert "too much" in program.what
    assert [item.precision for item in records] == ["fp32"]


def test_what_the_user_keeps_stays_in_float():
    program, records = made(mlp(64, 64, 64), rows(8, 64), keep_float=("0",), **LAX)
    assert [(item.precision, item.kept) for item in records] == [("fp32", "keep_float '0'"), ("int4", "")]
    assert len(layers(program)) == 1


@pytest.mark.parametrize(("refused", "group"), [((), 128), ((128,), 64), ((128, 64), 32)])
def test_larger_groups_where_the_criterion_accepts_all_layers_so(monkeypatch, refused, group):
    def judged(self, made, by):
        return Judgement(not any(layer.group in refused for layer in layers(made)), 0.0, 1.0, "")

    monkeypatch.setattr(measurements.Measurements, "_judged", judged)
    program, records = made(mlp(128, 128, 64), rows(8, 128))
    assert [layer.group for layer in layers(program)] == [group] * 2
    assert records[0].bytes_int8 == 128 * 128 // 2 + 9 * (128 * 128 // group) // 2


def test_rows_that_cannot_be_split_have_eight_bits():
    program, records = made(mlp(96, 40, 32), rows(8, 96), **LAX)
    assert [layer.group for layer in layers(program)] == [32, None]
    assert records[1].wider == "its rows cannot be split into groups of 32"


def test_convolutions_stay_in_float():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 64)).eval()
    data = [torch.randn(1, 3, 8, 8, generator=seeded(i)) for i in range(8)]
    program, records = made(model, data, **LAX)
    assert [(item.op, item.precision, item.kept) for item in records] == [
        ("conv2d", "fp32", "the fastest candidate quantizes only linear layers"),
        ("linear", "int4", ""),
    ]
    assert len(layers(program)) == 1


def test_a_model_without_linear_layers_gains_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    found = quantized(model, images(1)[0], wanted=("int4",), calibration=images(2))
    assert found.variants["int4"].what.startswith("linear layers account for only")


def test_without_vnni_it_is_not_made(monkeypatch):
    monkeypatch.setattr("tsopt.quantization.measurements.largest_weight", lambda: 64)
    found = quantized(mlp(64, 64), rows(1, 64)[0], wanted=("int4",), calibration=rows(8, 64))
    assert "VNNI" in found.variants["int4"].what


def test_the_engines_that_have_such_products_race():
    keys = [candidate.key for candidate in candidates_for(None, "int4") if candidate.variant != "fp32"]
    assert "onnxruntime?precision=int4" in keys
    assert "openvino?precision=int4" in keys
    assert not any("onednn" in key or "torchscript" in key for key in keys)
    assert Candidate.parse("onnxruntime?precision=int4").title == "ONNX Runtime, precision int4"


def optimized(engine):
    """A network, its inputs, and what it is optimized to."""
    model, data = mlp(64, 96, 32).eval(), rows(16, 64)
    options = {"precision": "int4", "calibration": data, "time_all": True, "isolate": False, "cache": False}
    return model, data, tsopt.optimize(model, data[0], backends=(f"{engine}?precision=int4",), **LAX, **options)


def error_of(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_model_in_int4_from_end_to_end(tmp_path, always_faster, engine):
    model, _, fast = optimized(engine)
    assert fast.report.winner_key == f"{engine}?precision=int4"
    assert "int4: 2 of 2 layers in int4, 0 in int8" in str(fast.report)
    x = torch.randn(1, 64, generator=seeded(99))
    with torch.no_grad():
        wanted, found = model(x), fast(x)
    assert 0 < error_of(found, wanted) < 0.2
    fast.save(tmp_path / "saved")
    again = tsopt.load(tmp_path / "saved")
    assert torch.allclose(again(x), found, atol=1e-6)


@pytest.mark.parametrize("other", ["onnxruntime", "openvino"])
def test_it_is_exported_in_int4_to_the_engines_that_have_it(always_faster, other):
    model, data, fast = optimized("onnxruntime")
    x = data[0]
    with torch.no_grad():
        found, wanted = fast.verified(other)(x), model(x)
    assert error_of(found, wanted) == pytest.approx(
        error_of(fast(x), wanted), rel=0.05
    )  # each engine rounds the inputs itself
    assert error_of(found, wanted) > 1e-3, "not in int4"


def test_it_is_exported_in_float_to_the_others(always_faster):
    model, data, fast = optimized("onnxruntime")
    with torch.no_grad():
        torch.testing.assert_close(fast.verified("torchscript")(data[0]), model(data[0]))


@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_its_profile_says_which_layers_are_in_int4(always_faster, monkeypatch, engine, wider):
    def judged(self, made, by):
        return Judgement(sum(layer.group is not None for layer in layers(made)) < 2, 0.0, 1.0, "")

    if wider:  # the two layers together lose too much
        monkeypatch.setattr(measurements.Measurements, "_judged", judged)
    _, _, fast = optimized(engine)
    expected = {item.name: item.precision for item in fast.report.quantization}
    found = {item.layer: item.precision for item in fast.profile().layers if item.work.macs}
    assert sorted(found.values()) == (["int4", "int8-weights"] if wider else ["int4", "int4"])
    assert {name for name, precision in found.items() if precision == "int4"} == {
        name for name, precision in expected.items() if precision == "int4"
    }


def record(name, **options):
    return LayerRecord(name, name, "linear", sqnr=20.0, bytes_float=4000, bytes_int8=600, **options)


def test_how_a_report_says_it():
    records = [
        record("a", bits=4),
        record("b", wider="the layers in int4 together exceed the accuracy limit"),
        record("c", kept="keep_float 'c'"),
    ]
    assert summary(records).startswith("1 of 3 layers in int4, 1 in int8; lowest SQNR")
    assert lines(records, "") == [
        f"int4: {summary(records)}",
        "kept in int8 (the layers in int4 together exceed the accuracy limit): b",
        "kept in float32 (keep_float 'c'): c",
    ]
    header, cells = layer_table(records)
    assert header[-3:] == ("KB quantized", "precision", "because")
    assert [row[-2:] for row in cells] == [
        ("int4", ""),
        ("int8", "the layers in int4 together exceed the accuracy limit"),
        ("fp32", "keep_float 'c'"),
    ]
    assert layer_table(records[1:])[0][-3] == "KB int8"
