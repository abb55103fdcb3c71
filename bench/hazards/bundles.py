"""Bundles from somebody who means harm: files of a sound one are changed, and its manifest is signed again.

Each case saves a bundle, changes it, and loads and calls it in a process with limits. Right: an error of tsopt's own in
time, or the answer of the sound bundle. Wrong: the end of the process, a raw error, no end, or another file opened.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # noqa: F401 - imported before the forks, once
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch import nn

import tsopt
from bench.hazards import RIGHT, Case, Outcome
from tsopt.compiler.calls.example import as_example
from tsopt.runtime.bundles import store
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.report import Report, Row

SECONDS = 40.0  # for the process of a case; imports and engines are part of it
IN_TIME = 12.0  # of processor time, for `load` and all that it starts; torch's import is up to 4 of them
MEMORY = 6 << 30

Change = Callable[[Path], None]


# ---- sound bundles ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.one, self.two, self.counts = nn.Linear(6, 8), nn.Linear(8, 6), counts
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.count.add_(1)
        return self.two(self.one(x).relu()) + self.count


def saved(backend: str, place: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A sound bundle, an input, and the answer that a sound one gives."""
    torch.manual_seed(0)
    # NOTE: OpenVINO 2026.4 ends the process while it compiles the one that counts.
    model, x = Net(backend != "openvino").eval(), torch.randn(2, 6)
    # oneDNN's files are those of eager, and it compiles only where that pays.
    executable = tsopt.compile(tsopt.capture(model, x), "eager" if backend == "onednn" else backend)
    rows = (Row("eager"),)
    report = Report(model="Net", rows=rows, winner_key="model", why="chosen", environment=environment())
    bundle = store.save(executable, place / "m.tsopt", model, as_example(x), report)
    if backend == "onednn":
        sign(bundle, lambda manifest: manifest.update(backend=backend))
    return bundle, x, model(x).detach()


