"""Programs, weights and state of a bundle that are damaged, or made to harm the process that reads them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

import tsopt
from tests.runtime.bundles.helpers import refused
from tests.runtime.helpers import Counter, save, sign
from tsopt.compiler.graph import serialize


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
