"""ExportedProgram -> Program: weights become get_attr nodes, written state inputs and outputs, every call is typed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tsopt.compiler.calls.effects import Effect
from tsopt.compiler.calls.signature import Input, Output, Signature
from tsopt.compiler.calls.structure import Structure
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.capture.export_errors import size_of_values
from tsopt.compiler.graph import control, ops
from tsopt.compiler.graph.edit import fresh_name
from tsopt.compiler.graph.infer import fake_call, fakes
from tsopt.compiler.graph.origin import origin_in, origin_of, origin_of_meta
from tsopt.compiler.graph.program import Program, type_of_value
from tsopt.compiler.sizes.guards import SYMBOLIC, is_of_values, is_settled
from tsopt.compiler.sizes.symbols import hinted
from tsopt.errors import CaptureError, GraphBreakError, summary_of

# Ops whose results torch.export records otherwise than they come out: torch 2.11 gives the states of recurrent layers
# an axis too many, every version takes a dropout that does nothing for a copy.
MISTAKEN = frozenset(f"{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
MISTAKEN |= {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
ROUNDING = (math.ceil, math.floor, math.trunc)  # of sizes
WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}
WRITES |= {kind for kind in OutputKind if kind.name == "PARAMETER_MUTATION"}  # absent before torch 2.9


def functional(exported: ExportedProgram) -> ExportedProgram:
    """The same without writes, where it has any, or calls that a program cannot hold."""
    needed = any(
        ops.is_call(node) and (ops.writes(node.target) or not _known(node) or ops.writes_in_secret(node))
        for graph in _graphs(exported)
        for node in graph.nodes
    )
    return exported.run_decompositions(_secret_writers(exported)) if needed else exported


def follows_default_dtype(exported: ExportedProgram) -> bool:
    """Whether a call has torch's default dtype for want of another: `torch.zeros(3)`, `x / 3` of whole numbers.

    To be asked of a graph as it was traced: decompositions write the dtype down.
    """
    return any(
        ops.is_overload(node.target)
        and not ops.is_quantization(node.target)
        and ops.is_of_default_dtype(
            fx.node.map_arg((node.args, dict(node.kwargs)), lambda value: value.meta.get("val")), node.meta.get("val")
        )
        for graph in _graphs(exported)
        for node in graph.nodes
    )


def _graphs(exported: ExportedProgram) -> Iterator[fx.Graph]:
    """The graph, and those of branches and loops."""
    return (module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule))


def _secret_writers(exported: ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """How to take apart the ops whose writes torch.export does not see; the parts write for all to see."""
    table = torch.export.default_decompositions()
    found = {node.target for node in exported.graph.nodes if ops.is_call(node) and ops.writes_in_secret(node)}
    return {target: table[target] for target in found if target in table}


def _known(node: fx.Node) -> bool:
    """Whether a program can hold a call: an op, a choice among its results, control flow, a number from sizes."""
    if ops.is_overload(node.target) or node.target is operator.getitem or control.is_higher_order(node.target):
        return True
    return ops.is_number(node) and not is_of_values(node.meta.get("val"))


def lower(
    exported: ExportedProgram,
    names: list[str],
    outer: Structure,
    result: Structure,
    effects: tuple[Effect, ...],
    name: str,
) -> Program:
    """The exported program with weights as get_attr nodes and written state as inputs and outputs."""
    signature = exported.graph_signature
    written = {spec.target for spec in signature.output_specs if spec.kind in WRITES}
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    users = [spec for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT]
    held = [spec for spec in signature.input_specs if spec.kind != InputKind.USER_INPUT]
    states = [spec for spec in held if spec.target in written]

    free = unique([*names, *(_clean(spec.target) for spec in states)])
    # By what a write names: the placeholder of a user's input, the path of a state.
    inputs = {
        str(spec.target or spec.arg.name): Input(text, _traced_type(nodes[spec.arg.name]), state=spec in states)
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
    labels = {position: f"{path}.new" for effect in effects for position, path in effect.labels()}
    labels |= dict(result.paths())
    outputs: list[Output] = []
    for spec, value in zip(signature.output_specs, returned, strict=True):
        if spec.kind in WRITES:
            target = inputs[str(spec.target)].name
            outputs.append(Output(f"{target}.new", _traced_type(lowering.mapping[value]), writes=target))
        else:
            position = sum(1 for item in outputs if item.writes is None)
            outputs.append(Output(labels.get(position) or "output", _traced_type(lowering.mapping[value])))
    return Program(
        lowering.finish([lowering.mapping[value] for value in returned]),
        lowering.weights,
        Signature(tuple(inputs.values()), tuple(outputs), outer, result, effects=effects),
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
        self.mended: set[fx.Node] = set()  # calls of the exported program with another type than it records
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
            raise GraphBreakError(
                f"the model holds a {type(tensor).__name__}, which is not a tensor",
                why="its side effects cannot be part of a program",
                fix="use torch.manual_seed instead of your own torch.Generator",
            )
        tensor = tensor.detach()
        lazy = tensor.is_conj(), tensor.is_neg()  # a tensor and its conjugate have the same memory
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *lazy)
        if tensor.numel() and key in self._by_storage:  # tied weights are one
            self.mapping[node] = self._by_storage[key]
            return
        name = _clean(target)
        made = self.graph.create_node("get_attr", name)
        made.meta = {"val": node.meta["val"]}
        self.weights[name] = tensor
        self.mapping[node] = self._by_storage[key] = made

    def call(self, node: fx.Node) -> None:
        if is_settled(node):  # a condition on sizes: the signature checks it
            return
        if node.target in ROUNDING and _is_quotient(node.args[0]):
            self.mapping[node] = self._rounded(node)
            return
        if not _known(node):
            raise _no_op(node)
        if control.is_higher_order(node.target):
            made = self._control(node)
        else:
            made = self.graph.node_copy(node, self.mapping.__getitem__)
        origin = {} if ops.is_number(node) else origin_in(node.meta)  # torch's own, for what sizes are read for
        made.meta = {"val": self._value(node, made), **origin}
        if ops.writes_in_secret(made):
            raise GraphBreakError(
                f"{ops.name_of(node)} updates its running statistics in the call",
                where=origin_of(made) or None,
                why="the op's schema does not declare this write, so a program cannot represent it",
                fix="call model.eval() to use the running statistics, or disable them with track_running_stats=False",
            )
        for tensor in ops.tensors_of(node.meta.get("val")):
            if tensor.layout != torch.strided:
                raise GraphBreakError(
                    f"{ops.name_of(node)} creates a {str(tensor.layout).removeprefix('torch.')} tensor",
                    where=origin_of(made) or None,
                    why="a program supports only dense tensors",
                    fix="use a dense tensor instead",
                )
            if any(is_of_values(size) for size in tensor.shape):
                raise size_of_values(ops.name_of(node), origin_of(made) or None)
            if any(is_of_values(number) for number in (*tensor.stride(), tensor.storage_offset())):
                raise _of_values(ops.name_of(node), origin_of(made) or None)
        self.mapping[node] = made

    def _rounded(self, node: fx.Node) -> fx.Node:
        """The floor or the ceiling of a quotient of sizes, in integers: engines compute quotients in float32."""
        quotient: Any = node.args[0]
        above, below = (self.mapping[arg] if isinstance(arg, fx.Node) else arg for arg in quotient.args)
        steps: list[tuple[Any, Any]] = [(operator.floordiv, below)]
        if node.target is math.ceil:
            steps = [(operator.add, below), (operator.sub, 1), *steps]
        for target, other in steps:
            above = self.graph.call_function(target, (above, other))
            above.meta = {"val": node.meta["val"]}  # of the result: each is computed again for the sizes of the trace
        return above

    def _control(self, node: fx.Node) -> fx.Node:
        """A call of control flow, with the constants of its branches as operands."""
        if any(not isinstance(size, int) for t in self._tensors() for size in t.shape):
            raise _for_one_size(node, "its branches or loop body are captured for one size")
        target, operands, constants = control.from_higher_order(node, self.exported.graph_module)
        given = [self.mapping[value] for value in operands]
        for tensor in constants:
            name = fresh_name("constant", self.weights)
            held = self.graph.create_node("get_attr", name)
            held.meta = {"val": given[0].meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)}
            self.weights[name] = tensor
            given.append(held)
        return self.graph.call_function(target, tuple(given))

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (node.meta["val"] for node in self.mapping if node.op == "placeholder")

    def _value(self, node: fx.Node, made: fx.Node) -> Any:
        """The fake value of a call: as recorded, or worked out again where that, or what comes before, is mistaken."""
        recorded = node.meta.get("val")
        mistaken = ops.is_overload(node.target) and ops.name_of(node).removeprefix("aten.") in MISTAKEN
        tensors = ops.tensors_of(recorded)
        if not tensors or not (mistaken or any(source in self.mended for source in node.all_input_nodes)):
            return recorded
        given: Any = fx.node.map_arg((made.args, dict(made.kwargs)), lambda value: value.meta["val"])
        args, kwargs = given
        if made.target is operator.getitem:
            value: Any = operator.getitem(*args)
        else:
            try:
                with fakes(tensors[0].fake_mode):
                    value = fake_call(made.target, args, kwargs)
            except Exception as error:  # torch's shape function may not take symbolic sizes
                raise _for_one_size(node, summary_of(error)) from error
        if type_of_value(value) != type_of_value(recorded):
            self.mended.add(node)
        return value

    def finish(self, outputs: list[fx.Node]) -> fx.Graph:
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
                del self.weights[str(node.target)]
        return self.graph


def _is_quotient(value: Any) -> bool:
    """Whether a number is an integer from sizes, not negative, divided by a positive one."""
    if not isinstance(value, fx.Node) or value.target is not operator.truediv:
        return False
    above, below = (arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in value.args)
    return _is_at_least(above, 0) and _is_at_least(below, 1)


def _is_at_least(number: Any, least: int) -> bool:
    if isinstance(number, torch.SymInt) and not is_of_values(number):
        return bool((number.node.expr - least).is_nonnegative)
    return type(number) is int and number >= least


def _for_one_size(node: fx.Node, why: str) -> CaptureError:
    """The refusal of a call that can be captured for one size at a time."""
    return CaptureError(
        f"{ops.name_of(node)} is not supported with dynamic sizes",
        where=origin_of_meta(node.meta) or None,
        why=why,
        fix="leave dynamic out: each size is captured when it is first called",
    )


def _no_op(node: fx.Node) -> CaptureError:
    """The refusal of a call that is neither an op nor a choice among its results."""
    name = getattr(node.target, "__name__", str(node.target))
    where = origin_of_meta(node.meta) or None
    if getattr(node.target, "namespace", "") == "higher_order":
        return GraphBreakError(
            f"control flow op {name.removesuffix('_impl')} is not supported",
            where=where,
            why="the only control flow ops a program can contain are cond and while_loop",
            fix="compute both branches and select with torch.where, or use a Python loop of fixed length",
        )
    if isinstance(node.meta.get("val"), SYMBOLIC) and not is_of_values(node.meta["val"]):
        return CaptureError(
            f"the model computes with sizes in an unsupported way ({name})",
            where=where,
            why="a program supports only arithmetic, min and max on sizes, and math.ceil and math.floor of a quotient",
            fix="leave dynamic out: each size is captured when it is first called",
        )
    return _of_values(name, where)


def _of_values(name: str, where: str | None) -> GraphBreakError:
    return GraphBreakError(
        f"the model uses a Python number computed from tensor values ({name})",
        where=where,
        why="a program computes only with tensors",
        fix="keep it a tensor: x * scale with scale = t.max() instead of t.max().item()",
    )


def _traced_type(node: fx.Node) -> TensorType:
    found = TensorType.of(node.meta["val"])
    return replace(found, shape=tuple(map(hinted, found.shape)), stride=tuple(map(hinted, found.stride)))


def _clean(target: object) -> str:
    """`model.layer1.0.weight` -> `layer1.0.weight`; torch's own constants keep a readable name."""
    return str(target).removeprefix("model.")


def unique(names: list[str]) -> list[str]:
    """Makes the names unique: a second `x` becomes `x_2`, or the first such name that is still free."""
    own, out = set(names), list[str]()
    for name in names:
        free, number = name, 1
        while free in out or (number > 1 and free in own):
            number += 1
            free = f"{name}_{number}"
        out.append(free)
    return out
