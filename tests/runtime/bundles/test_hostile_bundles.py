"""Files and manifests of bundles that are damaged, or made to harm the process that reads them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest

import tsopt
from tests.runtime.bundles.helpers import refused
from tests.runtime.helpers import Witness, sign
from tsopt.runtime.bundles.members import digest_of


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
        *(
            {"spinning": "no"},
            {"arena": 1},
            {"pinning": "no"},
            {"float64": 1},
            {"hint": "fast"},
            {"precision": "int2"},
            {"int8_group": 0},
            {"other_ops": "fp16"},
            {"unknown": {"a": 1}},
            [],
        ),
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
