"""nn.Module or function -> Program, through torch.export. The user's model is left as it was.

Never imports a pass or a backend.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tsopt.compiler import ops
from tsopt.compiler.example import Example, as_example
from tsopt.compiler.program import Program, origin_of
from tsopt.compiler.protect import protected, training_flags
from tsopt.compiler.quiet import quiet
from tsopt.compiler.signature import Input, Output, Signature
from tsopt.compiler.structure import Structure, flatten, unflatten
from tsopt.compiler.types import TensorType
from tsopt.errors import CaptureError

LIBRARIES = tuple(str(Path(p).resolve()) for p in (Path(torch.__file__).parent, Path(__file__).parents[1]))
WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}
WRITES |= {kind for kind in OutputKind if kind.name == "PARAMETER_MUTATION"}  # absent before torch 2.9


def capture(
    model: Callable[..., Any],
    example_input: Any,
    *,
    eval_mode: bool = False,
    allow_nan: bool = False,
) -> Program:
    """Captures a model as a typed, functional graph.

    Args:
        model: an nn.Module, an ExportedProgram or a function of tensors.
        example_input: a tensor, a tuple of positional arguments, a dict of keyword arguments, or
            `tsopt.example(*args, **kwargs)`. Shapes, dtypes and devices are those of the calls to come.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: take weights that hold NaN.

    Raises:
        CaptureError: the model cannot be captured; the message says where and what to write instead.
    """
    example = as_example(example_input)
    if isinstance(model, ExportedProgram):
        model = model.module(check_guards=False)
        eval_mode = True
    _check_model(model, allow_nan=allow_nan)
    _check_inputs(model, example)
    training = isinstance(model, nn.Module) and any(module.training for module in model.modules())
    with protected(model), quiet():
        if training and eval_mode:
            with training_flags(model, False):
                return _capture(model, example)
        program = _capture(model, example)
        if training:
            with training_flags(model, False):
                _check_training(program, _capture(model, example))
        return program


class _Flat(nn.Module):
    """Flat tensors in and out around the user's model, so that no nesting ever reaches torch.export."""

    def __init__(self, model: Callable[..., Any], outer: Structure, record: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model = model
        self.outer = outer
        self.record = record  # a function: torch.export puts attributes that change back as they were

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self.outer, leaves)
        values, structure = flatten(self.model(*args, **kwargs), share=True)
        self.record(structure)
        return tuple(values)


def _capture(model: Callable[..., Any], example: Example) -> Program:
    leaves, outer = flatten((example.args, example.kwargs))
    names = _input_names(model, outer)
    # Detached, and apart from the user's tensors: nothing that tracing does may reach them.
    inputs = tuple(leaf.detach().clone() for leaf in leaves)
    results: list[Structure] = []
    flat = _Flat(model, outer, lambda structure: results.append(structure))
    flat.training = False
    try:
        exported = torch.export.export(flat, inputs, strict=False)
        if _needs_functionalization(exported):
            exported = exported.run_decompositions({})
    except Exception as error:
        raise _explain(error, model, example) from error
    result = results[-1]
    _check_result(result)
    return _lower(exported, names, outer, result, _model_name(model))


def _needs_functionalization(exported: ExportedProgram) -> bool:
    return any(
        ops.is_call(node) and (ops.writes(node.target) or not _plain(node.target)) for node in exported.graph.nodes
    )


def _plain(target: object) -> bool:
    return ops.is_overload(target) or target is operator.getitem


