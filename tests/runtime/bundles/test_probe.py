"""Bundles that this machine does not know, opened in a process of their own first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tsopt
from tests.runtime.helpers import save, sign
from tsopt.runtime.bundles import known_bundles, probe, store
from tsopt.runtime.racing import cache

pytestmark = pytest.mark.usefixtures("as_shipped")

ROOT = Path(__file__).parents[3]


def forget(place: Path) -> Path:
    """Makes a bundle another one: known nowhere."""
    sign(place, lambda manifest: manifest["claims"].update(winner=os.urandom(4).hex()))
    return place


def with_nodes(place: Path, nodes, constants=()) -> Path:
    """An ONNX bundle that also computes other nodes."""
    model = onnx.load(place / "model.onnx")
    for name, value in constants:
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)
    (place / "model.onnx").write_bytes(model.SerializeToString())
    sign(place)
    return place


def counted(monkeypatch) -> list[str]:
    """What is tried out, without doing so."""
    found: list[str] = []
    monkeypatch.setattr(store, "try_out", lambda directory, *rest: found.append(str(directory)))
    return found


def test_what_this_machine_has_written_is_not_tried_out(optimized_by, tmp_path, monkeypatch):
    place, tried = optimized_by("onnxruntime").save(tmp_path / "m.tsopt"), counted(monkeypatch)
    tsopt.load(place)
    assert not tried


def test_what_comes_from_elsewhere_is_tried_out_once(bundle, monkeypatch):
    place, tried = bundle("onnxruntime"), counted(monkeypatch)
    tsopt.load(place)
    tsopt.load(place)
    assert len(tried) == 1
    tsopt.load(place, probe=True)
    assert len(tried) == 2
    tsopt.load(forget(place))
    assert len(tried) == 3


def test_nothing_is_tried_out_when_the_caller_says_so(bundle, monkeypatch):
    place, tried = bundle("onnxruntime"), counted(monkeypatch)
    tsopt.load(place, probe=False)
    assert not tried
    tsopt.load(place)
    assert len(tried) == 1, "it was not tried out, so it is not known"


def test_what_was_refused_is_not_known(bundle, monkeypatch):
    place = bundle("onnxruntime")

    def refuse(*args: object) -> None:
        raise tsopt.BundleError("no")

    monkeypatch.setattr(store, "try_out", refuse)
    for _ in range(2):
        with pytest.raises(tsopt.BundleError, match="no"):
            tsopt.load(place)


def test_code_without_trust_is_not_tried_out(bundle, monkeypatch):
    place, tried = bundle("torchscript"), counted(monkeypatch)
    with pytest.raises(tsopt.BundleError, match="executes code"):
        tsopt.load(place)
    assert not tried


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_a_sound_bundle_from_elsewhere_is_opened(bundle, mlp, mlp_input, name):
    place = bundle(name)
    torch.testing.assert_close(tsopt.load(place)(mlp_input), mlp(mlp_input).detach())
    assert known_bundles.is_known(json.loads((place / "manifest.json").read_text())["sha256"])


def test_what_is_imported_does_not_count(bundle, tmp_path, monkeypatch):
    """On a slow machine, imports take longer than a bundle may."""
    place, seen = bundle("eager"), tmp_path / "seen"
    code = (
        "import sys; from pathlib import Path; from tsopt.runtime.bundles import probe\n"
        "known = set()\n"
        "probe._limit = lambda request: known.update(sys.modules)\n"
        "call = probe._call\n"
        "def called(request):\n"
        "    call(request)\n"
        f"    Path({str(seen)!r}).write_text(' '.join(sorted(set(sys.modules) - known)))\n"
        "probe._call = called\n"
        "probe.main()\n"
    )
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", code], **kw))
    tsopt.load(place, probe=True)
    late = [name for name in seen.read_text().split() if name.startswith("sympy.")]
    assert len(late) < 10, f"{len(late)} modules"


def test_a_sound_bundle_is_opened_where_torch_is_not_installed(bundles, mlp_input, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, tsopt\n"
        f"fast = tsopt.load({str(bundles['onnxruntime'])!r}, probe=True)\n"
        "print(type(fast(numpy.zeros((2, 6), 'float32'))).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ndarray\n", done.stderr


@pytest.mark.parametrize("here", [[], [""]], ids=["script", "console"])
def test_a_module_of_the_working_directory_is_not_imported(bundle, tmp_path, monkeypatch, here):
    (tmp_path / "json.py").write_text("open('ran', 'w')")
    place = bundle("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*here, *sys.path])
    tsopt.load(place)
    assert not (tmp_path / "ran").exists()


def test_a_division_that_kills_the_process_costs_its_own(bundle):
    smallest, minus = np.array([-(2**63)], np.int64), np.array([-1], np.int64)
    nodes = [helper.make_node("Div", ["smallest", "minus"], ["trap"])]
    place = with_nodes(bundle("onnxruntime"), nodes, [("smallest", smallest), ("minus", minus)])
    model = onnx.load(place / "model.onnx")
    model.graph.output.append(helper.make_tensor_value_info("trap", TensorProto.INT64, [1]))
    (place / "model.onnx").write_bytes(model.SerializeToString())

    def second(manifest):
        output = json.loads(json.dumps(manifest["signature"]["outputs"][0]))
        output["name"] = "trap"
        output["type"] |= {"dtype": "int64", "shape": [1], "stride": [1]}
        manifest["signature"]["outputs"].append(output)

    sign(place, second)
    with pytest.raises(tsopt.BundleError, match="not safe to open") as caught:
        tsopt.load(place)
    assert "SIGFPE" in caught.value.why
    assert "probe=False" in caught.value.fix


def test_a_loop_without_an_end_is_ended(bundle, monkeypatch):
    monkeypatch.setattr(probe, "CPU_SECONDS", 0.5)
    true = helper.make_tensor("true", TensorProto.BOOL, [], [1])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 3]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 3]),
        ],
    )
    place = bundle("onnxruntime")
    model = onnx.load(place / "model.onnx")
    last = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if name == last else name for name in node.output]
    model.graph.initializer.append(true)
    model.graph.node.append(helper.make_node("Loop", ["", "true", "before"], [last], body=body))
    (place / "model.onnx").write_bytes(model.SerializeToString())
    sign(place)
    with pytest.raises(tsopt.BundleError, match="not safe to open") as caught:
        tsopt.load(place)
    assert "did not finish" in caught.value.why


def test_values_that_fill_the_memory_are_told(bundle, monkeypatch):
    monkeypatch.setattr(probe, "_memory", lambda size: 1 << 28)
    nodes = [
        helper.make_node("ConstantOfShape", ["many"], ["zeros"]),
        helper.make_node("ReduceMax", ["zeros"], ["least"], keepdims=0),
    ]
    place = with_nodes(bundle("onnxruntime"), nodes, [("many", np.array([2**29], np.int64))])
    model = onnx.load(place / "model.onnx")
    first = next(node for node in model.graph.node if node.op_type in ("Gemm", "MatMul"))
    model.graph.node.insert(2, helper.make_node("Add", [first.input[0], "least"], ["more"]))
    first.input[0] = "more"
    (place / "model.onnx").write_bytes(model.SerializeToString())
    sign(place)
    with pytest.raises(tsopt.TsoptError):
        tsopt.load(place)


def test_a_program_that_fails_in_the_call_is_refused_when_it_is_loaded(bundle):
    place = bundle()
    data = json.loads((place / "program.json").read_text())
    call = next(node for node in data["nodes"] if node.get("target") == "aten.relu.default")
    at = data["nodes"].index(call)
    # Two rows, as before, both beyond the end.
    rows = {"op": "call_function", "target": "aten.full.default", "args": {"tuple": [{"list": [2]}, 99]}}
    rows["kwargs"] = {"dict": {"dtype": {"torch": "dtype", "text": "torch.int64"}}}
    data["nodes"].insert(at, rows)
    call |= {"target": "aten.index_select.default", "args": {"tuple": [{"node": at - 1}, 0, {"node": at}]}}
    for node in data["nodes"][at + 2 :]:
        text = json.dumps(node["args"])
        for number in range(len(data["nodes"]), at - 1, -1):
            text = text.replace(f'{{"node": {number}}}', f'{{"node": {number + 1}}}')
        node["args"] = json.loads(text)
    (place / "program.json").write_text(json.dumps(data))
    sign(place)
    with pytest.raises(tsopt.BundleError, match="fails on its own reference inputs") as caught:
        tsopt.load(place)
    assert "IndexError" in caught.value.why


def test_a_process_that_does_not_start_is_told(bundle, monkeypatch):
    place = bundle("onnxruntime")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(tsopt.BundleError, match="the separate process did not start") as caught:
        tsopt.load(place)
    assert "/bin/false" in caught.value.why
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(tsopt.BundleError, match="the separate process did not start"):
        tsopt.load(place)


def test_what_a_bundle_says_is_shown_without_control_characters():
    said = json.dumps({"kind": "BundleError", "what": "\x1b[2Jgone", "where": None, "why": None, "fix": None})
    with pytest.raises(tsopt.BundleError) as caught:
        probe._raise_what_was_said(said.encode(), Path())
    assert caught.value.what == "?[2Jgone"


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"kind": "ok"', b"7"])
def test_an_answer_that_is_none_is_a_refusal(said):
    with pytest.raises(tsopt.BundleError, match="not safe"):
        probe._raise_what_was_said(said, Path())


def test_an_error_class_that_is_not_ours_is_not_raised():
    with pytest.raises(tsopt.BundleError, match="bye"):
        probe._raise_what_was_said(b'{"kind": "Any", "what": "bye"}', Path())


@pytest.mark.parametrize(
    ("status", "said"),
    [(-8, "SIGFPE"), (-9, "memory"), (-24, "CPU time"), (None, "CPU time"), (3, "status 3")],
)
def test_how_a_process_ended_is_told(status, said):
    assert said in probe._end(status, 3)


def test_a_machine_with_little_memory_gives_less(monkeypatch):
    monkeypatch.setattr(probe, "available_memory", lambda: 2 << 30)
    assert probe._memory(0) == (2 << 30) * 3 // 4
    monkeypatch.setattr(probe, "available_memory", lambda: None)
    assert probe._memory(1 << 30) == 8 << 30
    assert probe._memory(0) == probe.MEMORY


def test_state_is_part_of_what_is_tried_out(tmp_path):
    from tests.runtime.helpers import Counter

    model = Counter()
    executable = tsopt.compile(tsopt.capture(model, torch.zeros(2)), "onnxruntime")
    place = forget(save(executable, tmp_path / "c.tsopt", model, torch.zeros(2)))
    assert tsopt.load(place)(torch.zeros(2)).tolist() == [1, 1]


# ---- what is known ------------------------------------------------------------------------------------------

DIGEST = "ab" * 32


def test_a_bundle_is_known_once_it_is_remembered():
    assert not known_bundles.is_known(DIGEST)
    known_bundles.remember(DIGEST)
    assert known_bundles.is_known(DIGEST)
    assert not known_bundles.is_known("cd" * 32)


def test_forgetting_the_cache_forgets_the_bundles():
    known_bundles.remember(DIGEST)
    cache.clear()
    assert not known_bundles.is_known(DIGEST)


@pytest.mark.parametrize("name", ["", "..", "../" * 8 + "etc/passwd", "x" * 64, DIGEST.upper()])
def test_a_digest_that_is_none_is_never_known(name):
    known_bundles.remember(name)
    assert not known_bundles.is_known(name)
    assert not cache.directory().exists()


@pytest.mark.parametrize("which", ["cache", "folder"])
def test_a_directory_that_others_may_write_to_is_not_believed(which):
    known_bundles.remember(DIGEST)
    (cache.directory() if which == "cache" else cache.directory() / known_bundles.FOLDER).chmod(0o777)
    assert not known_bundles.is_known(DIGEST)
    known_bundles.remember("cd" * 32)
    assert len(list((cache.directory() / known_bundles.FOLDER).iterdir())) == 1


def test_a_link_is_not_believed(tmp_path):
    known_bundles.remember(DIGEST)
    (place,) = (cache.directory() / known_bundles.FOLDER).iterdir()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert not known_bundles.is_known(DIGEST)


def test_another_version_tries_out_again(monkeypatch):
    known_bundles.remember(DIGEST)
    monkeypatch.setattr(known_bundles, "__version__", "99")
    assert not known_bundles.is_known(DIGEST)


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(known_bundles, "MOST", 2)
    names = [f"{number:064x}" for number in range(4)]
    for age, name in enumerate(names):
        known_bundles.remember(name)
        os.utime(known_bundles._file(name), (age, age))
    assert [known_bundles.is_known(name) for name in names] == [False, False, True, True]


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    known_bundles.remember(DIGEST)
    assert not known_bundles.is_known(DIGEST)
