"""Which value of the program each node of an exported model computes. In the file, its module path is what is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.onnx.ops import symbolic

from tsopt.compiler.graph.control import Control
from tsopt.compiler.graph.program import Program

NAMESPACE = "namespace"  # of a node's metadata: what viewers of ONNX files group nodes by
VALUE = "value"  # of what is known of a node beside the file
_SCOPES = "pkg.torch.onnx.name_scopes"


def with_places(exported: ExportedProgram, program: Program) -> ExportedProgram:
    """Notes on the calls of an exported program, which was made from this one, the values they stand for; in place.

    The exporter takes a module path from call to node, through decompositions and rewrites: here that is a number.
    """
    calls = calls_of(program)
    left = iter(enumerate(calls))
    number, wanted = next(left, (-1, None))
    for node in exported.graph.nodes:
        if node.op == "call_function":
            node.meta.pop("nn_module_stack", None)
            # Checks may have been added, and sizes be asked for; apart from these it is call by call the same.
            if wanted is not None and _is_same(node.target, wanted.target):
                node.meta["nn_module_stack"] = {str(number): (str(number), "")}
                number, wanted = next(left, (-1, None))
    if wanted is not None:  # not call by call: then nothing is known
        for node in exported.graph.nodes:
            node.meta.pop("nn_module_stack", None)
    return exported


def take_places(model: Any, program: Program) -> None:
    """Replaces what the exporter says of each node by its module path, and notes the value beside the file.

    Args:
        model: exported from `with_places(...)` of the program.
    """
    calls = calls_of(program)
    for node in model.graph.all_nodes():
        value = called_for(node, calls)
        node.metadata_props.clear()
        if value is not None:
            node.meta[VALUE] = value
            if path := value.meta.get("module"):
                node.metadata_props[NAMESPACE] = path.replace(".", "/")


def called_for(node: Any, calls: Sequence[fx.Node]) -> fx.Node | None:
    """The one of `calls_of(program)` that the exporter has made a node of, until `take_places`; None if not known."""
    number = _number(node.metadata_props.get(_SCOPES, ""))
    return calls[number] if number is not None and number < len(calls) else None


def calls_of(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def values_of(nodes: Iterable[Any]) -> tuple[fx.Node, ...]:
    """The values of the program that nodes of a model compute."""
    return tuple(dict.fromkeys(node.meta[VALUE] for node in nodes if VALUE in node.meta))


def with_unknown_ones(
    found: Sequence[tuple[fx.Node, ...]], readers: Sequence[Iterable[int]]
) -> list[tuple[fx.Node, ...]]:
    """The values of kernels, those of unknown kernels too: such a kernel belongs to the ones that read its results.

    Args:
        found: the values that each kernel computes, in the order of execution; empty where that is not known.
        readers: the kernels that read the results of each, by position.
    """
    known = list(found)
    for place in reversed(range(len(known))):
        if not known[place]:
            read_by = {known[reader] for reader in readers[place] if known[reader]}
            known[place] = read_by.pop() if len(read_by) == 1 else ()
    return known


def _is_same(exported: Any, target: Any) -> bool:
    """Whether an exported call is one of this target; an operator of the runtime has become an op."""
    if isinstance(target, Control):
        return isinstance(exported, HigherOrderOperator)
    return exported == target or (target is symbolic and getattr(exported, "namespace", "") == "onnx_symbolic")


def _number(scopes: str) -> int | None:
    """The first of the names in `['12', 'conv2d']`, if it is a number."""
    first = scopes.strip("[]").partition(",")[0].strip("'\" ")
    return int(first) if first.isdecimal() else None
