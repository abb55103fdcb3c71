"""What a picture of a program shows: its calls, what each of them reads, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.origin import origins_of, rule_of
from tsopt.compiler.graph.program import Program, format_type, type_of

INPUT, OUTPUT = "input", "output"
KEPT, GONE, MADE = "kept", "gone", "made"
ORIGINS = 4  # of a value that stands for many, so many are named


@dataclass(frozen=True, slots=True)
class Drawn:
    """A call, an input or the output of a program.

    Attributes:
        name: as in `tsopt inspect`, without the percent sign.
        op: `aten.linear`, for example, or INPUT or OUTPUT.
        type: of its value, as text; empty for the output.
        module: the path of the module that the call belongs to.
        origins: module paths and source lines of what it stands for.
        rule: that made it; empty as captured.
        weights: the names of those that it reads.
        reads: the positions in the drawing of the other values that it reads, each once.
        ms: milliseconds of a call that an engine spends on it; 0 where that is not known.
    """

    name: str
    op: str
    type: str = ""
    module: str = ""
    origins: tuple[str, ...] = ()
    rule: str = ""
    weights: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    ms: float = 0.0


def drawing_of(program: Program, times: Mapping[str, float] = MappingProxyType({})) -> tuple[Drawn, ...]:
    """The inputs, calls and output of a program, in its order.

    Args:
        times: milliseconds by the name of a node.
    """
    names = {node: name.removeprefix("%") for node, name in Labels().of(program).items()}
    places: dict[fx.Node, int] = {}
    found: list[Drawn] = []
    for node in program.graph.nodes:
        if node.op == "get_attr":
            continue
        places[node] = len(found)
        reads = tuple(places[source] for source in node.all_input_nodes if source in places)
        if node.op == "output":
            found.append(Drawn(OUTPUT, OUTPUT, reads=reads))
            continue
        is_call = ops.is_call(node)
        origins = origins_of(node)
        more = (f"and {len(origins) - ORIGINS} more",) if len(origins) > ORIGINS else ()
        found.append(
            Drawn(
                name=names[node],
                op=ops.name_of(node) if is_call else INPUT,
                type="int" if ops.is_number(node) else format_type(type_of(node)),
                module=str(node.meta.get("module") or "") if is_call else "",
                origins=(*origins[:ORIGINS], *more),
                rule=rule_of(node),
                weights=tuple(names[source] for source in node.all_input_nodes if source.op == "get_attr"),
                reads=reads,
                ms=times.get(node.name, 0.0),
            )
        )
    return tuple(found)


def states_of(before: Sequence[Drawn], after: Sequence[Drawn]) -> tuple[list[str], list[str]]:
    """What became of each value of a program: KEPT or GONE before the passes, KEPT or MADE, by a rule, after them.

    What a rule has made may have the name of what it replaced.
    """
    left = {item.name for item in after if not item.rule}
    return (
        [KEPT if item.name in left else GONE for item in before],
        [MADE if item.rule else KEPT for item in after],
    )