def sign(bundle: Path, change: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Makes the hashes right again."""
    place = bundle / "manifest.json"
    manifest = json.loads(place.read_text())
    manifest["members"] = {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
        for file in sorted(bundle.iterdir())
        if file != place
    }
    if change is not None:
        change(manifest)
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    manifest["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    place.write_text(json.dumps(manifest))


# ---- what becomes of a hostile one --------------------------------------------------------------------------


def apart(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a fork of this process finds; `killed` or `hangs` where it does not say.

    For a process that has imported all libraries and run none of them: the threads of engines do not survive a fork.
    Others ask a Clean one.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reader)
        said = {"kind": "raw", "why": "no answer"}
        try:
            said = work()
        except BaseException as error:
            said = {"kind": "raw", "why": f"{type(error).__name__}: {str(error)[:120]}"}
        finally:
            said["why"] = str(said.get("why", ""))[:400]
            os.write(writer, json.dumps(said).encode())  # less than a pipe takes at once
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], seconds)
        raw = os.read(reader, 4096) if ready else b""
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if raw:
        return json.loads(raw)
    if ready:
        return {"kind": "killed", "why": signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""}
    return {"kind": "hangs", "why": f"no end in {seconds:.0f} s"}


class Clean:
    """A process that has run no engine, and forks for each question; a context."""

    def __enter__(self) -> Clean:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "bench.hazards.bundles", "serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *details: object) -> None:
        self.process.communicate()  # it ends with its input

    def ask(self, work: str, *arguments: str) -> dict[str, Any]:
        """What a fork finds; see `apart`. `work`: `make`, with a backend and a folder, or `loaded`, with a folder."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([work, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def serve() -> None:
    """The other side of Clean."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by an engine must not be read as an answer
    works = {"make": lambda backend, folder: make(backend, Path(folder)), "loaded": lambda folder: loaded(Path(folder))}
    for line in sys.stdin:
        work, *arguments = json.loads(line)
        print(json.dumps(apart(functools.partial(works[work], *arguments), SECONDS)), file=answers, flush=True)


def in_process(name: str, backend: str, folder: str) -> dict[str, Any]:
    """The same in a process that has not been forked."""
    command = [sys.executable, "-m", "bench.hazards.bundles", name, backend, folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"kind": "hangs", "why": f"no end in {SECONDS:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if out:
        return json.loads(out.splitlines()[-1])
    status = -process.returncode
    return {"kind": "killed", "why": signal.Signals(status).name if status > 0 else f"status {-status}"}


def make(backend: str, place: Path) -> dict[str, Any]:
    """Saves a sound bundle, `m.tsopt`, and a call with its answer."""
    os.environ["TSOPT_CACHE_DIR"] = str(place / "of the author")
    _, x, y = saved(backend, place)
    torch.save((x, y), place / "call.pt")
    return {"kind": "made"}


def loaded(place: Path) -> dict[str, Any]:
    """What becomes of a bundle that is loaded and called: right, other, refused or raw; what that took and opened."""
    os.environ["TSOPT_CACHE_DIR"] = str(place / "cache")
    bundle = place / "m.tsopt"
    x, y = torch.load(place / "call.pt")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    witness, opened = os.path.realpath(bundle.parent / "witness"), list[str]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and os.path.realpath(args[0]) in (witness, "/etc/passwd"):
            opened.append(args[0])

    sys.addaudithook(hook)
    start = time.process_time()
    try:
        found = tsopt.load(bundle, trust=True)(x)
        right = found.shape == y.shape and torch.allclose(found, y, atol=1e-3)
        said = {"kind": "right"} if right else {"kind": "other", "why": str(found.flatten()[:4].tolist())}
    except tsopt.TsoptError as error:
        said = {"kind": "refused", "why": f"{error.what}; {error.why or ''}"}
    except BaseException as error:
        said = {"kind": "raw", "why": f"{type(error).__name__}: {str(error)[:120]}"}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = time.process_time() - start + children.ru_utime + children.ru_stime
    return {**said, "seconds": spent, "peak": max(peaks) * 1024, "opened": opened}


def judged(said: dict[str, Any]) -> Outcome:
    why = str(said.get("why", ""))[:160]
    if said.get("opened"):
        return Outcome("wrong", f"opened {said['opened'][0]}")
    if said.get("peak", 0) > MEMORY:
        return Outcome("wrong", f"took {said['peak'] / 1e9:.1f} GB")
    if said.get("seconds", 0) > IN_TIME:
        return Outcome("wrong", f"took {said['seconds']:.1f} s of processor time")
    if said["kind"] == "right":
        return RIGHT
    if said["kind"] == "refused":
        return Outcome("refused", why)
    return Outcome("wrong", f"{said['kind']}: {why}")


def case(name: str, change: Change, *backends: str) -> Case:
    """A case: a sound bundle of each backend, changed."""

    def check(backend: str) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="hazard-") as folder:
            if backend == "openvino":  # its library does not survive a fork
                return judged(in_process(name, backend, folder))
            torch.set_num_threads(1)
            made = apart(functools.partial(make, backend, Path(folder)), SECONDS)
            if made["kind"] != "made":
                return Outcome("wrong", f"the case cannot be made: {made}")
            change(Path(folder) / "m.tsopt")
            return judged(apart(functools.partial(loaded, Path(folder)), SECONDS))

    return Case(name, check, backends)


# ---- changes ------------------------------------------------------------------------------------------------


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


def sparse(size: int) -> Change:
    """A member that says it is so large, and is, without taking any room."""

    def edit(bundle: Path) -> None:
        with (bundle / "report.json").open("r+b") as file:
            file.truncate(size)
        members = bundle / "manifest.json"
        data = json.loads(members.read_text())
        data["members"]["report.json"] = {"sha256": "0" * 64, "size": size}
        rest = {key: value for key, value in data.items() if key != "sha256"}
        data["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        members.write_text(json.dumps(data))

    return edit


def pipe(bundle: Path) -> None:
    (bundle / "report.json").unlink()
    os.mkfifo(bundle / "report.json")
    place = bundle / "manifest.json"
    data = json.loads(place.read_text())
    data["members"]["report.json"] = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
    rest = {key: value for key, value in data.items() if key != "sha256"}
    data["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    place.write_text(json.dumps(data))


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


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
        sys.exit()
    NAME, BACKEND, FOLDER = sys.argv[1:]
    changes = CALLED | SAID | BESIDE | STATE | WEIGHTS | MODELS | SOUND
    if NAME:  # without one, there is a bundle
        make(BACKEND, Path(FOLDER))
        changes[NAME](Path(FOLDER) / "m.tsopt")
    print(json.dumps(loaded(Path(FOLDER))), flush=True)
    os._exit(0)
