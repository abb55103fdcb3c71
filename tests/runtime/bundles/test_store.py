from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tsopt
from tests.runtime.helpers import Counter, save, sign
from tsopt.cli.verify import against_record
from tsopt.compiler.calls.tensor_file import read_tensors
from tsopt.runtime.bundles import store

A = torch.arange(3.0)
ROOT = Path(__file__).parents[3]


# ---- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_bundle_computes_what_the_model_computes(bundles, mlp, mlp_input, name):
    loaded = tsopt.load(bundles[name], trust=name == "torchscript")
    assert loaded.backend == name
    assert isinstance(loaded(mlp_input), torch.Tensor)
    torch.testing.assert_close(loaded(mlp_input + 1), mlp(mlp_input + 1).detach())


def test_torchscript_is_code_and_asks_for_trust(bundles):
    with pytest.raises(tsopt.BundleError, match=r"executes code \(TorchScript\)") as caught:
        tsopt.load(bundles["torchscript"])
    assert "trust=True" in caught.value.fix


def test_a_bundle_keeps_the_input_contract(bundles):
    with pytest.raises(tsopt.SignatureError, match="shape"):
        tsopt.load(bundles["onnxruntime"])(torch.zeros(3, 6))


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_bundle_with_state_counts_on_from_what_was_stored(tmp_path, name):
    model = Counter()
    executable = tsopt.compile(tsopt.capture(model, torch.zeros(2)), name)
    executable(torch.zeros(2))
    place = save(executable, tmp_path / "c.tsopt", model, torch.zeros(2))
    assert model.count.tolist() == [1, 1]
    loaded = tsopt.load(place, trust=True)
    assert [loaded(torch.zeros(2)).tolist() for _ in range(2)] == [[2, 2], [3, 3]]
    assert model.count.tolist() == [1, 1]
    assert tsopt.load(place, trust=True)(torch.zeros(2)).tolist() == [2, 2]


def test_a_bundle_is_for_the_default_dtype_that_it_was_saved_under(tmp_path, default_dtype):
    x = torch.arange(6)

    def third(x):
        return x / 3

    default_dtype(torch.float64)
    executable = tsopt.compile(tsopt.capture(third, x), "eager")
    place, wanted = save(executable, tmp_path / "m.tsopt", third, x), third(x)
    assert torch.equal(tsopt.load(place, probe=True)(x), wanted)
    default_dtype(torch.float32)
    with pytest.raises(
        tsopt.BundleError, match=r"default dtype float64, and that of this process is float32"
    ) as caught:
        tsopt.load(place)
    assert "torch.set_default_dtype(torch.float64)" in caught.value.fix
    assert "outputs match" in against_record(place, trust=False).verdict
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(tsopt.BundleError, match="compiled under the default dtype float64, and it is float32 now"):
        save(executable, tmp_path / "other.tsopt", third, x)


def test_an_onnx_file_names_every_dtype(tmp_path, default_dtype):
    x = torch.arange(6)

    def third(x):
        return x / 3

    default_dtype(torch.float64)
    place, wanted = (
        save(tsopt.compile(tsopt.capture(third, x), "onnxruntime"), tmp_path / "m.tsopt", third, x),
        third(x),
    )
    default_dtype(torch.float32)
    torch.testing.assert_close(tsopt.load(place)(x), wanted)


def test_nested_outputs_keep_their_types(tmp_path):
    def model(x):
        return {"sum": x.sum(), "pair": (x, [x * 2, None, 3, 2.5, torch.float32])}

    example = torch.arange(3.0)
    place = save(tsopt.compile(tsopt.capture(model, example), "eager"), tmp_path / "n.tsopt", model, example)
    found = tsopt.load(place)(example)
    assert list(found) == ["sum", "pair"]
    assert found["pair"][1][1:] == [None, 3, 2.5, torch.float32]
    assert found["sum"].item() == 3


