"""nn.Module or function -> Program, through torch.export, whoever reads it. The user's model is left as it was.

Never imports a pass or a backend.
"""

from __future__ import annotations

import inspect
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tsopt.compiler import control, ops
from tsopt.compiler.conditions import SYMBOLIC, is_of_values, is_settled
from tsopt.compiler.dims import Dynamic, dynamic_of, from_examples, from_mapping
from tsopt.compiler.example import Example, as_examples
from tsopt.compiler.explain import explain, failure_of_the_model, size_of_values
from tsopt.compiler.frontends import FRONTENDS, by_fx, by_torchscript, computes_the_same, replayed, strictly
from tsopt.compiler.infer import fakes
from tsopt.compiler.origin import origin_in, origin_of_meta
from tsopt.compiler.program import Program, origin_of, type_of_value
from tsopt.compiler.protect import protected, training_flags
from tsopt.compiler.quiet import quiet
from tsopt.compiler.refusals import check_inputs, check_model, check_result, check_training
from tsopt.compiler.rewrite import fresh_name
from tsopt.compiler.scripted import Scripted, is_scripted
from tsopt.compiler.signature import Input, Output, Signature
from tsopt.compiler.structure import Structure, flatten, unflatten
from tsopt.compiler.symbols import hinted, shapes_of, symbols_of, with_dims
from tsopt.compiler.types import TensorType
from tsopt.errors import CaptureError, DecidedByValues, NotOneGraph, UsageError

log = logging.getLogger("tsopt")
# Ops whose results torch.export records otherwise than they come out: torch 2.11 gives the states of recurrent layers
# an axis too many, every version takes a dropout that does nothing for a copy.
MISTAKEN = frozenset(f"{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
MISTAKEN |= {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
# Who reads a model before torch.export does.
READERS = {"strict": "torch.export in strict mode", "fx": "torch.fx", "torchscript": "TorchScript"}
TRACING = threading.RLock()  # tracers change modules, and classes, while they look: two at once see each other's marks
WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}
WRITES |= {kind for kind in OutputKind if kind.name == "PARAMETER_MUTATION"}  # absent before torch 2.9


def capture(
    model: Callable[..., Any],
    example_input: Any,
    *,
    dynamic: Mapping[Any, Any] | None = None,
    frontend: str = "auto",
    eval_mode: bool = False,
    allow_nan: bool = False,
) -> Program:
    """Captures a model as a typed, functional graph.

    Args:
        model: an nn.Module, an ExportedProgram, TorchScript, or a function of tensors.
        example_input: a tensor, a tuple of positional arguments, a dict of keyword arguments, or
            `tsopt.example(*args, **kwargs)`. Shapes, dtypes and devices are those of the calls to come. A list of
            several: the sizes in which they differ may be others in each call.
        dynamic: the sizes that may differ from call to call, by input and axis: `{"x": {0: "batch"}}`, with a range
            `{"x": {0: "batch[1..32]"}}`. Of a range without an end, and of examples, the program promises nothing
            beyond what torch.export has found; `optimize` runs it at several sizes, and promises those.
        frontend: who reads the model. `export`: torch.export. `strict`: torch.export in strict mode, which reads numpy,
            and makes torch.compile forget what it has compiled in this process. `fx`: torch.fx, which takes everything
            that is no tensor as it is now. `torchscript`: torch.jit.script, whose branches and loops a program keeps.
            `auto`: torch.export, and TorchScript where values of tensors decide. What strict mode, torch.fx and
            TorchScript read is compared with the model, in calls one after the other, before it is taken.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: take weights that hold NaN.

    Raises:
        UsageError: there is no such front end.
        CaptureError: the model cannot be captured; the message says where and what to write instead. NotOneGraph, one
            of them, where the model itself runs.
    """
    if frontend not in FRONTENDS:
        raise UsageError(f"frontend={frontend!r}", fix=f"one of: {', '.join(FRONTENDS)}")
    examples = as_examples(example_input)
    if isinstance(model, ExportedProgram):
        if frontend in READERS:
            raise UsageError(
                f"frontend={frontend!r} of an exported program",
                why="torch.export has read it already",
                fix='frontend="auto"',
            )
        model = replayed(model)
        eval_mode = True
    check_model(model, allow_nan=allow_nan)
    for example in examples:
        check_inputs(model, example)
    if is_scripted(model):
        model = Scripted(model)
    wanted = _dynamic(model, examples, dynamic)
    example = examples[0] if wanted is None else wanted.trace
    training = isinstance(model, nn.Module) and any(module.training for module in model.modules())
    with TRACING, protected(model), quiet():
        if training and eval_mode:
            with training_flags(model, False):
                return _captured(model, example, wanted, frontend)
        program = _captured(model, example, wanted, frontend)
        if training:
            with training_flags(model, False):
                check_training(program, _captured(model, example, wanted, frontend))
        return program


def _captured(model: Callable[..., Any], example: Example, wanted: Dynamic | None, frontend: str) -> Program:
    """The program by the front end that is asked for, or by the first that can read the model."""
    if frontend in READERS and not isinstance(model, Scripted):
        return _read(model, example, wanted, frontend)
    try:
        return _capture(model, example, wanted)
    except DecidedByValues as error:
        if frontend != "auto" or isinstance(model, Scripted):
            raise
        try:
            program = _read(model, example, wanted, "torchscript")
        except CaptureError as failure:  # what counts is why the first one did not read it
            log.info("TorchScript does not read %s: %s", _model_name(model), failure)
            raise error from None
        because = "; ".join(filter(None, (error.what, error.where)))
        return replace(program, frontend=f"{program.frontend}, because without: {because}")


def _read(model: Callable[..., Any], example: Example, wanted: Dynamic | None, reader: str) -> Program:
    """The program by another front end, compared with the model."""
    with protected(model):  # whatever the reader leaves on the model must not be what it is compared with
        program = _capture(model, example, wanted, reader)
    # On other values the loops of a script may not come to an end, and there is nothing that it could have frozen.
    if not computes_the_same(program, model, example, on_others=reader != "torchscript"):
        raise NotOneGraph(
            f"{READERS[reader]} reads something else than the model",
            why="in calls one after the other, what it has read gives other results, or leaves other values behind",
            fix='frontend="auto"',
        )
    return replace(program, frontend=f"by {READERS[reader]}")


def _dynamic(model: Callable[..., Any], examples: Sequence[Example], given: Mapping[Any, Any] | None) -> Dynamic | None:
    """What is to be captured for more than one size; None for a program of one size."""
    if given is None and len(examples) == 1:
        return None
    axes = from_examples(examples) if len(examples) > 1 else {}
    if given is not None:
        _, outer = flatten((examples[0].args, examples[0].kwargs))
        for position, named in from_mapping(given, _input_names(model, outer), examples[0]).items():
            axes.setdefault(position, {}).update(named)
    return dynamic_of(examples, axes)


class _Flat(nn.Module):
    """Flat tensors in and out around the user's model, so that no nesting ever reaches torch.export."""

    def __init__(self, model: Callable[..., Any], outer: Structure, record: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model = _called_forward(model) if isinstance(model, FunctionType) else model
        self.outer = outer
        self.record = record  # a function: torch.export puts attributes that change back as they were

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self.outer, leaves)
        values, structure = flatten(self.model(*args, **kwargs), share=True)
        self.record(structure)
        return tuple(values)


def _called_forward(function: FunctionType) -> FunctionType:
    """The same function by another name: torch.export notes the places of frames that are called `forward` alone."""
    code = function.__code__.replace(co_name="forward")
    made = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _capture(model: Callable[..., Any], example: Example, wanted: Dynamic | None, reader: str = "export") -> Program:
    leaves, outer = flatten((example.args, example.kwargs))
    names = _input_names(model, outer)
    # Detached, and apart from the user's tensors: nothing that tracing does may reach them.
    inputs = tuple(leaf.detach().clone() for leaf in leaves)
    results: list[Structure] = []
    shapes = None if wanted is None else (shapes_of(wanted, inputs),)
    try:
        called = model
        if reader == "strict":
            called = strictly(model, example, fixed=wanted is None)
        elif reader == "torchscript":
            called = Scripted(by_torchscript(model))
        flat: nn.Module = _Flat(called, outer, lambda structure: results.append(structure))
        flat.training = False
        if reader == "fx":
            flat = by_fx(flat, len(inputs))
        exported = torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=False)
        if _needs_functionalization(exported):
            exported = exported.run_decompositions(_secret_writers(exported))
    except NotOneGraph as error:
        raise failure_of_the_model(model, example, error) or error from error
    except Exception as error:
        raise explain(error, model, example) from error
    result = results[-1]
    check_result(result)
    if wanted is None:
        return _lower(exported, names, outer, result, _model_name(model))
    symbols = symbols_of(exported, wanted, names)
    return with_dims(_lower(exported, names, outer, result, _model_name(model)), symbols)


