"""nn.Module or function -> Program, through torch.export. The user's model is left as it was.

Never imports a pass or a backend.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tsopt.compiler import ops
from tsopt.compiler.example import Example, as_example
from tsopt.compiler.explain import explain, size_of_values
from tsopt.compiler.origin import origin_in, origin_of_meta
from tsopt.compiler.program import Program, origin_of
from tsopt.compiler.protect import protected, training_flags
from tsopt.compiler.quiet import quiet
from tsopt.compiler.refusals import check_inputs, check_model, check_result, check_training
from tsopt.compiler.scripted import Scripted, is_scripted
from tsopt.compiler.signature import Input, Output, Signature
from tsopt.compiler.structure import Structure, flatten, unflatten
from tsopt.compiler.types import TensorType
from tsopt.errors import NotOneGraph

RECURRENT = frozenset(f"{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
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
        model: an nn.Module, an ExportedProgram, TorchScript, or a function of tensors.
        example_input: a tensor, a tuple of positional arguments, a dict of keyword arguments, or
            `tsopt.example(*args, **kwargs)`. Shapes, dtypes and devices are those of the calls to come.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: take weights that hold NaN.

    Raises:
        CaptureError: the model cannot be captured; the message says where and what to write instead. NotOneGraph, one
            of them, where the model itself runs.
    """
    example = as_example(example_input)
    if isinstance(model, ExportedProgram):
        model = model.module(check_guards=False)
        eval_mode = True
    check_model(model, allow_nan=allow_nan)
    check_inputs(model, example)
    if is_scripted(model):
        model = Scripted(model)
    training = isinstance(model, nn.Module) and any(module.training for module in model.modules())
    with protected(model), quiet():
        if training and eval_mode:
            with training_flags(model, False):
                return _capture(model, example)
        program = _capture(model, example)
        if training:
            with training_flags(model, False):
                check_training(program, _capture(model, example))
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
            exported = exported.run_decompositions(_secret_writers(exported))
    except Exception as error:
        raise explain(error, model, example) from error
    result = results[-1]
    check_result(result)
    return _lower(exported, names, outer, result, _model_name(model))


def _needs_functionalization(exported: ExportedProgram) -> bool:
    return any(
        ops.is_call(node) and (ops.writes(node.target) or not _plain(node.target) or ops.writes_in_secret(node))
        for node in exported.graph.nodes
    )


def _secret_writers(exported: ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """How to take apart the ops whose writes torch.export does not see; the parts write for all to see."""
    table = torch.export.default_decompositions()
    found = {node.target for node in exported.graph.nodes if ops.is_call(node) and ops.writes_in_secret(node)}
    return {target: table[target] for target in found if target in table}


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
            outputs.append(Output(f"{target}.new", _static_type(lowering.mapping[value]), writes=target))
        else:
            position = sum(1 for item in outputs if item.writes is None)
            outputs.append(Output(labels.get(position) or "output", _static_type(lowering.mapping[value])))
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
        tensor = self.tensor(target)
        if not isinstance(tensor, torch.Tensor):  # torch.export lifts objects of C++ like constants
            raise NotOneGraph(
                f"the model holds a {type(tensor).__name__}, which is no tensor",
                why="what it does in a call cannot be part of a program",
                fix="use torch.manual_seed instead of a torch.Generator of one's own",
            )
        tensor = tensor.detach()
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
            raise _no_op(node)
        made = self.graph.node_copy(node, self.mapping.__getitem__)
        made.meta = {"val": self._value(node, made), **origin_in(node.meta)}
        if ops.writes_in_secret(made):
            raise NotOneGraph(
                f"{ops.name_of(node)} updates its running statistics in the call",
                where=origin_of(made) or None,
                why="the program could not say that it does: the op's schema denies it",
                fix="use the running statistics instead (model.eval()), or none (track_running_stats=False)",
            )
        for tensor in ops.tensors_of(node.meta.get("val")):
            if tensor.layout != torch.strided:
                raise NotOneGraph(
                    f"{ops.name_of(node)} makes a {str(tensor.layout).removeprefix('torch.')} tensor",
                    where=origin_of(made) or None,
                    why="a program computes with dense tensors",
                    fix="keep it dense",
                )
            if any(not isinstance(size, int) for size in tensor.shape):
                raise size_of_values(ops.name_of(node), origin_of(made) or None)
        self.mapping[node] = made

    def _value(self, node: fx.Node, made: fx.Node) -> Any:
        """The fake value of a call. torch 2.11 gives the states of recurrent layers an axis too many."""
        source = node.args[0] if node.target is operator.getitem else node
        if not isinstance(source, fx.Node) or ops.name_of(source).removeprefix("aten.") not in RECURRENT:
            return node.meta.get("val")
        if node.target is operator.getitem:
            return self.mapping[source].meta["val"][node.args[1]]
        args, kwargs = fx.node.map_arg((made.args, dict(made.kwargs)), lambda value: value.meta["val"])
        target: Any = made.target
        with torch.no_grad(), node.meta["val"][0].fake_mode:
            return target(*args, **kwargs)

    def finish(self, outputs: list[fx.Node]) -> fx.Graph:
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
                del self.weights[str(node.target)]
        return self.graph


def _no_op(node: fx.Node) -> NotOneGraph:
    """The refusal of a call that is neither an op nor a choice among its results."""
    name = getattr(node.target, "__name__", str(node.target))
    where = origin_of_meta(node.meta) or None
    if getattr(node.target, "namespace", "") == "higher_order":
        return NotOneGraph(
            f"{name.removesuffix('_impl')} is control flow, which a Program cannot hold",
            where=where,
            why="a program is one list of calls",
            fix="compute both branches and select with torch.where; a loop of fixed length in Python",
        )
    return NotOneGraph(
        f"a Python number that is computed from values of a tensor is used ({name})",
        where=where,
        why="a program computes with tensors",
        fix="keep it a tensor: x * scale with scale = t.max() instead of t.max().item()",
    )


def _static_type(node: fx.Node) -> TensorType:
    return TensorType.of(node.meta["val"])


def _clean(target: object) -> str:
    """`model.layer1.0.weight` -> `layer1.0.weight`; torch's own constants keep a readable name."""
    return str(target).removeprefix("model.")


# ---- names ------------------------------------------------------------------------------------------------


def _model_name(model: object) -> str:
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "function")
    name = str(getattr(model, "original_name", name))  # of TorchScript
    return name if name.isidentifier() else "Model"


def _input_names(model: Callable[..., Any], outer: Structure) -> list[str]:
    """A name for each leaf: the parameter of forward that it belongs to, and its path below."""
    target = model.forward if isinstance(model, nn.Module) else model
    try:
        signature = model.call_signature if isinstance(model, Scripted) else inspect.signature(target)
        parameters = list(signature.parameters.values())
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
