"""Bundles that are damaged, or made to harm whoever reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

import tsopt
from tests.runtime.helpers import Counter, Witness, save, sign
from tsopt.compiler.graph import serialize
from tsopt.runtime.bundles import members, store
from tsopt.runtime.bundles.members import digest_of
from tsopt.runtime.bundles.staging import ASIDE


def refused(directory: Path, text: str, **options) -> tsopt.BundleError:
    with pytest.raises(tsopt.BundleError, match=text) as caught:
        tsopt.load(directory, **options)
    return caught.value


def test_a_path_that_is_not_there(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.tsopt", "bundle").what


def test_a_file_is_no_bundle(tmp_path):
    (tmp_path / "f.tsopt").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "f.tsopt", "is not a directory")


def test_an_empty_directory_is_no_bundle(tmp_path):
    refused(tmp_path, "does not contain manifest.json")


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
    with pytest.raises((tsopt.BundleError, tsopt.BackendError)):
        tsopt.load(place, trust=True)


def test_one_changed_byte_is_noticed(bundle):
    place = bundle("onnxruntime")
    raw = bytearray((place / "model.onnx").read_bytes())
    raw[len(raw) // 2] ^= 1
    (place / "model.onnx").write_bytes(raw)
    assert "'model.onnx' was modified" in refused(place, "damaged").why


def test_an_edited_manifest_is_noticed(bundle):
    place = bundle()
    text = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(text.replace('"backend": "eager"', '"backend": "torchscript"'))
    assert "manifest was modified" in refused(place, "damaged").why


def test_an_extra_member_is_noticed(bundle):
    place = bundle()
    (place / "run.sh").write_text("rm -rf")
    assert "'run.sh' is not listed in the manifest" in refused(place, "damaged").why


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


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_linked_manifest_is_noticed(bundle, tmp_path, link):
    place = bundle()
    shutil.move(place / "manifest.json", tmp_path / "outside")
    link(tmp_path / "outside", place / "manifest.json")
    assert "a link" in refused(place, "damaged").why


def test_a_newer_format_says_what_to_install(bundle):
    place = bundle()
    sign(place, lambda manifest: manifest.update(format=99))
    found = refused(place, "has format version 99")
    assert "pip install" in found.fix


@pytest.mark.parametrize("version", [-1, 0, "1", "two", True, None, 1.0, [1], {}])
def test_a_format_that_is_no_version_is_damage(bundle, version):
    place = bundle()
    sign(place, lambda manifest: manifest.update(format=version))
    assert "invalid format version" in refused(place, "damaged").why


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
        lambda s: s.update(result={"kind": "shared", "index": 3}),
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
    with pytest.raises(tsopt.BundleError):
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
    refused(place, "needs the unknown backend|damaged")


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
    found = refused(place, "not a functional ATen op")
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
    with contextlib.suppress(tsopt.BundleError):
        tsopt.load(place)(torch.zeros(2, 6))
    assert not victim.exists()


def test_reading_a_program_cannot_seed_the_random_generator(bundle):
    place = bundle()
    call = {"op": "call_function", "target": "aten.manual_seed.default"}
    call |= {"args": {"tuple": [7]}, "kwargs": {"dict": {}}}
    rewrite(place, lambda data: data["nodes"].insert(len(data["nodes"]) - 1, call))
    rng = torch.get_rng_state()
    with contextlib.suppress(tsopt.BundleError):
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
    with pytest.raises((tsopt.BundleError, tsopt.InvalidProgram)):
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
    with pytest.raises((tsopt.BundleError, tsopt.InvalidProgram)):
        tsopt.load(place)


def test_an_onnx_model_of_another_signature_is_refused(bundle):
    place = bundle("onnxruntime")
    sign(place, lambda m: m["signature"]["inputs"].append(m["signature"]["inputs"][0]))
    with pytest.raises(tsopt.BundleError):
        tsopt.load(place)


def test_reading_a_bundle_changes_nothing_in_it(bundle):
    place = bundle()
    before = sorted((f.name, f.stat().st_mtime_ns) for f in place.iterdir())
    tsopt.load(place)
    assert sorted((f.name, f.stat().st_mtime_ns) for f in place.iterdir()) == before


# ---- what is checked before anything is opened -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (lambda raw: raw.replace(b'"backend"', b'"code": true, "backend"', 1), "duplicate key"),
        (lambda raw: raw.replace(b'"backend": "eager"', b'"backend": "eager", "x": NaN', 1), "not a valid number"),
        (lambda raw: raw.decode().encode("utf-16"), "is not valid JSON"),
        (lambda raw: b"\xef\xbb\xbf" + raw, "is not valid JSON"),
    ],
)
def test_a_manifest_that_can_be_read_in_two_ways_is_damage(bundle, raw, why):
    place = bundle()
    (place / "manifest.json").write_bytes(raw((place / "manifest.json").read_bytes()))
    assert why in refused(place, "damaged").why


@pytest.mark.parametrize(
    "options",
    [
        *({"threads": value} for value in (-5, 0, 10**6, True, "2", 1.5, [1])),
        *({"spinning": "no"}, {"arena": 1}, {"hint": "fast"}, {"precision": "int4"}, {"unknown": {"a": 1}}, []),
    ],
)
def test_an_option_out_of_its_range_is_damage(bundle, options):
    place = bundle("onnxruntime")
    sign(place, lambda manifest: manifest.update(options=options))
    assert "option" in refused(place, "damaged").why


def test_a_precision_that_there_is_not_is_damage(bundle):
    place = bundle("onnxruntime")
    sign(place, lambda manifest: manifest.update(precision=["fp32"]))
    assert "unknown precision" in refused(place, "damaged").why


def test_a_sparse_member_is_damage_at_once(bundle):
    place, size = bundle(), 100 * 10**9
    with (place / "report.json").open("r+b") as file:
        file.truncate(size)
    if (place / "report.json").stat().st_blocks * 512 > size // 10:
        pytest.skip("this file system has no sparse files")

    def change(manifest):
        manifest["members"]["report.json"] = {"sha256": "0" * 64, "size": size}

    manifest = json.loads((place / "manifest.json").read_text())
    change(manifest)
    manifest["sha256"] = digest_of(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert "sparse" in refused(place, "damaged").why


def test_a_pipe_in_the_place_of_a_member_is_damage(bundle):
    place = bundle()
    (place / "report.json").unlink()
    os.mkfifo(place / "report.json")
    assert "'report.json' is missing" in refused(place, "damaged").why


def test_a_directory_of_many_files_is_damage(bundle):
    place = bundle()
    for number in range(70):
        (place / f"f{number}").touch()
    sign(place)
    assert "more than 64 files" in refused(place, "damaged").why


@pytest.mark.parametrize("index", [-1, True, False, 1.0, "0", 10_000])
def test_a_node_number_that_is_none_is_refused(bundle, index):
    place = bundle()
    rewrite(place, lambda data: _first_call(data)["args"]["tuple"].__setitem__(0, {"node": index}))
    refused(place, "an argument of the stored program is damaged")


def test_a_value_that_does_not_fit_into_the_machine_is_refused(bundle):
    place = bundle()
    call = {"op": "call_function", "target": "aten.full.default"}
    call |= {"args": {"tuple": [{"list": [2**40]}, 1]}, "kwargs": {"dict": {}}}
    rewrite(place, lambda data: data["nodes"].insert(len(data["nodes"]) - 1, call))
    assert "GB" in refused(place, "does not fit into memory").why


def test_a_program_of_too_many_nodes_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(serialize, "MAX_NODES", 5)
    refused(bundle(), "too many nodes")


@pytest.mark.sliced(2)
@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value[:1], "has shape"),
        (lambda value: value.double(), "is float64"),
        (lambda value: None, "'count' does not exist"),
    ],
)
def test_state_of_another_type_is_refused(tmp_path, name, change, why):
    from safetensors.torch import load_file, save_file

    executable = tsopt.compile(tsopt.capture(Counter(), torch.zeros(2)), name)
    place = save(executable, tmp_path / "c.tsopt", Counter(), torch.zeros(2))
    tensors = {key: change(value) for key, value in load_file(place / "state.safetensors").items()}
    kept = {key: value for key, value in tensors.items() if value is not None}
    save_file(kept or {"x": torch.zeros(1)}, place / "state.safetensors")
    sign(place)
    assert why in refused(place, "a stored tensor").why


# ---- libraries ------------------------------------------------------------------------------------------------


def test_a_library_that_is_not_installed_is_named(bundle, monkeypatch):
    place = bundle("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(tsopt.BackendError, match="onnxruntime, which is not installed") as caught:
        tsopt.load(place)
    assert caught.value.fix == "pip install onnxruntime"


def test_a_library_that_is_broken_is_told_as_such(bundle, monkeypatch):
    place = bundle("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(tsopt.BackendError, match="installed but does not work") as caught:
        tsopt.load(place)
    assert "--force-reinstall onnxruntime" in caught.value.fix


def test_a_library_that_cannot_be_imported_later_is_no_damage(bundle, monkeypatch):
    def fail(*args: object) -> None:
        raise ImportError("libsomething.so: cannot open shared object file")

    monkeypatch.setattr(store, "open_bundle", fail)
    with pytest.raises(tsopt.BackendError, match="cannot be imported") as caught:
        tsopt.load(bundle())
    assert "libsomething.so" in caught.value.why


def test_a_bundle_that_may_not_be_read_says_so(bundle, monkeypatch):
    place = bundle()

    def forbidden(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(members.os, "open", forbidden)
    assert "Permission denied" in refused(place, "cannot be read").why


# ---- one bundle, not two --------------------------------------------------------------------------------------


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    real, swapped = store.open_bundle, []

    def slow(directory, backend, *rest):
        if not swapped:
            swapped.append(backend)
            shutil.rmtree(place)
            shutil.copytree(bundles["onnxruntime"], place)
        return real(directory, backend, *rest)

    monkeypatch.setattr(store, "open_bundle", slow)
    assert tsopt.load(place).backend == "onnxruntime"
    assert swapped == ["eager"]


def test_a_file_that_is_written_while_it_is_read_is_noticed(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    real, times = store.open_bundle, []

    def slow(*given):
        found = real(*given)
        times.append(1)
        if len(times) == 1:
            os.utime(place / "weights.safetensors", (1, 1))
        return found

    monkeypatch.setattr(store, "open_bundle", slow)
    assert tsopt.load(place).backend == "eager"
    assert len(times) == 2


def test_a_bundle_that_is_replaced_all_the_time_is_told(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    times = iter(range(100))
    monkeypatch.setattr(store, "open_bundle", lambda *given: os.utime(place / "report.json", (1, next(times))))
    refused(place, "was replaced every time")


def test_a_bundle_that_was_set_aside_is_read(bundles, tmp_path):
    shutil.copytree(bundles["eager"], tmp_path / f".b.tsopt.1{ASIDE}")
    assert tsopt.load(tmp_path / "b.tsopt").backend == "eager"
