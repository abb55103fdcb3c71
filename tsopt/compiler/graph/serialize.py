"""Program <-> files: the graph as JSON that refers only to known ops, the weights as safetensors.

State that the model writes is not included: it belongs to the caller.

Reading executes no code from the file: an op is looked up by its exact overload name among functional
ATen ops, and the program is verified before it runs.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.types import SHORT, TensorType
from tsopt.compiler.devices import put
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import KINDS, Control
from tsopt.compiler.graph.infer import infer
from tsopt.compiler.graph.origin import provenance
from tsopt.compiler.graph.program import Numerics, Program, type_of
from tsopt.compiler.graph.stored_ops import computes, refusal
from tsopt.compiler.graph.strict_json import parse
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.graph.weights_file import memory_order, read_weights, write_weights
from tsopt.errors import BackendError, BundleError, TsoptError, UsageError

GRAPH, WEIGHTS = "program.json", "weights.safetensors"
MAX_NODES, MAX_TEXT = 20_000, 1 << 26  # of an untrusted file: each node takes a millisecond to check
SIZE_BITS, MAX_BITS, MAX_POWER = 48, 1024, 4  # of a size, and of what may be computed from sizes


def write_program(program: Program, directory: Path) -> None:
    """Writes `program.json` and `weights.safetensors` into an existing directory.

    Raises:
        BackendError: an op outside ATen, which another process would not know.
    """
    (directory / GRAPH).write_text(json.dumps(_program_json(program)))
    write_weights({name: program.weights[name] for name in program.used_weights()}, directory / WEIGHTS)


def read_program(directory: Path, state: Sequence[torch.Tensor] = (), *, own: bool = False) -> Program:
    """Reads what `write_program` wrote.

    Args:
        state: the tensors of the signature's state inputs, in order.
        own: it comes from this process or the one that started it, so that its size and the ops that it calls need no
            check.

    Raises:
        BundleError: damaged, or not what it says.
    """
    try:
        if not own and (directory / GRAPH).stat().st_size > MAX_TEXT:
            raise BundleError("the stored program is too large", where=str(directory / GRAPH))
        data = parse((directory / GRAPH).read_bytes())
        tensors = read_weights(directory / WEIGHTS)
        program = _Reader(data, tensors, own).program(state)
        # NOTE: not the file of a bundle, which belongs to the user, who may overwrite it.
        return replace(program, weights_file=directory / WEIGHTS) if own else program
    except TsoptError:
        raise
    except Exception as error:  # the file decides what goes wrong; all of it means the same
        raise BundleError(
            "the stored program cannot be read",
            where=str(directory / GRAPH),
            why=f"{type(error).__name__}: {error}"[:300],
        ) from error


def _program_json(program: Program) -> dict[str, Any]:
    numbers = {node: i for i, node in enumerate(program.graph.nodes)}
    return {
        "name": program.name,
        "numerics": program.numerics.name,
        "signature": signature_json.to_json(program.signature),
        "nodes": [_node_json(node, numbers) | _undecided_type(program, node) for node in program.graph.nodes],
    }


def _node_json(node: fx.Node, numbers: dict[fx.Node, int]) -> dict[str, Any]:
    out: dict[str, Any] = {"op": node.op}
    if node.op == "get_attr":
        value = node.meta["val"]
        out |= {"target": str(node.target), "stride": list(value.stride())}
        out |= {} if value.device.type == "cpu" else {"device": str(value.device)}
        order = memory_order(value)
        out |= {} if order == sorted(order) else {"order": order}
        return out | _meta_json(node)
    if node.op == "call_function":
        number = ops.number_name(node.target)
        named = f"size.{number}" if number else "getitem" if node.target is operator.getitem else str(node.target)
        if isinstance(node.target, Control):
            named = node.target.__name__
            out["blocks"] = [_program_json(block) for block in node.target.blocks]
        out["target"] = named
        if isinstance(node.target, OpOverload) and node.target.namespace not in ops.KNOWN_PURE:
            raise BackendError(f"{node.target} is a custom op and cannot be stored")
        out |= _meta_json(node)
    if node.op != "placeholder":
        out |= {"args": _value_json(node.args, numbers), "kwargs": _value_json(dict(node.kwargs), numbers)}
    return out


def _meta_json(node: fx.Node) -> dict[str, Any]:
    found = provenance(node.meta)
    return {"meta": found} if found else {}


def _undecided_type(program: Program, node: fx.Node) -> dict[str, Any]:
    """The type of a call whose result depends on values; empty for the others, whose type the reader infers."""
    found = type_of(node) if ops.is_call(node) else None
    if not isinstance(found, TensorType):
        return {}
    try:
        infer(program, node.target, node.args, dict(node.kwargs))
    except ops.UNDECIDED:
        return {"type": {"dtype": found.dtype, "shape": list(found.shape), "stride": list(found.stride)}}
    return {}


def _value_json(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, list):
        return {"list": [_value_json(item, numbers) for item in value]}
    if isinstance(value, tuple):
        return {"tuple": [_value_json(item, numbers) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _value_json(item, numbers) for key, item in value.items()}}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return {"torch": type(value).__name__, "text": str(value)}
    raise BackendError(f"an argument of type {type(value).__name__} cannot be stored")


class _Reader:
    def __init__(self, data: Any, tensors: dict[str, torch.Tensor], own: bool) -> None:
        self.data, self.tensors, self.own = data, tensors, own
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.bits: dict[fx.Node, int] = {}  # of the numbers that are computed from sizes, at the most
        self.mode = FakeTensorMode()

    def program(self, tensors: Sequence[torch.Tensor]) -> Program:
        signature = signature_json.from_json(self.data["signature"])
        pairs = zip(signature.state_inputs, tensors, strict=True)
        state = {item.name: _on(item.type.device, tensor) for item, tensor in pairs}
        made = Program(
            self.graph,
            self.weights,
            signature,
            state,
            Numerics[self.data["numerics"]],
            str(self.data["name"]) if str(self.data["name"]).isidentifier() else "Model",
        )
        inputs = iter(signature.inputs)
        if len(self.data["nodes"]) > MAX_NODES and not self.own:
            raise BundleError("the stored program has too many nodes", why=f"more than {MAX_NODES}")
        for item in self.data["nodes"]:
            self.nodes.append(self.node(item, inputs, made))
        verify_program(made, touched=())  # types were derived while reading
        return made

    def node(self, item: Any, inputs: Any, program: Program) -> fx.Node:
        if item["op"] == "placeholder":
            made = self.graph.placeholder(f"input_{len(self.nodes)}")
            made.meta = {"val": self.fake(next(inputs).type)}
            return made
        if item["op"] == "get_attr":
            tensor = self.tensors[item["target"]]
            if "order" in item:  # permuted back; anything but a permutation of the dimensions is an error of torch
                order = [int(dim) for dim in item["order"]]
                tensor = tensor.permute([order.index(dim) for dim in range(tensor.dim())])
            stride = tuple(int(s) for s in item["stride"])
            if tensor.stride() != stride:
                tensor = _restrided(tensor, stride)
            tensor = _on(str(item.get("device", "cpu")), tensor)
            self.weights[item["target"]] = tensor
            made = self.graph.create_node("get_attr", item["target"])
            made.meta = _provenance_from(item) | {"val": self.mode.from_tensor(tensor, static_shapes=True)}
            return made
        args, kwargs = self.value(item["args"]), self.value(item["kwargs"])
        if item["op"] == "output":
            return self.graph.output(*args)
        if item["op"] != "call_function":
            raise BundleError(f"the stored program has an unknown kind of node: {item['op']!r}")
        target = _control(item, self.own) if item["target"] in KINDS else _overload(item["target"])
        reason = "" if self.own else refusal(target, args, kwargs)
        if reason:
            raise BundleError(
                f"the stored program calls {str(item['target'])[:80]}, which is not allowed in a file", why=reason
            )
        made = self.graph.call_function(target, args, kwargs)
        if ops.is_number(made):
            self.bits[made] = self._bits(made)
        made.meta = _provenance_from(item)
        try:
            made.meta["val"] = infer(program, made.target, args, kwargs)
        except ops.UNDECIDED:
            made.meta["val"] = self.fake(_type_from(item["type"]))
        if not self.own:
            _check_memory(item["target"], made.meta["val"])
        return made

    def _bits(self, node: fx.Node) -> int:
        """How long a number from sizes can become. A few products of products would fill the memory."""
        if node.target is ops.SIZE:
            source, axis = node.args
            if isinstance(source, fx.Node) and source not in self.bits and type(axis) is int:
                return SIZE_BITS
            raise BundleError(f"a stored size is damaged: {str(node.args)[:80]}")
        given = [self.bits.get(arg) if isinstance(arg, fx.Node) else _bits_of(arg) for arg in node.args]
        known = [bits for bits in given if bits is not None]
        name = ops.number_name(node.target)
        power: Any = node.args[1] if name == "pow" and len(node.args) == 2 else 0
        if len(known) < len(given) or not known or node.kwargs or isinstance(power, fx.Node) or abs(power) > MAX_POWER:
            raise BundleError(f"a stored number is damaged: {name}{str(node.args)[:80]}")
        found = known[0] * MAX_POWER if name == "pow" else sum(known) + 1
        if found > MAX_BITS:
            raise BundleError("a stored size expression can become too large", why=f"more than {MAX_BITS} bits")
        return found

    def fake(self, type_: TensorType) -> Any:
        with self.mode:
            return torch.empty_strided(
                type_.shape, type_.stride, dtype=getattr(torch, type_.dtype), device=type_.device
            )

    def value(self, data: Any) -> Any:
        match data:
            case None | bool() | int() | str():
                return data
            case {"node": index} if type(index) is int and 0 <= index < len(self.nodes):
                return self.nodes[index]
            case {"float": str(text)}:
                return float.fromhex(text)
            case {"list": list(items)}:
                return [self.value(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(self.value(item) for item in items)
            case {"dict": dict(items)}:
                return {str(key): self.value(item) for key, item in items.items()}
            case {"complex": [str(real), str(imag)]}:
                return complex(float.fromhex(real), float.fromhex(imag))
            case {"torch": "device", "text": str(text)}:
                return torch.device(text)
            case {"torch": "dtype" | "layout" | "memory_format" as kind, "text": str(text)}:
                found = getattr(torch, text.removeprefix("torch."), None)
                if type(found).__name__ == kind:
                    return found
        raise BundleError(f"an argument of the stored program is damaged: {str(data)[:80]}")


def _on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return put(tensor, device)
    except UsageError as error:
        raise BundleError(
            f"the program needs {device[:40]}, which is not usable on this machine", why=error.why, fix=error.fix
        ) from error


def _type_from(data: Any) -> TensorType:
    found = TensorType(str(data["dtype"]), tuple(map(int, data["shape"])), tuple(map(int, data["stride"])))
    if found.dtype not in SHORT or min((*found.shape, *found.stride), default=0) < 0:
        raise BundleError(f"a stored type is damaged: {str(data)[:80]}")
    return found


def _restrided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    if any(step < 0 for step in stride) or span > 2 * max(tensor.numel(), 1):
        raise BundleError("a stored weight has invalid strides", why=f"{stride} for shape {tuple(tensor.shape)}")
    base = tensor
    for dim, step in enumerate(stride):  # an expanded weight: one value seen many times
        base = base.narrow(dim, 0, 1) if step == 0 and base.shape[dim] > 1 else base
    return (
        torch.empty_strided(base.shape, stride, dtype=base.dtype, device=base.device).copy_(base).expand(tensor.shape)
    )


def _bits_of(value: Any) -> int | None:
    """Of a literal number; None for anything else."""
    return value.bit_length() if type(value) is int else 0 if type(value) is float else None


def _check_memory(target: Any, value: Any) -> None:
    """No value of its own memory can be larger than the machine's: `full([2**40])` would fail in the call."""
    for tensor in ops.tensors_of(value):
        needed = tensor.untyped_storage().nbytes()
        if needed > machine_memory():
            raise BundleError(
                f"the stored program calls {str(target)[:80]}, whose result does not fit into memory",
                why=f"it needs {needed / 1e9:.0f} GB; this machine has {machine_memory() / 1e9:.0f} GB",
            )


