"""ONNX files that refer to something outside, hold less than they say, or call what nobody knows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tsopt
from tests.runtime.helpers import sign
from tsopt.errors import BundleError
from tsopt.runtime.bundles import onnx_file, onnx_wire
from tsopt.runtime.bundles.onnx_file import CONTRIBUTED, FILE, check_onnx
from tsopt.runtime.bundles.onnx_wire import MESSAGES
from tsopt.runtime.onnx import openvino, ort

MINE = "pkg.mine"  # the domain of functions that models define


def info(name: str):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def tensor(**fields):
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], raw_data=bytes(8))
    for name, value in fields.items():
        made.ClearField(name)
        if value is not None:
            (getattr(made, name).extend if isinstance(value, list) else lambda v, n=name: setattr(made, n, v))(value)
    return made


def external(**entries):
    made = tensor(raw_data=None, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        entry = made.external_data.add()
        entry.key, entry.value = key.removesuffix("_"), value
    return made


def model(*nodes, weights=(), functions=(), **more):
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"]), *nodes], "g", [info("x")], [info("y")], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MINE, 1)]
    return helper.make_model(graph, functions=functions, opset_imports=opsets, **more)


def within_if(branch):
    return helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)


def constant(value):
    return helper.make_node("Constant", [], ["k"], value=value)


def body(*nodes):
    return helper.make_graph(list(nodes), "b", [], [info("k")])


def function(name, *nodes, domain=MINE):
    return helper.make_function(domain, name, ["a"], ["b"], list(nodes), [helper.make_opsetid("", 18)])


def own(name, source="a", result="b"):
    return helper.make_node(name, [source], [result], domain=MINE)


def check(place: Path, made, data: int | None = None) -> None:
    raw = made if isinstance(made, bytes) else made.SerializeToString()
    (place / FILE).write_bytes(raw)
    check_onnx(place, {FILE: len(raw)} | ({} if data is None else {f"{FILE}.data": data}))


def refused(place: Path, made, text: str, data: int | None = None) -> None:
    with pytest.raises(BundleError, match="the ONNX model is rejected") as caught:
        check(place, made, data)
    assert re.search(text, str(caught.value.why)), caught.value.why


def test_the_tables_are_those_of_onnx():
    kinds = {5: "int", 3: "int", 4: "int", 14: "int", 2: "float", 1: "double", 9: "text", 12: "text"}
    for name, fields in MESSAGES.items():
        for item in getattr(onnx, name).DESCRIPTOR.fields:
            said = fields[item.number]
            many = getattr(item, "is_repeated", None)
            assert said.startswith("*") == (item.label == 3 if many is None else many), (name, item.name)
            if item.message_type is not None:
                assert said.removeprefix("*") in (item.message_type.name, "other"), (name, item.name)
            else:
                assert said.removeprefix("*") == kinds[item.type], (name, item.name)
        assert set(fields) == {item.number for item in getattr(onnx, name).DESCRIPTOR.fields}


def test_messages_that_are_not_looked_into_hold_no_tensors():
    seen, todo = set(), ["ValueInfoProto", "TypeProto", "NodeDeviceConfigurationProto", "TensorAnnotation"]
    while todo:
        name = todo.pop()
        seen.add(name)
        kind = getattr(onnx, name, None) or getattr(onnx.onnx_ml_pb2, name)
        parts = [kind.DESCRIPTOR, *kind.DESCRIPTOR.nested_types]
        for item in (item for part in parts for item in part.fields):
            inner = item.message_type
            if inner is not None and inner.containing_type is None and inner.name not in seen:
                todo.append(inner.name)
    assert not seen & {"TensorProto", "SparseTensorProto", "GraphProto", "AttributeProto"}


def test_the_runtimes_own_operators_are_those_that_are_written():
    sources = [path.read_text() for path in Path(ort.__file__).parent.rglob("*.py")]
    assert set(re.findall(r"com\.microsoft::(\w+)", "".join(sources))) == CONTRIBUTED


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_what_is_written_is_allowed(tmp_path, name):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = torch.nn.Linear(8, 8), torch.nn.Embedding(4, 8)

        def forward(self, x, ids):
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x) + self.table(ids)[:, None]
            return (
                self.linear(y).sigmoid() * y,
                (y > 0).any(),
                torch.cond(y.sum() > 0, torch.sin, torch.cos, [y]),
            )

    example = tsopt.example(torch.randn(2, 2, 3, 8), torch.tensor([[1, 2, 3], [0, 1, 2]]))
    tsopt.compile(tsopt.transform(tsopt.capture(Net().eval(), example)), name).save(tmp_path)
    check_onnx(tmp_path, {file.name: file.stat().st_size for file in tmp_path.iterdir()})


@pytest.mark.parametrize(
    "location",
    ["*/_ORT_MEM_ADDR_/*", "../x", "a/../../x", "/etc/passwd", "C:\\x", "\\\\host\\x", "", FILE, "report.json", "x\0y"],
)
@pytest.mark.parametrize("wrap", ["weight", "branch", "function", "constant", "tensors"])
def test_a_tensor_outside_of_the_bundle_is_refused(tmp_path, location, wrap):
    weight = external(location=location, offset="0", length="8")
    made = {
        "weight": lambda: model(weights=[weight]),
        "branch": lambda: model(within_if(body(constant(weight)))),
        "function": lambda: model(functions=[function("F", constant(weight))]),
        "constant": lambda: model(constant(weight)),
        "tensors": lambda: model(helper.make_node("Relu", ["x"], ["q"], many=[weight])),
    }[wrap]()
    refused(tmp_path, made, "not a file of the bundle", data=None)


@pytest.mark.parametrize(
    ("entries", "fine"),
    [
        ({"location": f"{FILE}.data", "offset": "0", "length": "8"}, True),
        ({"location": f"{FILE}.data"}, True),
        ({"location": f"{FILE}.data", "offset": "8", "length": "8"}, True),
        ({"location": f"{FILE}.data", "offset": "9", "length": "8"}, False),
        ({"location": f"{FILE}.data", "offset": "-1", "length": "8"}, False),
        ({"location": f"{FILE}.data", "offset": "0", "length": "7"}, False),
        ({"location": f"{FILE}.data", "offset": "0x0", "length": "8"}, False),
        ({"location": f"{FILE}.data", "offset": "9" * 30, "length": "8"}, False),
        ({"location": f"{FILE}.data", "checksum": "0"}, False),
        ({"location": f"{FILE}.data", "__class__": "0"}, False),
    ],
)
def test_a_tensor_beside_the_model_lies_within_its_file(tmp_path, entries, fine):
    made = model(weights=[external(**entries)])
    if fine:
        check(tmp_path, made, data=16)
    else:
        refused(tmp_path, made, "a tensor", data=16)


def test_a_place_that_is_told_twice_is_refused(tmp_path):
    weight = external(location=f"{FILE}.data", offset="0")
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "../x"
    refused(tmp_path, model(weights=[weight]), "repeated external data key 'location'", data=16)


def test_a_place_without_the_flag_is_looked_at_too(tmp_path):
    weight = external(location="../x")
    weight.data_location = TensorProto.DEFAULT
    refused(tmp_path, model(weights=[weight]), "not a file of the bundle")


@pytest.mark.parametrize(
    "fields",
    [
        {"dims": [3]},
        {"dims": [2**40]},
        {"dims": [2**30, 2**30]},
        {"dims": [-1]},
        {"raw_data": None},
        {"raw_data": bytes(7)},
        {"raw_data": None, "float_data": [1.0]},
        {"float_data": [1.0, 2.0]},
        {"data_type": 99},
        {"data_type": TensorProto.DOUBLE},
        {"data_type": TensorProto.STRING},
        {"raw_data": None, "data_type": TensorProto.INT64, "int64_data": [1, 2**62, 3]},
    ],
)
def test_a_tensor_that_holds_another_number_of_elements_is_refused(tmp_path, fields):
    refused(tmp_path, model(weights=[tensor(**fields)]), "a tensor")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.float32(1),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array([2**62, -1]),
        np.zeros(3, np.float16),
        np.array(["a", "b"], object),
    ],
)
def test_tensors_of_all_kinds_are_whole(tmp_path, array):
    check(tmp_path, model(weights=[numpy_helper.from_array(array, "w")]))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TensorProto.INT64, [2**62, -1]),
        (TensorProto.INT32, [-1, 7]),
        (TensorProto.BOOL, [0, 1]),
        (TensorProto.UINT4, [1, 2]),
    ],
)
def test_tensors_of_numbers_one_by_one_are_whole(tmp_path, kind, values):
    check(tmp_path, model(weights=[helper.make_tensor("w", kind, [2], values)]))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (helper.make_node("Evil", ["x"], ["q"], domain="evil.example"), "neither standard nor defined"),
        (helper.make_node("EPContext", ["x"], ["q"], domain="com.microsoft"), "never exports"),
        (helper.make_node("Relu", ["x"], ["q"], domain="ai.onnx.ml"), "neither standard nor defined"),
        (helper.make_node("RandomNormalLike", ["x"], ["q"]), "random"),
        (helper.make_node("MaxUnpool", ["x", "i"], ["q"]), "indices"),
        (own("Unknown", "x", "q"), "neither standard nor defined"),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_an_operator_that_is_never_written_is_refused(tmp_path, node, text, deep):
    refused(tmp_path, model(within_if(body(node))) if deep else model(node), text)


def test_functions_of_the_file_may_be_called(tmp_path):
    check(tmp_path, model(own("F", "x", "q"), functions=[function("F", helper.make_node("Relu", ["a"], ["b"]))]))


@pytest.mark.parametrize("op", ["RandomNormalLike", "EPContext", "QuickGelu", "Swish"])
@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft", "com.microsoft.nchwc", "org.openvinotoolkit"])
def test_a_function_where_an_engine_may_have_an_operator_is_refused(tmp_path, domain, op):
    within = function(op, helper.make_node("Relu", ["a"], ["b"]), domain=domain)
    call = helper.make_node(op, ["x"], ["q"], domain=domain)
    refused(tmp_path, model(call, functions=[within]), "engine may have an operator")


def test_an_engine_prefers_its_own_operator_to_a_function_of_the_file(tmp_path):
    import onnxruntime

    def outputs(domain):
        negative = function("Relu", helper.make_node("Neg", ["a"], ["b"]), domain=domain)
        call = helper.make_node("Relu", ["x"], ["z"], domain=domain)
        made = model(call, functions=[negative], ir_version=10)
        made.graph.output[0].name = "z"
        session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist()

    assert outputs("") == [0, 2]
    assert outputs(MINE) == [1, -2]


def test_functions_that_call_each_other_are_refused(tmp_path):
    made = model(own("F", "x", "q"), functions=[function("F", own("G")), function("G", own("F"))])
    refused(tmp_path, made, "calls itself")


def test_a_function_that_nobody_calls_may_not_call_itself_either(tmp_path):
    refused(tmp_path, model(functions=[function("F", own("F"))]), "calls itself")


def test_functions_that_grow_without_bounds_are_refused(tmp_path):
    functions = [function("F0", helper.make_node("Relu", ["a"], ["b"]))]
    functions += [function(f"F{i}", own(f"F{i - 1}", "a", "m"), own(f"F{i - 1}", "m", "b")) for i in range(1, 30)]
    refused(tmp_path, model(own("F29", "x", "q"), functions=functions), "nodes after inlining")


def test_deep_functions_and_graphs_are_refused(tmp_path, monkeypatch):
    functions = [function("F0", helper.make_node("Relu", ["a"], ["b"]))]
    functions += [function(f"F{i}", own(f"F{i - 1}")) for i in range(1, 60)]
    refused(tmp_path, model(own("F59", "x", "q"), functions=functions), "nested more than")
    node = helper.make_node("Relu", ["x"], ["k"])
    for _ in range(20):  # NOTE: onnx itself makes no deeper ones
        node = helper.make_node("If", ["c"], ["k"], then_branch=body(node))
    check(tmp_path, model(node))
    monkeypatch.setattr(onnx_file, "DEEPEST", 10)
    refused(tmp_path, model(node), "graphs are nested")


def test_too_many_nodes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "MOST_NODES", 5)
    check(tmp_path, model(*[helper.make_node("Relu", ["x"], [f"q{i}"]) for i in range(4)]))
    refused(tmp_path, model(*[helper.make_node("Relu", ["x"], [f"q{i}"]) for i in range(5)]), "more than 5 nodes")


def test_too_many_fields_are_refused(tmp_path, monkeypatch):
    made = model()
    for number in range(100):
        entry = made.metadata_props.add()
        entry.key = str(number)
    check(tmp_path, made)
    monkeypatch.setattr(onnx_wire, "MOST_FIELDS", 100)
    refused(tmp_path, made, "more than 100 fields")


@pytest.mark.parametrize("version", [0, -1, 10**9])
def test_a_version_of_the_operators_that_there_is_not_is_refused(tmp_path, version):
    made = model()
    made.opset_import[0].version = version
    refused(tmp_path, made, "version")


def test_sparse_weights_and_training_are_refused(tmp_path):
    made = model()
    made.graph.sparse_initializer.add()
    refused(tmp_path, made, "sparse")
    made = model()
    made.training_info.add()
    refused(tmp_path, made, "training")
    refused(tmp_path, model(helper.make_node("Constant", [], ["q"], sparse_value=onnx.SparseTensorProto())), "sparse")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x00", "field 0"),
        (b"\xff" * 20, "truncated"),
        (b"\x3a\x05", "truncated"),
        (b"\x3b", "wrong wire type"),
        (b"ORTM1234", "unknown field|truncated|wrong wire type"),
        (b"\x98\x06\x01", "field 99"),
        (b"\x3a\x00\x3a\x00", "repeated field 7"),
        (b"\x12\x00", "no graph"),
        (b"\x7a\x00", "field 15"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, raw, text):
    refused(tmp_path, raw, text)


def test_every_cut_of_a_model_is_refused_or_whole(tmp_path):
    raw = model(
        constant(tensor()), weights=[tensor()], functions=[function("F", constant(tensor()))]
    ).SerializeToString()
    for length in range(1, len(raw), 3):
        with pytest.raises(BundleError):
            check(tmp_path, raw[:length] if length < len(raw) // 2 else raw[:-1] + b"\xff" * (len(raw) - length))


def test_an_empty_or_missing_model_is_refused(tmp_path):
    refused(tmp_path, b"", "0 bytes")
    with pytest.raises(BundleError, match="damaged"):
        check_onnx(tmp_path, {})


def test_a_message_has_no_control_characters(tmp_path):
    with pytest.raises(BundleError) as caught:
        check(tmp_path, model(helper.make_node("\x1b[2J", ["x"], ["q"], domain="evil\x07")))
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("name", "opens"), [("onnxruntime", (ort, "load_session")), ("openvino", (openvino, "load_runner"))]
)
def test_no_engine_sees_a_model_that_is_refused(bundle, monkeypatch, name, opens):
    place = bundle("onnxruntime")
    made = onnx.load(place / FILE)
    made.graph.node.append(helper.make_node("Evil", [made.graph.input[0].name], ["e"], domain="evil"))
    (place / FILE).write_bytes(made.SerializeToString())
    sign(place, lambda manifest: manifest.update(backend=name, options={"threads": 1, "hint": "latency"}))
    monkeypatch.setattr(*opens, lambda *args: pytest.fail("an engine has seen it"))
    for probe in (None, False, True):
        with pytest.raises(tsopt.BundleError, match="the ONNX model is rejected"):
            tsopt.load(place, probe=probe)
