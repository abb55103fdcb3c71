"""Hostile bundles: the cases."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from bench.hazards import Case
from bench.hazards.bundle_changes import (
    Change,
    added,
    back,
    boolean,
    call,
    context,
    duplicated,
    each,
    evil,
    full,
    larger,
    laughing,
    linked_manifest,
    lists,
    loop,
    manifest,
    many_nodes,
    model,
    negative,
    nested,
    outside,
    pipe,
    program,
    raw_manifest,
    real,
    recursive,
    renamed,
    sparse,
    sub_graph_outside,
    tensors,
    with_nodes,
)
from bench.hazards.load_trial import case

SMALLEST, MINUS = np.array([-(2**63)], np.int64), np.array([-1], np.int64)
DIVISION = helper.make_node("Div", ["smallest", "minus"], ["trap"])
SHAPE = helper.make_node("ConstantOfShape", ["many"], ["huge"])
LOOP: dict[str, Any] = {"true": np.array(True), "start": np.zeros(1, np.float32)}
POOL = (back(3), back(2), lists(2, 2), lists(2, 2), lists(0, 0), lists(1, 1), False, back(1))
INT32 = {"torch": "dtype", "text": "torch.int32"}
DOUBLED = call("aten.cat.default", lists(back(1), back(1)))
PROGRAM, ENGINES = ("eager",), ("onnxruntime", "openvino")
PROGRAMS, SOME = ("eager", "onednn"), ("eager", "onnxruntime")
EVERY = (*PROGRAMS, "torchscript", *ENGINES)

CALLED: dict[str, Change] = {
    "indices beyond the end for max_pool2d_with_indices_backward": added(
        real(1, 1, 2, 2),
        real(1, 1, 4, 4),
        full([1, 1, 2, 2], 2**40),
        call("aten.max_pool2d_with_indices_backward.default", *POOL),
    ),
    "segment_reduce with its checks off": added(
        real(4),
        full([1], 2**30),
        call("aten.segment_reduce.default", back(2), "sum", lengths=back(1), axis=0, unsafe=True),
    ),
    "offsets of segment_reduce beyond the end": added(
        real(4),
        full([2], 2**40),
        call("aten.segment_reduce.default", back(2), "sum", offsets=back(1), axis=0, initial=1),
    ),
    "_sparse_coo_tensor_unsafe": added(
        full([1, 1], 2**40),
        real(1),
        call("aten._sparse_coo_tensor_unsafe.default", back(2), back(1), lists(4)),
        call("aten.to_dense.default", back(1)),
    ),
    "_unsafe_index with an index beyond the end": added(
        real(4), full([1], 2**40), call("aten._unsafe_index.Tensor", back(2), lists(back(1)))
    ),
    "offsets of embedding_bag beyond the end": added(
        real(4, 4), full([4], 1), full([2], -(2**31)), call("aten.embedding_bag.default", back(3), back(2), back(1))
    ),
    "pivots of linalg_ldl_solve beyond the end": added(
        real(5, 5),
        call("aten.full.default", lists(5), -9, dtype=INT32),
        call("aten.linalg_ldl_solve.default", back(2), back(1), back(2)),
    ),
    "lu_unpack with fewer pivots than rows": added(
        real(9000, 5),
        call("aten.ones.default", lists(1), dtype=INT32),
        call("aten.lu_unpack.default", back(2), back(1)),
    ),
    "the smallest integer by -1 in a program": added(
        full([1], -(2**63)), full([1], -1), call("aten.div.Tensor_mode", back(2), back(1), rounding_mode="trunc")
    ),
    "resize beyond the storage": added(real(4), call("aten.resize.default", back(1), lists(1 << 20))),
    "full([2**40])": added(call("aten.full.default", lists(2**40), 1.0)),
    "a chain of cat doubling 60 times": added(real(64), *[DOUBLED] * 60),
    "60,000 nodes": program(many_nodes),
    "a negative node number": program(negative),
    "a node number that is a bool": program(boolean),
}
SAID: dict[str, Change] = {
    "threads=-5": manifest(lambda m: m["options"].update(threads=-5)),
    "threads=10**6": manifest(lambda m: m["options"].update(threads=10**6)),
    "threads=True": manifest(lambda m: m["options"].update(threads=True)),
    "a key twice": raw_manifest(duplicated),
    "UTF-16": raw_manifest(lambda raw: raw.decode().encode("utf-16")),
}
BESIDE: dict[str, Change] = {
    "a sparse member of 100 GB": sparse(100 * 10**9),
    "a manifest with another name": linked_manifest,
    "a pipe in place of a member": pipe,
}
STATE: dict[str, Change] = {
    "state of another shape": tensors("state.safetensors", each(lambda tensor: tensor.new_zeros(3))),
    "state of another dtype": tensors("state.safetensors", each(lambda tensor: tensor.double())),
    "state without a name": tensors("state.safetensors", renamed),
}
WEIGHTS: dict[str, Change] = {
    "weights of another shape": tensors("weights.safetensors", each(lambda tensor: tensor[:1])),
    "weights of another dtype": tensors("weights.safetensors", each(lambda tensor: tensor.half())),
}
MODELS: dict[str, Change] = {
    "external data at an address": outside("*/_ORT_MEM_ADDR_/*", offset="4096", length="192"),
    "external data above the bundle": outside("../witness", offset="0", length="192"),
    "external data at an absolute path": outside("/etc/passwd", offset="0", length="192"),
    "external data in another member": outside("report.json", offset="0", length="192"),
    "external data in a branch": model(sub_graph_outside),
    "an EPContext that names a path": model(context),
    "an operator of nobody's": model(evil),
    "version 10^9 of the operators": model(lambda found: setattr(found.opset_import[0], "version", 10**9)),
    "the smallest integer by -1": with_nodes(DIVISION, smallest=SMALLEST, minus=MINUS),
    "an integer by zero": with_nodes(DIVISION, smallest=SMALLEST, minus=MINUS * 0),
    "a loop without an end": with_nodes(loop(), **LOOP),
    "a loop of 2^40 turns": with_nodes(loop("turns"), turns=np.int64(2**40), **LOOP),
    "ConstantOfShape of 2^36": with_nodes(SHAPE, many=np.array([2**36], np.int64)),
    "a weight that holds less than it says": model(larger),
    "a function that calls itself": model(recursive),
    "functions of 2^40 nodes": model(laughing),
    "graphs nested deeply": model(nested),
}

SOUND = {"as it was saved": manifest(lambda found: found["claims"].update(winner="other"))}

CASES: tuple[Case, ...] = (
    *(case(name, change, *EVERY) for name, change in SOUND.items()),
    *(case(name, change, *PROGRAM) for name, change in CALLED.items()),
    *(case(name, change, *EVERY) for name, change in SAID.items()),
    *(case(name, change, *SOME) for name, change in BESIDE.items()),
    *(case(name, change, *SOME) for name, change in STATE.items()),
    *(case(name, change, *PROGRAMS) for name, change in WEIGHTS.items()),
    *(case(name, change, *ENGINES) for name, change in MODELS.items()),
)
