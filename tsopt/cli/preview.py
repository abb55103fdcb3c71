"""`tsopt export --dry-run`: what would be raced, and what could not be; nothing is timed or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tsopt.compiler.ops import is_number, name_of
from tsopt.compiler.program import Program, origin_of
from tsopt.errors import BackendError
from tsopt.runtime.backend import get_backend, split_spec

if TYPE_CHECKING:
    from tsopt.compiler.example import Example

THROUGH_ONNX = ("onnxruntime", "openvino")


@dataclass(frozen=True, slots=True)
class Taker:
    """A backend, and whether it would take the program; where it would not, why and for which place."""

    backend: str
    takes: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of a model before a race.

    ops: name, number of calls, place of the first, after the passes.
    dims: the sizes that may differ from call to call, as captured: which of them hold is found out by running.
    """

    model: str
    nodes: tuple[int, int]
    dims: tuple[str, ...]
    ops: tuple[tuple[str, int, str], ...]
    backends: tuple[Taker, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"frontend": "one graph"}


def preview(captured: Program, optimized: Program, backends: Iterable[str]) -> Preview:
    """Looks at a program before and after the passes; every file that would be raced through ONNX is made once."""
    calls = [node for node in optimized.calls() if not is_number(node)]
    counts = Counter(map(name_of, calls))
    places = {name_of(node): origin_of(node) for node in reversed(calls)}
    names = dict.fromkeys(split_spec(name)[0] for name in backends)
    return Preview(
        captured.name,
        (captured.node_count, optimized.node_count),
        tuple(map(str, captured.signature.dims)),
        tuple((name, count, places[name]) for name, count in counts.most_common() if name != "getitem"),
        tuple(_taker(name, optimized) for name in names),
    )


def _taker(name: str, program: Program) -> Taker:
    try:
        refused = get_backend(name).unsupported(program)
        if refused:
            return Taker(name, False, f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}")
        if name in THROUGH_ONNX:
            from tsopt.runtime.onnx_export import to_onnx

            to_onnx(program)
    except BackendError as error:
        return Taker(name, False, "; ".join(filter(None, (error.what, error.where, error.why))))
    return Taker(name, True)


def backends_of(example: Example, options: dict[str, Any]) -> tuple[str, ...]:
    """Who would race, by the options of `optimize`."""
    from tsopt.runtime.race import backends_for

    return backends_for(example, options.get("backends"), options["precision"])


def show(out: Any, found: Preview) -> None:
    """Tables of ops and of backends."""
    out.json(found.to_json())
    out.say(f"{found.model}: captured as one graph, {found.nodes[0]} op nodes, {found.nodes[1]} after the passes")
    for dim in found.dims:
        out.say(f"size {dim}")
    out.say()
    out.table(("op", "calls", "first"), [(name, str(count), place) for name, count, place in found.ops])
    out.say()
    rows = [(item.backend, "yes" if item.takes else "no", item.why) for item in found.backends]
    out.table(("backend", "takes it", "why not"), rows)
    out.say("\nnothing was timed or written; without --dry-run they race, and the winner is saved")