def _lower(exported: ExportedProgram, names: list[str], outer: Structure, result: Structure, name: str) -> Program:
    """The exported program with weights as get_attr nodes and written state as inputs and outputs."""
    signature = exported.graph_signature
    written = {spec.target for spec in signature.output_specs if spec.kind in WRITES}
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    users = [spec for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
    held = [spec for spec in signature.input_specs if spec.kind != InputKind.USER_INPUT]
    states = [spec for spec in held if spec.target in written]

    free = _unique([*names, *(_clean(spec.target) for spec in states)])
    # By what a write names: the placeholder of a user's input, the path of a state.
    inputs = {
        str(spec.target or spec.arg.name): Input(text, _static_type(nodes[spec.arg.name]), state=spec in states)
        for spec, text in zip((*users, *states), free, strict=True)
    }
    lowering = _Lowering(exported)
    for spec in (*users, *states):
        lowering.placeholder(nodes[spec.arg.name])
    for spec in held:
        if spec not in states:
            lowering.weight(nodes[spec.arg.name], str(spec.target))
    for node in exported.graph.nodes:
        if node.op == "call_function":
            lowering.call(node)

    returned = list(exported.graph.output_node().args[0])
    labels = dict(result.paths())
    outputs: list[Output] = []
    for spec, value in zip(signature.output_specs, returned, strict=True):
        if spec.kind in WRITES:
            target = inputs[str(spec.target)].name
            outputs.append(Output(f"{target}.new", _static_type(value), writes=target))
        else:
            position = sum(1 for item in outputs if item.writes is None)
            outputs.append(Output(labels.get(position) or "output", _static_type(value)))
    return Program(
        lowering.finish([lowering.mapping[value] for value in returned]),
        lowering.weights,
        Signature(tuple(inputs.values()), tuple(outputs), outer, result),
        {inputs[str(spec.target)].name: lowering.tensor(str(spec.target)) for spec in states},
        name=name,
    )


class _Lowering:
    """Builds the graph of a Program from that of an exported program."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.graph = fx.Graph()
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self._by_storage: dict[tuple[Any, ...], fx.Node] = {}

    def tensor(self, target: str) -> torch.Tensor:
        found = self.exported.state_dict.get(target)
        return self.exported.constants[target] if found is None else found

    def placeholder(self, node: fx.Node) -> None:
        made = self.graph.placeholder(node.name)
        made.meta = {"val": node.meta["val"]}
        self.mapping[node] = made

    def weight(self, node: fx.Node, target: str) -> None:
        tensor = self.tensor(target).detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in self._by_storage:  # tied weights are one
            self.mapping[node] = self._by_storage[key]
            return
        name = _clean(target)
        made = self.graph.create_node("get_attr", name)
        made.meta = {"val": node.meta["val"]}
        self.weights[name] = tensor
        self.mapping[node] = self._by_storage[key] = made

    def call(self, node: fx.Node) -> None:
        if not _plain(node.target):
            raise CaptureError(
                f"{getattr(node.target, '__name__', node.target)} is control flow, which a Program cannot hold",
                where=origin_of_meta(node.meta) or None,
                fix="compute both branches and select with torch.where, or optimize the parts of the model one by one",
            )
        made = self.graph.node_copy(node, self.mapping.__getitem__)
        made.meta = {"val": node.meta.get("val"), **_origin(node.meta)}
        for tensor in ops.tensors_of(node.meta.get("val")):
            if any(not isinstance(size, int) for size in tensor.shape):
                raise CaptureError(
                    f"the shape of {ops.name_of(node)} depends on values, not on shapes",
                    where=origin_of(made) or None,
                    why="the program would need a size that is known only at run time",
                    fix="use a mask of fixed size (torch.where) instead of selecting by value",
                )
        self.mapping[node] = made

    def finish(self, outputs: list[fx.Node]) -> fx.Graph:
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
                del self.weights[str(node.target)]
        return self.graph


def _static_type(node: fx.Node) -> TensorType:
    return TensorType.of(node.meta["val"])


def _clean(target: object) -> str:
    """`model.layer1.0.weight` -> `layer1.0.weight`; torch's own constants keep a readable name."""
    return str(target).removeprefix("model.")


# ---- where a value comes from -----------------------------------------------------------------------------

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SLICED = re.compile(r"\.?slice\([^)]*\)")


def _origin(meta: dict[str, Any]) -> dict[str, str]:
    origin = {}
    stack = meta.get("nn_module_stack")
    if stack:
        path = _SLICED.sub("", str(next(reversed(stack.values()))[0]))
        path = path.removeprefix("L['self'].").removeprefix("model").strip(".")
        if path:
            origin["module"] = path
    for file, line, _ in reversed(_FRAME.findall(meta.get("stack_trace") or "")):
        if not _is_library(file):
            origin["source"] = f"{short_path(file)}:{line}"
            break
    return origin


def origin_of_meta(meta: dict[str, Any]) -> str:
    return ", ".join(_origin(meta).values())


def _is_library(file: str) -> bool:
    return file.startswith("<") or str(Path(file).resolve()).startswith(LIBRARIES)


def short_path(file: str) -> str:
    """A path as a user would say it: from the working directory, or from site-packages."""
    path = Path(file)
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def user_frame(error: BaseException) -> str | None:
    """`file:line, in function` of the deepest frame of an error that is the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library(frame.filename) and "/lib/python" not in frame.filename.split("site-packages")[0]:
            line = f": {frame.line}" if frame.line else ""
            return f"{short_path(frame.filename)}:{frame.lineno}, in {frame.name}{line}"
    return None


# ---- what is refused, and what it says --------------------------------------------------------------------


def _check_model(model: object, *, allow_nan: bool) -> None:
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise CaptureError(
            "the model is a TorchScript module",
            why="capture reads Python modules",
            fix="pass the nn.Module that it was scripted or traced from",
        )
    if not callable(model):
        raise CaptureError(
            f"the model is a {type(model).__name__}", why="it cannot be called", fix="pass an nn.Module or a function"
        )
    if not isinstance(model, nn.Module):
        return
    devices: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _check_tensor(name, tensor, allow_nan=allow_nan)
        devices.setdefault(str(tensor.device), name)
    if len(devices) > 1:
        raise CaptureError(
            "the model's weights are on several devices",
            where=", ".join(f"{name} on {device}" for device, name in devices.items()),
            fix=f"move it to one: model.to({next(iter(devices))!r})",
        )


def _check_tensor(name: str, tensor: torch.Tensor, *, allow_nan: bool) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise CaptureError(
            "a lazy module has no weights yet", where=name, fix="call the model once on an example before optimizing"
        )
    if tensor.device.type == "meta":
        raise CaptureError(
            "a weight is on the meta device and has no values", where=name, fix="load the weights: model.to_empty(...)"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise CaptureError(f"a weight is a {kind} tensor", where=name, fix="convert it to a dense float tensor first")
    if not allow_nan and (bad := _nan_count(tensor)):
        raise CaptureError(
            f"a weight holds {bad} NaN of {tensor.numel()} values",
            where=name,
            why="whatever depends on it is NaN, and no comparison could tell right from wrong",
            fix="load a sound checkpoint, or pass allow_nan=True (--allow-nan) to go on all the same",
        )


def _nan_count(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    # NOTE: the sum is NaN wherever an element is; it is also NaN for inf - inf, so look closer only then.
    return int(tensor.detach().isnan().sum()) if bool(tensor.detach().sum().isnan()) else 0


def _check_inputs(model: object, example: Example) -> None:
    leaves, structure = flatten((example.args, example.kwargs))
    paths = dict(structure.paths())
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    for index, leaf in enumerate(leaves):
        where = f"input {paths[index]}"
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"an input is a {type(leaf).__name__}", where=where, fix="pass a torch.Tensor")
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested or leaf.device.type == "meta":
            raise CaptureError(
                "an input is sparse, nested, quantized or on the meta device",
                where=where,
                fix="pass a dense tensor with values",
            )
        if first is not None and leaf.device != first.device and leaf.dim() > 0:
            raise CaptureError(
                f"the model is on {first.device}, an input on {leaf.device}",
                where=where,
                fix=f"move one to the other: x.to({str(first.device)!r})",
            )


def _check_result(result: Structure) -> None:
    nodes = [result]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.kind == "const" and isinstance(node.value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(
                "the model returns a Python number that depends on the input",
                why="a program returns tensors; the number would be frozen",
                fix="return the tensor instead of tensor.item()",
            )
    if result.leaf_count == 0:
        raise CaptureError("the model returns no tensor", why=f"it returns {result}", fix="return what it computes")


def _check_training(trained: Program, evaluated: Program) -> None:
    """Refuses a model whose answer depends on the training flag; one where it makes no difference passes."""
    pairs = list(zip_longest(trained.calls(), evaluated.calls()))
    differing = next((a or b for a, b in pairs if a is None or b is None or not _same_in_both(a, b)), None)
    if differing is None:
        return
    raise CaptureError(
        f"the model is in training mode and its answer depends on it ({ops.name_of(differing)})",
        where=origin_of(differing) or None,
        why="dropout stays on and batch norm uses the statistics of the batch",
        fix="call model.eval() first, or pass eval_mode=True (--eval on the command line)",
    )


def _same_in_both(a: fx.Node, b: fx.Node) -> bool:
    if a.target == b.target and ops.name_of(a).startswith("aten.") and str(a.target).split(".")[1] in _HARMLESS:
        return not ops.is_random(a) and not ops.is_random(b)  # dropout of 0: the flag makes no difference
    return _call_text(a) == _call_text(b)


_HARMLESS = frozenset(name.removeprefix("aten::") for name in ops.RANDOM_ONLY_IF if "dropout" in name)


def _call_text(node: fx.Node) -> str:
    return f"{node.target}{[a for a in node.args if not isinstance(a, fx.Node)]}{dict(node.kwargs)}"


def _explain(error: Exception, model: Callable[..., Any], example: Example) -> CaptureError:
    """The user's view of a failed export: his own error if the model fails by itself, else the construct."""
    if isinstance(error, CaptureError):
        return error
    own = _eager_failure(model, example)
    if own is not None:
        return CaptureError(
            "the model itself fails on the example input",
            where=user_frame(own) or user_frame(error),
            why=f"{type(own).__name__}: {_first_lines(own)}",
            fix="make model(*example) run in plain PyTorch first",
        )
    text = str(error)
    where = user_frame(error)
    if "data-dependent" in text or type(error).__name__.startswith("GuardOnDataDependent"):
        return CaptureError(
            "a Python decision depends on the values of a tensor",
            where=where,
            why="an if, a loop, .item() or int() on a tensor is decided while the model runs; a program is one graph",
            fix="select with torch.where(condition, a, b), or decide on shapes and arguments instead",
        )
    return CaptureError(
        "torch.export cannot capture the model",
        where=where,
        why=f"{type(error).__name__}: {_first_lines(error)}",
        fix="replace the construct at that line by tensor operations",
    )


def _eager_failure(model: Callable[..., Any], example: Example) -> Exception | None:
    args, kwargs = unflatten_clones(example)
    try:
        with protected(model, written=list(model.parameters()) if isinstance(model, nn.Module) else ()):
            model(*args, **kwargs)
    except Exception as error:
        return error
    return None


def unflatten_clones(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with every tensor cloned: what the model writes stays here."""
    leaves, structure = flatten((example.args, example.kwargs))
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    return args, kwargs


def _first_lines(error: BaseException, limit: int = 300) -> str:
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:4])
    return text if len(text) <= limit else text[:limit] + " ..."


# ---- names ------------------------------------------------------------------------------------------------


def _model_name(model: object) -> str:
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "function")
    return name if name.isidentifier() else "Model"


def _input_names(model: Callable[..., Any], outer: Structure) -> list[str]:
    """A name for each leaf: the parameter of forward that it belongs to, and its path below."""
    target = model.forward if isinstance(model, nn.Module) else model
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: list[str] = []
    args, kwargs = outer.children
    for position, child in enumerate(args.children):
        prefix = plain[position] if position < len(plain) else f"arg{position}"
        names += [path for _, path in child.paths(prefix)]
    for key, child in zip(kwargs.keys, kwargs.children, strict=True):
        names += [path for _, path in child.paths(str(key))]
    return _unique(names)


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return out