def test_nested_inputs_are_taken_as_the_model_took_them(tmp_path):
    def model(pair, scale=1.0, *, options):
        return pair[0] * scale + pair[1][0] + options["bias"]

    one = torch.ones(2)
    example = tsopt.example((one, [one]), 2.0, options={"bias": one})
    place = save(tsopt.compile(tsopt.capture(model, example), "eager"), tmp_path / "n.tsopt", model, example)
    loaded = tsopt.load(place)
    assert loaded((one, [one]), 2.0, options={"bias": one}).tolist() == [4, 4]
    with pytest.raises(tsopt.SignatureError):
        loaded((one, [one]), 3.0, options={"bias": one})


class Wave(torch.nn.Module):
    """Complex inputs, weights, state and results."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, dtype=dtype))
        self.register_buffer("sum", torch.zeros(3, dtype=dtype))

    def forward(self, x):
        self.sum.add_(x)
        return x * self.weight, self.sum * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_stored(tmp_path, dtype):
    model, example = Wave(dtype), torch.randn(3, dtype=dtype).conj()
    place = save(tsopt.compile(tsopt.capture(model, example), "eager"), tmp_path / "w.tsopt", model, example)
    stored = read_tensors(place / "check.safetensors")
    torch.testing.assert_close(stored["input.0"], example.resolve_conj())
    expected = Wave(dtype)
    expected.load_state_dict(model.state_dict())
    loaded = tsopt.load(place)
    for position, (value, wanted) in enumerate(zip(loaded(example), expected(example), strict=True)):
        torch.testing.assert_close(value, wanted)
        torch.testing.assert_close(stored[f"output.{position}"], wanted)
    assert against_record(place, trust=False).verdict.startswith("intact")


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_constants_of_torch_and_shapes_come_back(tmp_path, name):
    def model(x, shape):
        return {"y": x * 2, "layout": x.layout, "format": torch.channels_last, "shape": shape}

    example = (torch.ones(2, 3), torch.Size([2, 3]))
    place = save(tsopt.compile(tsopt.capture(model, example), name), tmp_path / "c.tsopt", model, example)
    found = tsopt.load(place)(*example)
    assert (found["layout"], found["format"], found["shape"]) == (torch.strided, torch.channels_last, example[1])
    assert type(found["shape"]) is torch.Size


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_a_class_that_is_returned_is_refused_and_one_that_is_given_is_not(tmp_path, name):
    example = torch.ones(2)
    fast = tsopt.compile(tsopt.capture(lambda x: (x * 2, Counter), example), name)
    with pytest.raises(tsopt.BundleError, match=r"returns the class tests\.runtime\.helpers:Counter"):
        save(fast, tmp_path / "c.tsopt", lambda x: (x * 2, Counter), example)
    assert os.listdir(tmp_path) == []

    def given(x, kind):
        return x * 2 if kind is Counter else x

    fast = tsopt.compile(tsopt.capture(given, (example, Counter)), name)
    loaded = tsopt.load(save(fast, tmp_path / "c.tsopt", given, (example, Counter)))
    assert loaded(example, Counter).tolist() == [2, 2]
    for other in (None, int):
        with pytest.raises(tsopt.SignatureError):
            loaded(example, other)


def test_a_bundle_that_returns_a_class_is_refused(tmp_path):
    place = save(tsopt.compile(tsopt.capture(lambda x: (x, 3), A), "eager"), tmp_path / "c.tsopt", lambda x: (x, 3), A)

    def change(manifest):
        manifest["signature"]["result"]["children"][1] = {"kind": "const", "class": "builtins:int"}

    sign(place, change)
    with pytest.raises(tsopt.BundleError, match="returns the class builtins:int"):
        tsopt.load(place)


def test_a_loaded_bundle_says_its_model_inputs_and_engine(bundles):
    assert repr(tsopt.load(bundles["onnxruntime"])) == "<tsopt.Executable Sequential(input: f32[2, 6]) on onnxruntime>"


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_loaded_bundle_takes_a_parameter_for_a_tensor(bundles, mlp, mlp_input, name):
    loaded = tsopt.load(bundles[name], trust=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.nn.Parameter(mlp_input)), mlp(mlp_input))


def test_saving_twice_replaces_the_bundle(optimized_by, tmp_path):
    place = tmp_path / "m.tsopt"
    optimized_by("eager").save(place)
    optimized_by("onnxruntime").save(place)
    assert tsopt.load(place).backend == "onnxruntime"
    assert os.listdir(tmp_path) == ["m.tsopt"]


def test_a_missing_parent_directory_is_made(optimized_by, tmp_path):
    assert tsopt.load(optimized_by("eager").save(tmp_path / "a" / "b" / "m.tsopt")).backend == "eager"


def test_members_are_as_readable_as_the_umask_says(bundles):
    modes = {file.name: file.stat().st_mode & 0o777 for file in bundles["eager"].iterdir()}
    assert len(set(modes.values())) == 1, modes
    assert modes["manifest.json"] & 0o600 == 0o600


def test_saving_leaves_the_model_and_the_rng_alone(tmp_path):
    model = torch.nn.Embedding(4, 2, max_norm=0.1)
    ids = torch.tensor([1, 2])
    executable = tsopt.compile(tsopt.capture(model.eval(), ids), "eager")
    before, rng = model.weight.detach().clone(), torch.get_rng_state()
    save(executable, tmp_path / "e.tsopt", model, ids)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_onnx_bundle_runs_without_torch(bundles, mlp, mlp_input, tmp_path):
    np.save(tmp_path / "x.npy", mlp_input.numpy())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, tsopt\n"
        f"fast = tsopt.load({str(bundles['onnxruntime'])!r})\n"
        f"x = numpy.load({str(tmp_path / 'x.npy')!r})\n"
        "y = fast(x)\n"
        "assert type(y) is numpy.ndarray\n"
        f"numpy.save({str(tmp_path / 'y.npy')!r}, y)\n"
        "try: fast(x[:1])\n"
        "except tsopt.SignatureError as error: print(error.what)\n"
        "assert not [m for m in sys.modules if m.startswith(('torch.', 'onnx.', 'onnxscript'))]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "has shape [1, 6]" in done.stdout
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), mlp(mlp_input).detach().numpy(), rtol=1e-4, atol=1e-5)


# ---- all or nothing -----------------------------------------------------------------------------------------


@pytest.fixture(params=["_write_check", "_write_manifest"])
def failing_save(request, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, request.param, fail)


@pytest.mark.usefixtures("failing_save")
def test_a_failed_save_leaves_nothing(optimized_by, tmp_path):
    with pytest.raises(tsopt.BundleError, match="cannot be written") as caught:
        optimized_by("eager").save(tmp_path / "m.tsopt")
    assert "No space left" in caught.value.why
    assert os.listdir(tmp_path) == []


def test_an_existing_bundle_survives_a_failed_save(optimized_by, bundle, tmp_path, monkeypatch):
    place = bundle("eager")
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    monkeypatch.setattr(store, "_write_manifest", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimized_by("onnxruntime").save(place)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert os.listdir(tmp_path) == ["b.tsopt"]


def test_a_file_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(tsopt.BundleError, match="exists and is not a bundle"):
        optimized_by("eager").save(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_directory_of_other_files_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("mine")
    with pytest.raises(tsopt.BundleError, match="directory with other files"):
        optimized_by("eager").save(tmp_path / "d")
    assert (tmp_path / "d" / "thesis.tex").read_text() == "mine"


def test_somebody_elses_directory_with_a_manifest_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text('{"name": "a browser extension"}')
    (tmp_path / "d" / "background.js").write_text("mine")
    with pytest.raises(tsopt.BundleError, match="directory with other files"):
        optimized_by("eager").save(tmp_path / "d")
    assert (tmp_path / "d" / "background.js").exists()


def test_a_link_is_not_written_through(optimized_by, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(tsopt.BundleError, match="not a bundle"):
        optimized_by("eager").save(tmp_path / "link")
    assert not os.listdir(tmp_path / "real")


def test_a_path_below_a_file_cannot_be_written(optimized_by, tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(tsopt.BundleError, match="cannot be written"):
        optimized_by("eager").save(tmp_path / "f" / "m.tsopt")
