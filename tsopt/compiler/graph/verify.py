"""Checks the invariants of a Program, re-deriving all types. An error cites the invariant and shows the lines."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer_type
from tsopt.compiler.graph.program import Program, format_type, type_of
from tsopt.errors import InvalidProgram

AliasGroups = frozenset[tuple[int, object]]


def verify_program(
    program: Program, *, touched: Iterable[fx.Node] | None = None, aliases: AliasGroups | None = None
) -> None:
    """Checks the invariants.

    Args:
        touched: the calls whose types are re-derived; all of them when None.
        aliases: what the outputs were allowed to share before (`output_aliases` of the original).

    Raises:
        InvalidProgram: naming the invariant, with the lines around the fault.
    """
    _check_nodes(program)
    _check_weights(program)
    _check_inputs(program)
    _check_types(program, program.calls() if touched is None else touched)
    _check_outputs(program)
    if aliases is not None:
        _check_aliases(program, aliases)


def _check_nodes(program: Program) -> None:
    seen: set[fx.Node] = set()
    last = program.output_node
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise _fault(program, node, 1, f"unexpected {node.op} node")
        if (node.op == "output") != (node is last):
            raise _fault(program, node, 1, "the output is not the last node")
        for source in node.all_input_nodes:
            if source not in seen:
                raise _fault(program, node, 1, f"it uses {source.name}, which is not defined before it")
        seen.add(node)
        if not ops.is_call(node):
            continue
        blocks = ops.blocks_of(node)
        for block in blocks:
            _check_block(block)
        known = blocks or ops.is_overload(node.target) or node.target is operator.getitem or ops.is_number(node)
        if not known:
            raise _fault(program, node, 2, f"a call to {node.target}, which is not an ATen overload")
        if ops.writes(node.target):
            raise _fault(program, node, 2, "it writes to one of its arguments")


def _check_block(block: Program) -> None:
    """A nested program: like any other, but without weights, and with outputs that do not share memory."""
    verify_program(block)
    if block.used_weights() or output_aliases(block):
        raise InvalidProgram(
            "invariant 2: a nested program has weights, or outputs that share memory", where=block.name
        )


def _check_types(program: Program, nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        try:
            derived = infer_type(program, node)
        except ops.UNDECIDED:
            continue  # the type is known only from capture
        except Exception as error:  # whatever the op raises is the finding
            raise _fault(program, node, 3, f"the call is invalid: {str(error)[:200]}") from error
        recorded = type_of(node)
        if not _same(recorded, derived):
            raise _fault(program, node, 3, f"recorded as {format_type(recorded)}, but computes {format_type(derived)}")


def _same(a: object, b: object) -> bool:
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        return a.matches(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(x.matches(y) for x, y in zip(a, b, strict=True))
    return a is None and b is None


def _check_weights(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op != "get_attr":
            continue
        weight = program.weights.get(str(node.target))
        if weight is None:
            raise _fault(program, node, 4, "there is no weight with this name")
        if not _same(type_of(node), TensorType.of(weight)):
            raise _fault(program, node, 4, f"the weight is {TensorType.of(weight)}")


def _check_inputs(program: Program) -> None:
    found = [type_of(node) for node in program.graph.nodes if node.op == "placeholder"]
    wanted = [item.type for item in program.signature.inputs]
    if len(found) != len(wanted) or not all(_same(a, b) for a, b in zip(found, wanted, strict=True)):
        raise InvalidProgram("invariant 5: the inputs do not match the signature", where=program.name)


def _check_outputs(program: Program) -> None:
    values = program.output_node.args[0]
    wanted = program.signature.outputs
    if not isinstance(values, tuple) or len(values) != len(wanted):
        raise _fault(program, program.output_node, 6, f"expected {len(wanted)} outputs")
    for value, item in zip(values, wanted, strict=True):
        if not isinstance(value, fx.Node) or not _same(type_of(value), item.type):
            found = format_type(type_of(value)) if isinstance(value, fx.Node) else repr(value)
            raise _fault(program, program.output_node, 6, f"output {item.name} is {found}, expected {item.type}")


def output_aliases(program: Program) -> AliasGroups:
    """Which outputs may share memory, with what: pairs (output position, name of the shared memory).

    An input or a weight is named by itself; memory shared by several outputs by the lowest of them.
    """
    roots = ops.storage_roots(program.graph.nodes)
    first: dict[object, int] = {}
    found: set[tuple[int, object]] = set()
    for position, value in enumerate(program.outputs):
        for root in roots[value]:
            source = root[0]
            if source.op in ("placeholder", "get_attr"):
                found.add((position, (source.op, str(source.target))))
            elif first.setdefault(root, position) != position:
                found.add((position, first[root]))
    return frozenset(found)


def _check_aliases(program: Program, allowed: AliasGroups) -> None:
    new = output_aliases(program) - allowed
    if new:
        position, source = min(new, key=str)
        name = program.signature.outputs[position].name
        raise _fault(program, program.output_node, 7, f"output {name} now shares memory with {source}")


def _fault(program: Program, node: fx.Node, number: int, what: str) -> InvalidProgram:
    nodes = list(program.graph.nodes)
    at = nodes.index(node)
    lines = list(program.lines()) if at >= 0 else []
    around = [("> " if i == at else "  ") + lines[i] for i in range(max(0, at - 5), min(len(lines), at + 6))]
    return InvalidProgram(f"invariant {number}: {what}", where=f"{program.name}\n" + "\n".join(around))