def _needs_functionalization(exported: ExportedProgram) -> bool:
    return any(
        ops.is_call(node) and (ops.writes(node.target) or not _known(node) or ops.writes_in_secret(node))
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
    labels = dict(result.paths())
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
        if is_settled(node):  # a condition on sizes: the Dims say it
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
            if any(is_of_values(size) for size in tensor.shape):
                raise size_of_values(ops.name_of(node), origin_of(made) or None)
        self.mapping[node] = made

    def _control(self, node: fx.Node) -> fx.Node:
        """A call of control flow, with the constants of its branches as operands."""
        if any(not isinstance(size, int) for t in self._tensors() for size in t.shape):
            raise NotOneGraph(
                f"{ops.name_of(node)} in a program for many sizes",
                where=origin_of_meta(node.meta) or None,
                why="the programs within are made for one size",
                fix="leave dynamic out: each size is captured when it is called",
            )
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
        """The fake value of a call: as recorded, or worked out anew where that, or what comes before, is mistaken."""
        recorded = node.meta.get("val")
        mistaken = ops.is_overload(node.target) and ops.name_of(node).removeprefix("aten.") in MISTAKEN
        tensors = ops.tensors_of(recorded)
        if not tensors or not (mistaken or any(source in self.mended for source in node.all_input_nodes)):
            return recorded
        given: Any = fx.node.map_arg((made.args, dict(made.kwargs)), lambda value: value.meta["val"])
        (args, kwargs), target = given, cast(Any, made.target)
        if target is operator.getitem:
            value: Any = target(*args)
        else:
            with fakes(tensors[0].fake_mode):
                value = target(*args, **kwargs)
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
    if isinstance(node.meta.get("val"), SYMBOLIC) and not is_of_values(node.meta["val"]):
        return NotOneGraph(
            f"a number is computed from sizes in a way that a Program does not know ({name})",
            where=where,
            why="a program computes with sizes by arithmetic, min and max",
            fix="leave dynamic out: each size is captured when it is called",
        )
    return NotOneGraph(
        f"a Python number that is computed from values of a tensor is used ({name})",
        where=where,
        why="a program computes with tensors",
        fix="keep it a tensor: x * scale with scale = t.max() instead of t.max().item()",
    )


def _traced_type(node: fx.Node) -> TensorType:
    found = TensorType.of(node.meta["val"])
    return replace(found, shape=tuple(map(hinted, found.shape)), stride=tuple(map(hinted, found.stride)))


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
