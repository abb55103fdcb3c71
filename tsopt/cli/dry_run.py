"""`tsopt export --dry-run`: what would be raced, and what could not be; nothing is timed or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli.console import Output
from tsopt.cli.model_sources import load_subject
from tsopt.cli.options import Subject, Timing, capture_options, race_options
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.ops import is_number, name_of
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.errors import BackendError, GraphBreakError
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import info_of

if TYPE_CHECKING:
    from tsopt.compiler.calls.example import Example
    from tsopt.compiler.capture.graph_breaks import Part


@dataclass(frozen=True, slots=True)
class Taker:
    """A backend, and whether it would take the program; where it would not, why and for which place."""

    backend: str
    takes: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of a model before a race.

    frontend: who has read the model.
    ops: name, number of calls, place of the first, after the passes.
    dims: the sizes that may differ from call to call, as captured: which of them hold is found out by running.
    conditions: what else these sizes have to satisfy.
    """

    model: str
    frontend: str
    nodes: tuple[int, int]
    dims: tuple[str, ...]
    conditions: tuple[str, ...]
    ops: tuple[tuple[str, int, str], ...]
    backends: tuple[Taker, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(out: Output, subject: Subject, timing: Timing) -> None:
    """The command: captures, transforms, asks the backends, and shows it."""
    with out.progress(Path(subject.model).name) as tell:
        found = _look(out, subject, timing, tell)
    if isinstance(found, Partitions):
        show_partitions(out, found)
        raise found.error  # as the export would: no file can hold it
    show(out, found)


def _look(out: Output, subject: Subject, timing: Timing, tell: Callable[[str], None]) -> Preview | Partitions:
    loaded = load_subject(out, subject)
    from tsopt.api import who_races
    from tsopt.compiler.calls.example import as_examples
    from tsopt.compiler.capture.capture import capture
    from tsopt.transforms import transform

    options = race_options(subject, timing)
    first, *_ = as_examples(loaded.example_input)
    racing = who_races(
        *(first, options.get("backends"), options["precision"], subject.level),
        calibrated=bool(timing.calibration),
        keep_float=bool(timing.keep_float),
    )
    tell("capture")
    try:
        captured = capture(loaded.model, loaded.example_input, **capture_options(subject))
    except GraphBreakError as error:
        if subject.frontend != "auto":
            raise
        tell("graph breaks")
        return Partitions.of(loaded.model, first, error)
    tell("passes")
    optimized = transform(captured, level=subject.level, without=subject.without or ())
    tell("backends")
    return preview(captured, optimized, racing)


@dataclass(frozen=True, slots=True)
class Partitions:
    """A model that is not one graph: its parts, and why it is not one graph."""

    model: str
    parts: tuple[Part, ...]
    error: GraphBreakError

    @classmethod
    def of(cls, model: Any, example: Example, error: GraphBreakError) -> Partitions:
        """Raises CaptureError: dynamo fails on the model as well."""
        from tsopt.compiler.capture.graph_breaks import parts_of_model

        return cls(getattr(model, "__name__", type(model).__name__), parts_of_model(model, example), error)


def show_partitions(out: Output, found: Partitions) -> None:
    """A row for each part, with the place where it ends."""
    if out.as_json:
        return  # the error is the one value on stdout
    out.say(f"{found.model} is not one graph; TorchDynamo splits it into {len(found.parts)} parts:\n")
    rows = [(str(n), str(part.ops), part.ends_at or "-", part.why) for n, part in enumerate(found.parts, 1)]
    out.table(("part", "ops", "graph break at", "because"), rows)
    out.say(
        "\n`tsopt.optimize` and `tsopt bench` run it partitioned, with Python between the parts; "
        "a partitioned model cannot be saved\n"
    )


def preview(captured: Program, optimized: Program, racing: Iterable[Candidate]) -> Preview:
    """Looks at a program before and after the passes; every file that would be raced through ONNX is made once."""
    calls = [node for node in all_calls(optimized) if not is_number(node)]
    counts = Counter(map(name_of, calls))
    places = {name_of(node): origin_of(node) for node in reversed(calls)}
    names = dict.fromkeys(candidate.backend for candidate in racing)
    return Preview(
        captured.name,
        captured.frontend or "by torch.export",
        (captured.node_count, optimized.node_count),
        tuple(map(str, captured.signature.dims)),
        tuple(map(str, captured.signature.decisive)),
        tuple((name, count, places[name]) for name, count in counts.most_common() if name != "getitem"),
        tuple(_taker(name, optimized) for name in names),
    )


def _taker(name: str, program: Program) -> Taker:
    try:
        refused = get_backend(name).unsupported(program)
        if refused:
            return Taker(name, False, f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}")
        if info_of(name).through_onnx:
            from tsopt.runtime.onnx.export import to_onnx

            to_onnx(program)
    except BackendError as error:
        return Taker(name, False, "; ".join(filter(None, (error.what, error.where, error.why))))
    return Taker(name, True)


def show(out: Output, found: Preview) -> None:
    """Tables of ops and of backends."""
    out.json(found.to_json())
    out.say(f"{found.model}: {found.nodes[0]} op nodes, {found.nodes[1]} after the passes; captured {found.frontend}")
    for dim in found.dims:
        out.say(f"size {dim}")
    for condition in found.conditions:
        out.say(f"only where {condition}")
    out.say()
    out.table(("op", "calls", "first"), [(name, str(count), place) for name, count, place in found.ops])
    out.say()
    rows = [(item.backend, "yes" if item.takes else "no", item.why) for item in found.backends]
    out.table(("backend", "supported", "because"), rows)
    out.say("\nnothing was timed or written; without --dry-run, the candidates race and the winner is saved")
