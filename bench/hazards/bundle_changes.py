"""Changes of the files of a bundle, as somebody who means harm would make them; the manifest is signed again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from bench.hazards.sound_bundles import seal, sign

Change = Callable[[Path], None]


def manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda bundle: sign(bundle, change)


def raw_manifest(change: Callable[[bytes], bytes]) -> Change:
    def edit(bundle: Path) -> None:
        place = bundle / "manifest.json"
        place.write_bytes(change(place.read_bytes()))

    return edit


def program(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(bundle: Path) -> None:
        place = bundle / "program.json"
        data = json.loads(place.read_text())
        change(data)
        place.write_text(json.dumps(data))
        sign(bundle)

    return edit


def call(target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_function", "target": target, "args": {"tuple": list(args)}, "kwargs": {"dict": kwargs}}


def lists(*items: Any) -> dict[str, Any]:
    return {"list": list(items)}


INT64 = {"torch": "dtype", "text": "torch.int64"}


def added(*calls: dict[str, Any]) -> Change:
    """Calls that nobody uses, before the output. `-1` in an argument is the call before, and so on."""

    def edit(data: dict[str, Any]) -> None:
        nodes = data["nodes"]
        for item in calls:
            at = len(nodes) - 1
            text = json.dumps(item)
            for back in range(1, 9):
                text = text.replace(f'{{"node": -{back}}}', f'{{"node": {at - back}}}')
            nodes.insert(at, json.loads(text))

    return program(edit)


def back(number: int) -> dict[str, int]:
    return {"node": -number}


def full(shape: list[int], value: int) -> dict[str, Any]:
    return call("aten.full.default", lists(*shape), value, dtype=INT64)


def real(*shape: int) -> dict[str, Any]:
    return call("aten.ones.default", lists(*shape))


def model(change: Callable[[onnx.ModelProto], object]) -> Change:
    def edit(bundle: Path) -> None:
        place = bundle / "model.onnx"
        found = onnx.load(place, load_external_data=False)
        change(found)
        place.write_bytes(found.SerializeToString())
        sign(bundle)

    return edit


def outside(location: str, key: str = "location", **more: str) -> Change:
    """The first weight is said to be elsewhere."""

    def edit(found: onnx.ModelProto) -> None:
        weight = next(item for item in found.graph.initializer if item.data_type == TensorProto.FLOAT)
        weight.ClearField("raw_data")
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        for name, text in {key: location, **more}.items():
            entry = weight.external_data.add()
            entry.key, entry.value = name, text

    return model(edit)


def constants(found: onnx.ModelProto, **arrays: Any) -> None:
    for name, value in arrays.items():
        found.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def with_nodes(*nodes: Any, **arrays: Any) -> Change:
    """Nodes on constants, whose last value is added to the answer as zero: no optimizer may drop them."""

    def edit(found: onnx.ModelProto) -> None:
        constants(found, nothing=np.float32(0), **arrays)
        last = found.graph.output[-1].name
        for node in found.graph.node:
            node.output[:] = ["answer.before" if name == last else name for name in node.output]
        found.graph.node.extend(nodes)
        result = nodes[-1].output[0]
        found.graph.node.extend(
            [
                helper.make_node("Cast", [result], ["as.float"], to=TensorProto.FLOAT),
                helper.make_node("ReduceMax", ["as.float"], ["one.number"], keepdims=0),
                helper.make_node("Mul", ["one.number", "nothing"], ["zero"]),
                helper.make_node("Add", ["answer.before", "zero"], [last]),
            ]
        )

    return model(edit)


def loop(count: str = "") -> Any:
    """A Loop whose condition stays true."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [1])],
        [info("on", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [1])],
    )
    return helper.make_node("Loop", [count, "true", "start"], ["ended"], body=body)


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def edit(bundle: Path) -> None:
        found = load_file(bundle / file)
        change(found)
        save_file({name: value.contiguous() for name, value in found.items()}, bundle / file)
        sign(bundle)

    return edit


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda found: found.update({name: change(value) for name, value in found.items()})


def says(bundle: Path, member: str, sha256: str, size: int) -> None:
    """What the manifest says of a file, true or not."""
    data = json.loads((bundle / "manifest.json").read_text())
    data["members"][member] = {"sha256": sha256, "size": size}
    seal(bundle, data)


