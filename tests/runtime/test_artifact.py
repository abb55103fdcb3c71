from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tsopt
from tests.runtime.helpers import Counter, Witness, save
from tsopt.runtime import artifact

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def bundles(optimized_by, tmp_path_factory):
    """One sound bundle of each backend; tests copy before they damage."""
    place = tmp_path_factory.mktemp("bundles")
    return {name: optimized_by(name).save(place / f"{name}.tsopt") for name in ("eager", "torchscript", "onnxruntime")}


@pytest.fixture
def bundle(bundles, tmp_path):
    def copied(name: str = "eager") -> Path:
        return Path(shutil.copytree(bundles[name], tmp_path / "b.tsopt"))

    return copied


def sign(directory: Path, change=None) -> None:
    """Makes a bundle's hashes right again: what a hostile author would do as well."""
    place = directory / "manifest.json"
    manifest = json.loads(place.read_text())
    for name in list(manifest["members"]):
        file = directory / name
        if file.is_file():
            raw = file.read_bytes()
            manifest["members"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    if change is not None:
        change(manifest)
    manifest["sha256"] = artifact._digest(manifest)
    place.write_text(json.dumps(manifest))


def refused(directory: Path, text: str, **options) -> tsopt.ArtifactError:
    with pytest.raises(tsopt.ArtifactError, match=text) as caught:
        tsopt.load(directory, **options)
    return caught.value


# ---- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_bundle_computes_what_the_model_computes(bundles, mlp, mlp_input, name):
    loaded = tsopt.load(bundles[name], trust=name == "torchscript")
    assert loaded.backend == name
    assert isinstance(loaded(mlp_input), torch.Tensor)
    torch.testing.assert_close(loaded(mlp_input + 1), mlp(mlp_input + 1).detach())


def test_torchscript_is_code_and_asks_for_trust(bundles):
    found = refused(bundles["torchscript"], "TorchScript, which is code")
    assert "trust=True" in found.fix


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


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_loaded_bundle_takes_a_parameter_for_a_tensor(bundles, mlp, mlp_input, name):
    loaded = tsopt.load(bundles[name], trust=True)
    torch.testing.assert_close(loaded(torch.nn.Parameter(mlp_input)), mlp(mlp_input).detach())


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

    monkeypatch.setattr(artifact, request.param, fail)


@pytest.mark.usefixtures("failing_save")
def test_a_failed_save_leaves_nothing(optimized_by, tmp_path):
    with pytest.raises(tsopt.ArtifactError, match="cannot be written") as caught:
        optimized_by("eager").save(tmp_path / "m.tsopt")
    assert "No space left" in caught.value.why
    assert os.listdir(tmp_path) == []


def test_an_existing_bundle_survives_a_failed_save(optimized_by, bundle, tmp_path, monkeypatch):
    place = bundle("eager")
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    monkeypatch.setattr(artifact, "_write_manifest", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimized_by("onnxruntime").save(place)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert os.listdir(tmp_path) == ["b.tsopt"]


def test_an_existing_bundle_survives_when_the_last_move_fails(optimized_by, bundle, tmp_path, monkeypatch):
    place = bundle("eager")
    rename = Path.rename

    def failing(self, target):
        if Path(target) == place and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(tsopt.ArtifactError, match="cannot be written"):
        optimized_by("onnxruntime").save(place)
    assert os.listdir(tmp_path) == ["b.tsopt"]
    assert tsopt.load(place).backend == "eager"


def test_a_file_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(tsopt.ArtifactError, match="exists and is no bundle"):
        optimized_by("eager").save(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_directory_of_other_files_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("mine")
    with pytest.raises(tsopt.ArtifactError, match="directory with other files"):
        optimized_by("eager").save(tmp_path / "d")
    assert (tmp_path / "d" / "thesis.tex").read_text() == "mine"


def test_somebody_elses_directory_with_a_manifest_is_not_overwritten(optimized_by, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text('{"name": "a browser extension"}')
    (tmp_path / "d" / "background.js").write_text("mine")
    with pytest.raises(tsopt.ArtifactError, match="directory with other files"):
        optimized_by("eager").save(tmp_path / "d")
    assert (tmp_path / "d" / "background.js").exists()


def test_a_link_is_not_written_through(optimized_by, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(tsopt.ArtifactError, match="no bundle"):
        optimized_by("eager").save(tmp_path / "link")
    assert not os.listdir(tmp_path / "real")


def test_a_path_below_a_file_cannot_be_written(optimized_by, tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(tsopt.ArtifactError, match="cannot be written"):
        optimized_by("eager").save(tmp_path / "f" / "m.tsopt")


# ---- damaged and hostile bundles ----------------------------------------------------------------------------


def test_a_path_that_is_not_there(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.tsopt", "bundle").what


def test_a_file_is_no_bundle(tmp_path):
    (tmp_path / "f.tsopt").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "f.tsopt", "is not a directory")


def test_an_empty_directory_is_no_bundle(tmp_path):
    refused(tmp_path, "has no manifest.json")


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
@pytest.mark.parametrize("sixteenths", [0, 1, 8, 15])
def test_a_cut_member_is_named(bundle, name, sixteenths):
    place = bundle(name)
    for file in list(place.iterdir()):
        raw = file.read_bytes()
        file.write_bytes(raw[: len(raw) * sixteenths // 16])
        found = refused(place, "damaged")
        assert "manifest" in found.why or file.name in found.why
        file.write_bytes(raw)


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime"])
def test_a_cut_member_that_is_signed_again_is_refused_too(bundle, name):
    place = bundle(name)
    member = {"eager": "weights.safetensors", "torchscript": "model.ts", "onnxruntime": "model.onnx"}[name]
    raw = (place / member).read_bytes()
    (place / member).write_bytes(raw[: len(raw) // 2])
    sign(place)
    with pytest.raises((tsopt.ArtifactError, tsopt.BackendError)):
        tsopt.load(place, trust=True)


def test_one_changed_byte_is_noticed(bundle):
    place = bundle("onnxruntime")
    raw = bytearray((place / "model.onnx").read_bytes())
    raw[len(raw) // 2] ^= 1
    (place / "model.onnx").write_bytes(raw)
    assert "'model.onnx' was changed" in refused(place, "damaged").why


def test_an_edited_manifest_is_noticed(bundle):
    place = bundle()
    text = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(text.replace('"backend": "eager"', '"backend": "torchscript"'))
    assert "manifest was changed" in refused(place, "damaged").why


def test_an_extra_member_is_noticed(bundle):
    place = bundle()
    (place / "run.sh").write_text("rm -rf")
    assert "'run.sh' is not in the manifest" in refused(place, "damaged").why


def test_a_missing_member_is_noticed(bundle):
    place = bundle()
    (place / "weights.safetensors").unlink()
    assert "weights.safetensors" in refused(place, "damaged").why


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_linked_member_is_noticed(bundle, tmp_path, link):
    place = bundle()
    shutil.move(place / "weights.safetensors", tmp_path / "outside")
    link(tmp_path / "outside", place / "weights.safetensors")
    assert "a link" in refused(place, "damaged").why


def test_a_linked_manifest_is_noticed(bundle, tmp_path):
    place = bundle()
    shutil.move(place / "manifest.json", tmp_path / "outside")
    (place / "manifest.json").symlink_to(tmp_path / "outside")
    refused(place, "no bundle")


def test_a_newer_format_says_what_to_install(bundle):
    place = bundle()
    sign(place, lambda manifest: manifest.update(format=99))
    found = refused(place, "has format 99")
    assert "pip install" in found.fix


@pytest.mark.parametrize("version", [-1, 0, "1", "two", True, None, 1.0, [1], {}])
def test_a_format_that_is_no_version_is_damage(bundle, version):
    place = bundle()
    sign(place, lambda manifest: manifest.update(format=version))
    assert "the format is" in refused(place, "damaged").why


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"manifest"',
        b"\x80\x04\x95pickle",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"format":' + b"[" * 100_000,
        b'{"format": 1' + b"0" * 5000 + b"}",
        os.urandom(64),
    ],
    ids=range(12),
)
def test_a_manifest_that_is_none_is_damage(bundle, raw):
    place = bundle()
    (place / "manifest.json").write_bytes(raw)
    found = refused(place, "damaged|has format")
    assert len(str(found)) < 1000


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/hostname", "a/../../x", "..", ".", "", "sub/x", "n" * 300, "x\0y", "C:\\x", "\ud800"],
)
def test_a_member_name_that_is_no_plain_name_is_damage(bundle, name):
    place = bundle()
    (place.parent / "outside").write_text("")
    fact = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
    sign(place, lambda manifest: manifest["members"].update({name: fact}))
    refused(place, "damaged")


@pytest.mark.parametrize("members", [None, [], "all", {}, {"program.json": None}, {"program.json": "x"}])
def test_a_member_list_that_is_none_is_damage(bundle, members):
    place = bundle()
    sign(place, lambda manifest: manifest.update(members=members))
    refused(place, "damaged")


def test_every_field_of_the_manifest_may_be_missing(bundle):
    for field in ("backend", "options", "signature", "members"):
        place = bundle("onnxruntime")
        sign(place, lambda manifest, field=field: manifest.pop(field))
        refused(place, "damaged")
        shutil.rmtree(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(inputs=None),
        lambda s: s.update(inputs=[]),
        lambda s: s.update(inputs="x"),
        lambda s: s["inputs"][0].update(type="f32"),
        lambda s: s["inputs"][0]["type"].update(dtype="float33"),
        lambda s: s["inputs"][0]["type"].update(dtype="__class__"),
        lambda s: s["inputs"][0]["type"].update(device="disk:7"),
        lambda s: s["inputs"][0]["type"].update(shape=[-1, 6]),
        lambda s: s["inputs"][0]["type"].update(shape=[2**62, 6]),
        lambda s: s["inputs"][0]["type"].update(shape=[float("inf"), 6]),
        lambda s: s["inputs"][0]["type"].update(shape=[1] * 10_000, stride=[1] * 10_000),
        lambda s: s["outputs"][0].update(writes="nobody"),
        lambda s: s["outputs"].append(s["outputs"][0]),
        lambda s: s.update(result={"kind": "leaf", "index": 7}),
        lambda s: s.update(result={"kind": "leaf", "index": -1}),
        lambda s: s.update(result={"kind": "same", "index": 3}),
        lambda s: s.update(result={"kind": "evil", "children": []}),
        lambda s: s.update(result={"kind": "dict", "keys": ["a"], "children": []}),
        lambda s: s.update(result={"kind": "const", "float": "zero"}),
        lambda s: s.update(result={"kind": "const", "torch": "device", "text": "nowhere"}),
        lambda s: s.update(outer={"kind": "leaf", "index": 0}),
        lambda s: s.update(outer={"kind": "tuple", "children": []}),
    ],
    ids=range(22),
)
def test_a_signature_that_is_none_is_refused_when_it_is_read(bundle, change):
    place = bundle("onnxruntime")
    sign(place, lambda manifest: change(manifest["signature"]))
    with pytest.raises(tsopt.ArtifactError):
        tsopt.load(place)


def test_a_class_named_in_a_bundle_is_not_called(bundle, mlp_input):
    place = bundle("onnxruntime")
    result = {
        "kind": "namedtuple",
        "class": f"{Witness.__module__}:Witness",
        "keys": ["value"],
        "children": [{"kind": "leaf", "index": 0}],
    }
    sign(place, lambda manifest: manifest["signature"].update(result=result))
    tsopt.load(place)(mlp_input)
    assert Witness.made == 0


@pytest.mark.parametrize("backend", ["null", "os.system", "tensorrt", "", None, 3])
def test_a_backend_that_this_version_does_not_have_is_named(bundle, backend):
    place = bundle()
    sign(place, lambda manifest: manifest.update(backend=backend))
    refused(place, "needs the backend|damaged")


def rewrite(place: Path, change) -> None:
    data = json.loads((place / "program.json").read_text())
    changed = change(data)
    (place / "program.json").write_text(json.dumps(data if changed is None else changed))
    sign(place)


def _first_call(data: dict) -> dict:
    return next(node for node in data["nodes"] if node["op"] == "call_function")


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval.default",
        "aten.nothing.default",
        "aten.add_.Tensor",
        "aten.copy_.default",
        "aten.relu",
        "aten.__class__.__init__",
        "aten.relu.__call__",
        "aten.relu._schema",
        "mylib.op.default",
        "higher_order.cond.default",
        "",
        None,
        7,
        "a" * 100_000,
        "aten.from_file.default",
        "aten.save.default",
        "aten.set_data.default",
        "aten.manual_seed.default",
        "aten.warn.default",
    ],
)
def test_an_op_that_is_no_functional_aten_op_is_refused(bundle, target):
    place = bundle()
    rewrite(place, lambda data: _first_call(data).update(target=target))
    found = refused(place, "no functional ATen op")
    assert len(str(found)) < 1000


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("aten.save.default", [7, "VICTIM"]), ("aten.from_file.default", ["VICTIM", True, 4])],
)
def test_reading_a_program_cannot_make_files(bundle, tmp_path, target, arguments):
    place, victim = bundle(), tmp_path / "victim"
    written = [str(victim) if item == "VICTIM" else item for item in arguments]
    call = {"op": "call_function", "target": target, "args": {"tuple": written}, "kwargs": {"dict": {}}}
    rewrite(place, lambda data: data["nodes"].insert(len(data["nodes"]) - 1, call))
    with contextlib.suppress(tsopt.ArtifactError):
        tsopt.load(place)(torch.zeros(2, 6))
    assert not victim.exists()


def test_reading_a_program_cannot_seed_the_random_generator(bundle):
    place = bundle()
    call = {"op": "call_function", "target": "aten.manual_seed.default"}
    call |= {"args": {"tuple": [7]}, "kwargs": {"dict": {}}}
    rewrite(place, lambda data: data["nodes"].insert(len(data["nodes"]) - 1, call))
    rng = torch.get_rng_state()
    with contextlib.suppress(tsopt.ArtifactError):
        tsopt.load(place)(torch.zeros(2, 6))
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("index", [10_000, -1, 2**70])
def test_a_reference_to_a_node_that_is_not_there_yet_is_refused(bundle, index):
    place = bundle()
    rewrite(place, lambda data: _first_call(data).update(args={"tuple": [{"node": index}] * 3}))
    refused(place, "stored program|damaged")


def test_a_cycle_is_refused(bundle):
    place = bundle()

    def change(data: dict) -> None:
        own = data["nodes"].index(_first_call(data))
        _first_call(data)["args"]["tuple"][0] = {"node": own}

    rewrite(place, change)
    refused(place, "stored program")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: [],
        lambda d: [d.pop("nodes"), d][1],
        lambda d: d.update(nodes={}),
        lambda d: d.update(nodes=[]),
        lambda d: d.update(nodes=[{"op": "call_module", "target": "x", "args": {"tuple": []}, "kwargs": {"dict": {}}}]),
        lambda d: d["nodes"].insert(0, {"op": "placeholder"}),
        lambda d: d["nodes"].append(d["nodes"][-1]),
        lambda d: d["nodes"].pop(),
        lambda d: d["nodes"].insert(0, {"op": "get_attr", "target": "nobody", "stride": [1]}),
        lambda d: _first_call(d).update(args={"tuple": [{"torch": "dtype", "text": "torch.load"}]}),
        lambda d: _first_call(d).update(args={"tuple": [{"object": "x"}]}),
        lambda d: _first_call(d).update(args="x"),
        lambda d: _first_call(d).update(args={"tuple": []}),
        lambda d: _first_call(d).update(kwargs={"dict": {"self": 1}}),
        lambda d: d.update(numerics="PERFECT"),
        lambda d: next(n for n in d["nodes"] if n["op"] == "get_attr").update(stride=[2**40, 1]),
        lambda d: next(n for n in d["nodes"] if n["op"] == "get_attr").update(stride=[-1, 1]),
        lambda d: next(n for n in d["nodes"] if n["op"] == "get_attr").update(stride=[1]),
        lambda d: d["signature"]["outputs"][0]["type"].update(shape=[9, 9]),
        lambda d: d["signature"]["outputs"][0]["type"].update(dtype="int8"),
    ],
    ids=range(20),
)
def test_a_program_that_is_none_is_refused_when_it_is_read(bundle, change):
    place = bundle()
    rewrite(place, change)
    with pytest.raises((tsopt.ArtifactError, tsopt.InvalidProgram)):
        tsopt.load(place)


def test_a_deeply_nested_program_is_refused(bundle):
    place = bundle()
    deep = '{"list": [' * 50_000 + "]}" * 50_000
    text = (place / "program.json").read_text()
    (place / "program.json").write_text(text.replace('"args": {', f'"args": {deep}, "more": {{', 1))
    sign(place)
    refused(place, "stored program")


def test_a_name_in_a_program_is_never_code(bundle, mlp, mlp_input):
    place = bundle()
    evil = 'X:\n    import os; os.system("true")\nclass Y'
    rewrite(place, lambda data: data.update(name=evil))
    torch.testing.assert_close(tsopt.load(place)(mlp_input), mlp(mlp_input).detach())


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (2**63).to_bytes(8, "little"), (10**8).to_bytes(8, "little")])
def test_weights_that_are_no_safetensors_are_refused(bundle, header):
    place = bundle()
    (place / "weights.safetensors").write_bytes(header + b"{}")
    sign(place)
    refused(place, "stored program cannot be read")


def test_weights_of_another_shape_are_refused(bundle):
    from safetensors.torch import load_file, save_file

    place = bundle()
    tensors = load_file(place / "weights.safetensors")
    save_file({name: value[:-1].contiguous() for name, value in tensors.items()}, place / "weights.safetensors")
    sign(place)
    with pytest.raises((tsopt.ArtifactError, tsopt.InvalidProgram)):
        tsopt.load(place)


def test_an_onnx_model_of_another_signature_is_refused(bundle):
    place = bundle("onnxruntime")
    sign(place, lambda m: m["signature"]["inputs"].append(m["signature"]["inputs"][0]))
    with pytest.raises(tsopt.ArtifactError):
        tsopt.load(place)


def test_reading_a_bundle_changes_nothing_in_it(bundle):
    place = bundle()
    before = sorted((f.name, f.stat().st_mtime_ns) for f in place.iterdir())
    tsopt.load(place)
    assert sorted((f.name, f.stat().st_mtime_ns) for f in place.iterdir()) == before
