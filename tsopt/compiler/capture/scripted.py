"""TorchScript read as Python: a scripted module or function as an nn.Module that runs its graph, call by call.

What can be traced through Python can then be traced through this: loops and branches that depend on sizes and constants
are unrolled; those that depend on tensor values become control flow ops or are refused, and are never baked in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from tsopt.compiler.capture.scripted_builtins import DECIDED, PYTHON, SCALARS, TENSOR_TOO
from tsopt.compiler.capture.scripted_flow import READINGS, Values, branch, check_numbers, flag_of, loop, readings
from tsopt.compiler.script_state import attributes_written, containers_written, place_of
from tsopt.errors import CaptureError, GraphBreakError

# What makes a Python number of a tensor, and among these a flag.
_FLAGS = frozenset({"Bool", "is_nonzero"})
_NUMBERS = frozenset({"Int", "Float", "Bool", "item", "IntImplicit", "FloatImplicit", "ScalarImplicit", "is_nonzero"})


def is_scripted(model: object) -> bool:
    """Whether a model is TorchScript from `torch.jit.script` or a file; traced modules run as Python does."""
    traced = (torch.jit._trace.TopLevelTracedModule, torch.jit._trace.TracedModule)
    return isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) and not isinstance(model, traced)


class Scripted(nn.Module):
    """A ScriptModule or ScriptFunction, with the same parameters and buffers under the same names.

    Raises:
        CaptureError: it has no method `forward`.
        GraphBreakError: a program would lose a part of what it does or returns.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        forward = getattr(model, "forward", model)
        if getattr(forward, "schema", None) is None:
            raise CaptureError("the TorchScript module has no forward method", fix="script a module that defines one")
        _check(model, forward.schema)
        graph = forward.graph.copy()
        torch._C._jit_pass_inline(graph)
        self._held = (graph, model)  # a tuple: nn.Module must not look into it
        self._has_self = isinstance(model, torch.jit.ScriptModule)
        self.call_signature = _signature(forward.schema, self._has_self)
        self.original_name = str(getattr(model, "original_name", getattr(model, "name", "function")))
        if self._has_self:
            _mirror(model, self)
        self.training = bool(getattr(model, "training", False))

    @property
    def original(self) -> Any:
        """The TorchScript itself."""
        return self._held[1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.call_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        own = map(_own, bound.args)
        given = (self, *own) if self._has_self else tuple(own)
        graph, _ = self._held
        names = [item.debugName() for item in graph.inputs()]
        found = _run(graph, dict(zip(names, given, strict=True)))
        for item, value in zip(graph.outputs(), found, strict=True):
            check_numbers(item.type(), value)
        return found[0] if len(found) == 1 else tuple(found)


def original_of(model: Any) -> Any:
    """The TorchScript behind what reads it; any other model itself."""
    return model.original if isinstance(model, Scripted) else model


def _check(model: Any, schema: Any) -> None:
    """Refuses what its graph does not say, and what a program cannot keep."""
    if getattr(model, "_forward_hooks", None) or getattr(model, "_forward_pre_hooks", None):
        raise GraphBreakError(
            "the TorchScript module has forward hooks",
            why="they run around its graph and are not part of it",
            fix="call the hooked module inside another one, or do in forward what they do",
        )
    for written in attributes_written(model) if isinstance(model, nn.Module) else ():
        raise GraphBreakError(
            f"the TorchScript code changes the attribute {written} in the call",
            where=written.where,
            why="between calls a program keeps only buffers that are written in place",
            fix="keep it in a buffer, and write that in place, as in self.count.add_(1)",
        )
    for item in schema.returns:
        name = _named_tuple_in(item.type)
        if name:
            raise GraphBreakError(
                f"the TorchScript code returns a NamedTuple, {name}",
                why="a program returns objects of known classes, and TorchScript makes a new class for each call",
                fix="return a tuple or a dict, or pass the original nn.Module that it was scripted from",
            )


def _named_tuple_in(kind: Any) -> str:
    """The name of a NamedTuple that a type is or holds; nothing without one."""
    name = kind.kind()
    if name == "TupleType":
        if not kind.annotation_str.startswith("Tuple["):
            return str(kind.annotation_str).rpartition(".")[2]
        return next(filter(None, map(_named_tuple_in, kind.elements())), "")
    if name in ("ListType", "OptionalType"):
        return _named_tuple_in(kind.getElementType())
    return _named_tuple_in(kind.getValueType()) if name == "DictType" else ""


def _own(value: Any) -> Any:
    """Lists and dicts of a call as its own: what TorchScript does to them does not reach the caller."""
    if type(value) is tuple:
        return tuple(map(_own, value))
    if isinstance(value, list):
        return list(map(_own, value))
    return {key: _own(item) for key, item in value.items()} if isinstance(value, dict) else value


def _signature(schema: Any, has_self: bool) -> inspect.Signature:
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    arguments = [
        inspect.Parameter(item.name, kind, default=item.default_value if item.has_default_value() else none)
        for item in list(schema.arguments)[has_self:]
    ]
    return inspect.Signature(arguments)


def _mirror(script: Any, made: nn.Module) -> None:
    """Parameters, buffers and parts of a ScriptModule, the same tensors under the same names."""
    for name, value in script.named_parameters(recurse=False):
        # NOTE: one that was read from a file is a plain tensor.
        made.register_parameter(
            name, nn.Parameter(value, value.requires_grad) if type(value) is torch.Tensor else value
        )
    for name, value in script.named_buffers(recurse=False):
        made.register_buffer(name, value)
    for name, part in script.named_children():
        made.add_module(name, _Part(part))
    made.__dict__["_script"] = script  # for its other attributes: numbers, lists, ...


class _Part(nn.Module):
    def __init__(self, script: Any) -> None:
        super().__init__()
        _mirror(script, self)
        self.training = bool(getattr(script, "training", False))


# ---- running ----------------------------------------------------------------------------------------------


def _run(block: Any, values: Values) -> list[Any]:
    """Runs the nodes of a graph or a block, and returns what it returns."""
    for node in block.nodes():
        kind = node.kind()
        if kind in READINGS and node.output().debugName() in values:
            continue  # read before, outside
        inputs = [values[item.debugName()] for item in node.inputs()]
        if kind == "prim::If":
            found = _if(node, inputs, values)
        elif kind == "prim::Loop":
            found = _loop(node, inputs, values)
        elif kind in _PRIMS:
            found = _PRIMS[kind](node, inputs)
        else:
            found = _call(node, inputs)
        outputs = [item.debugName() for item in node.outputs()]
        if outputs:  # `sort` and `extend` of lists have none
            values.update(zip(outputs, found if len(outputs) != 1 else [found], strict=False))
    return [values[item.debugName()] for item in block.outputs()]


def _if(node: Any, inputs: Sequence[Any], values: Values) -> Any:
    yes, no = node.blocks()
    if isinstance(inputs[0], torch.Tensor):
        _read(node, values)
        found = branch(node, inputs[0], values, _run, place_of(node))
    else:
        found = _run(yes if inputs[0] else no, values)
    return found[0] if len(found) == 1 else found


def _loop(node: Any, inputs: Sequence[Any], values: Values) -> Any:
    """`for` and `while` are one node: at most so many rounds, as long as a condition holds."""
    (body,) = node.blocks()
    most, going, *carried = inputs
    names = [item.debugName() for item in body.inputs()]
    step = 0
    while not isinstance(going, torch.Tensor) and step < most and going:
        values.update(zip(names, [step, *carried], strict=True))
        going, *carried = _run(body, values)
        step += 1
    if isinstance(going, torch.Tensor):
        _read(node, values)
        carried = loop(node, [step, most, going, *carried], values, _run, place_of(node))
    return carried[0] if len(carried) == 1 else carried


def _read(node: Any, values: Values) -> None:
    """Reads the weights and constants that parts of a node need, so that they can be given to these."""
    for inner in readings(node):
        names = [item.debugName() for item in inner.inputs()]
        if all(name in values for name in names):
            found = _PRIMS[inner.kind()](inner, [values[name] for name in names])
            values.setdefault(inner.output().debugName(), found)


def _call(node: Any, inputs: list[Any]) -> Any:
    """A call of an op by its exact overload, or of Python's own where TorchScript imitates it."""
    kind = node.kind()
    name = kind.partition("::")[2]
    if kind.startswith("aten::") and name in PYTHON and (name not in TENSOR_TOO or not _is_tensor(inputs)):
        return PYTHON[name](*inputs)
    if name in _FLAGS and _is_tensor(inputs):  # a condition stays a tensor, for the branch or loop that it decides
        return flag_of(inputs[0])
    if kind.startswith("aten::") and name in DECIDED and _stands_for_a_number(node, inputs):
        return DECIDED[name](*inputs)
    if name in _NUMBERS and _is_tensor(inputs):
        raise GraphBreakError(
            "the TorchScript code has data-dependent control flow",
            where=place_of(node),
            why="a branch, a loop or a number depends on values that are known only at run time",
            fix="compute both branches and select with torch.where(condition, a, b)",
        )
    op = _overload(node.schema()) if node.schema() not in ("", "(no schema)") else None
    if op is None:
        raise GraphBreakError(
            f"the TorchScript op {kind} cannot be part of a program",
            where=place_of(node),
            why="a program consists of calls to PyTorch operators",
            fix="pass the original nn.Module that it was scripted from",
        )
    if containers_written(node.schema()):
        raise GraphBreakError(
            f"the TorchScript op {kind} changes a list or a dict",
            where=place_of(node),
            why="called from Python, it would change a copy",
            fix="make a new list or dict, or pass the original nn.Module that it was scripted from",
        )
    target, by_name = op
    count = len(inputs) - len(by_name)
    return target(*inputs[:count], **dict(zip(by_name, inputs[count:], strict=True)))


def _stands_for_a_number(node: Any, inputs: Sequence[Any]) -> bool:
    """Whether a tensor is given where the op asks for a number or a flag."""
    kinds = [str(argument.type) for argument in torch._C.parse_schema(node.schema()).arguments]
    return any(isinstance(value, torch.Tensor) and kind in SCALARS for value, kind in zip(inputs, kinds, strict=False))


@cache
def _overload(schema: str) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """The op of a schema, and which of its arguments, the last ones, go by name."""
    parsed = torch._C.parse_schema(schema)
    space, _, name = parsed.name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), name, None)
    found = getattr(packet, parsed.overload_name or "default", None)
    by_name = tuple(item.name for item in parsed.arguments if item.kwarg_only)
    return None if found is None else (found, by_name)