def sparse(size: int) -> Change:
    """A member that says it is so large, and is, without taking any room."""

    def edit(bundle: Path) -> None:
        with (bundle / "report.json").open("r+b") as file:
            file.truncate(size)
        says(bundle, "report.json", "0" * 64, size)

    return edit


def pipe(bundle: Path) -> None:
    (bundle / "report.json").unlink()
    os.mkfifo(bundle / "report.json")
    says(bundle, "report.json", hashlib.sha256(b"").hexdigest(), 0)


def linked_manifest(bundle: Path) -> None:
    os.link(bundle / "manifest.json", bundle.parent / "another name")


def many_nodes(data: dict[str, Any]) -> None:
    at = len(data["nodes"]) - 1
    last = at - 1
    chain = [call("aten.relu.default", {"node": last if i == 0 else at + i - 1}) for i in range(60_000)]
    data["nodes"][at:at] = chain


def recursive(found: onnx.ModelProto) -> None:
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    found.functions.append(
        helper.make_function("mine", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="mine")], opset)
    )
    found.opset_import.append(helper.make_opsetid("mine", 1))
    found.graph.node.append(helper.make_node("F", [found.graph.input[0].name], ["unused"], domain="mine"))


def laughing(found: onnx.ModelProto) -> None:
    """Functions that call each other twice: 2^40 nodes when all are in place."""
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    for level in range(40):
        if level:
            name = f"F{level - 1}"
            nodes = [
                helper.make_node(name, ["a"], ["m"], domain="mine"),
                helper.make_node(name, ["m"], ["b"], domain="mine"),
            ]
        else:
            nodes = [helper.make_node("Identity", ["a"], ["b"])]
        found.functions.append(helper.make_function("mine", f"F{level}", ["a"], ["b"], nodes, opset))
    found.opset_import.append(helper.make_opsetid("mine", 1))
    found.graph.node.append(helper.make_node("F39", [found.graph.input[0].name], ["unused"], domain="mine"))


def nested(found: onnx.ModelProto) -> None:
    constants(found, yes=np.array(True))

    def around(node: Any) -> Any:
        result = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
        return helper.make_graph([node], "g", [], [result])

    node = helper.make_node("Identity", [found.graph.input[0].name], ["r0"])
    for depth in range(1, 25):  # NOTE: onnx itself makes no deeper ones
        node = helper.make_node("If", ["yes"], [f"r{depth}"], then_branch=around(node))
    found.graph.node.append(node)


def evil(found: onnx.ModelProto) -> None:
    found.graph.node.append(helper.make_node("Evil", [found.graph.input[0].name], ["e"], domain="evil.example"))


def renamed(found: dict[str, torch.Tensor]) -> None:
    found.clear()
    found["x"] = torch.zeros(1)


def negative(data: dict[str, Any]) -> None:
    data["nodes"][-1].update(args={"tuple": [{"tuple": [{"node": -1}, {"node": -1}]}]})


def boolean(data: dict[str, Any]) -> None:
    call = next(node for node in data["nodes"] if node["op"] == "call_function")
    call["args"]["tuple"][0] = {"node": False}


def larger(found: onnx.ModelProto) -> None:
    found.graph.initializer[0].dims[0] = 2**30


def context(found: onnx.ModelProto) -> None:
    found.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    found.graph.node.append(
        helper.make_node(
            "EPContext",
            [found.graph.input[0].name],
            ["unused"],
            domain="com.microsoft",
            embed_mode=0,
            ep_cache_context="/etc/passwd",
            main_context=1,
        )
    )


def sub_graph_outside(found: onnx.ModelProto) -> None:
    """External data in a constant of a branch."""
    constants(found, yes=np.array(True))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    for name, text in {"location": "../witness", "offset": "0", "length": "4"}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = name, text
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=weight)],
        "g",
        [],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1])],
    )
    found.graph.node.append(helper.make_node("If", ["yes"], ["unused"], then_branch=branch, else_branch=branch))
    found.graph.output.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1]))


def duplicated(raw: bytes) -> bytes:
    return raw.replace(b'"backend"', b'"code": true,\n "backend"', 1)