@functools.cache
def machine_memory() -> int:
    """Bytes of memory of this machine; a very large number if unknown."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return 1 << 62
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _provenance_from(item: Any) -> dict[str, Any]:
    """Where a stored value comes from. Read for people only: whatever a file says there is text."""
    meta = provenance(item.get("meta", {}))
    origins = {"origins": tuple(map(str, meta.pop("origins")))} if "origins" in meta else {}
    return {key: str(value) for key, value in meta.items()} | origins


def _control(item: Any, own: bool) -> Control:
    kind, blocks = KINDS[item["target"]], item["blocks"]
    if len(blocks) != len(kind.titles):
        raise BundleError(f"a stored {item['target']} has {len(blocks)} nested programs, expected {len(kind.titles)}")
    return kind(tuple(_Reader(block, {}, own).program(()) for block in blocks))


def _overload(name: Any) -> Any:
    """The op of an exact name such as `aten.add.Tensor`; nothing else can be reached from a file."""
    if name == "getitem":
        return operator.getitem
    if name == str(ops.SIZE):
        return ops.SIZE
    if str(name).startswith("size.") and str(name)[5:] in ops.NUMBERS:
        return ops.NUMBERS[str(name)[5:]]
    parts = str(name).split(".")
    if parts[0] == ops.QUANTIZATION:
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # it registers them
    if len(parts) == 3 and parts[0] in ops.KNOWN_PURE and all(part.isidentifier() for part in parts):
        namespace = getattr(torch.ops, parts[0])
        packet = getattr(namespace, parts[1], None)
        found = getattr(packet, parts[2], None)
        if isinstance(found, OpOverload) and computes(found):
            return found
    raise BundleError(f"the stored program calls {str(name)[:80]!r}, which is not a functional ATen op")