def _is_tensor(inputs: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in inputs)


def _attribute(node: Any, inputs: Sequence[Any]) -> Any:
    owner, name = inputs[0], node.s("name")
    for place in (owner._parameters, owner._buffers, owner._modules):
        if name in place:
            return place[name]
    return owner.training if name == "training" else getattr(owner._script, name)


def _raise(node: Any, inputs: Sequence[Any]) -> Any:
    raise RuntimeError(str(inputs[0]))


def _unpacked(node: Any, inputs: Sequence[Any]) -> Any:
    found = list(inputs[0])
    return found[0] if len(found) == 1 else found


def _isinstance(node: Any, inputs: Sequence[Any]) -> bool:
    raise GraphBreakError(
        "the TorchScript code checks the type of a value at run time",
        where=place_of(node),
        why="the types in a program are fixed at capture",
        fix="pass the original nn.Module that it was scripted from",
    )


_PRIMS: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "prim::Constant": lambda node, inputs: None if node.mustBeNone() else node.output().toIValue(),
    "prim::GetAttr": _attribute,
    "prim::ListConstruct": lambda node, inputs: list(inputs),
    "prim::TupleConstruct": lambda node, inputs: tuple(inputs),
    "prim::DictConstruct": lambda node, inputs: dict(zip(inputs[::2], inputs[1::2], strict=True)),
    "prim::TupleUnpack": _unpacked,
    "prim::ListUnpack": _unpacked,
    "prim::TupleIndex": lambda node, inputs: inputs[0][inputs[1]],
    "prim::unchecked_cast": lambda node, inputs: inputs[0],
    "prim::Uninitialized": lambda node, inputs: None,
    "prim::RaiseException": _raise,
    "prim::isinstance": _isinstance,
    "prim::Print": lambda node, inputs: None,
    "prim::dtype": lambda node, inputs: inputs[0].dtype,
    "prim::device": lambda node, inputs: inputs[0].device,
    "prim::layout": lambda node, inputs: inputs[0].layout,
    "prim::is_cuda": lambda node, inputs: inputs[0].is_cuda,
    "prim::requires_grad": lambda node, inputs: inputs[0].requires_grad,
    "prim::data": lambda node, inputs: inputs[0].data,
    "prim::min": lambda node, inputs: min(*inputs) if len(inputs) > 1 else min(inputs[0]),
    "prim::max": lambda node, inputs: max(*inputs) if len(inputs) > 1 else max(inputs[0]),
}
