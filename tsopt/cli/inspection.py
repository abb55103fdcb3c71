"""Rendering for `tsopt inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tsopt.compiler.pipeline import PassRecord
from tsopt.compiler.program import Program
from tsopt.runtime.report import PASS_COLUMNS, pass_cells, pass_json


def show_texts(
    out: Any, captured: str, records: Sequence[PassRecord], *, diff: bool, differ: Callable[..., Iterable[str]]
) -> None:
    """The program as captured, then after each pass that changed it; with `diff` only the lines that changed."""
    if not diff:
        out.say(captured)
    before = captured
    for record in records:
        if not record.changed:
            continue
        out.say(f"after {record.name}: {record.nodes_before} -> {record.nodes_after} nodes")
        if diff:
            lines = differ(before.splitlines(), record.text.splitlines(), lineterm="", n=1)
            out.say("\n".join(line for line in lines if not line.startswith(("---", "+++"))))
        else:
            out.say(record.text)
        before = record.text


def show_passes(out: Any, records: Sequence[PassRecord]) -> None:
    """A row for each pass, then every near miss with its reason."""
    out.table(PASS_COLUMNS, pass_cells(records))
    declined = [(d.rule, d.where, d.reason) for record in records for d in record.declined]
    if declined:
        out.say("\nnearly:")
        for row in dict.fromkeys(declined):
            out.say(f"  {row[0]} at {row[1] or '?'}: {row[2]}")


def show_why(out: Any, records: Sequence[PassRecord], name: str) -> None:
    """Where a rule (or all rules of a pass) was applied, and where it was not, and why."""
    done = [(r.name, d) for r in records for d in r.done if name in (r.name, d.rule)]
    declined = list(dict.fromkeys((r.name, d) for r in records for d in r.declined if name in (r.name, d.rule)))
    out.say(f"{name}: applied {len(done)} times, declined {len(declined)} times")
    for place, item in done:
        out.say(f"  done in {place}: {item.rule} at {item.where or '?'}")
    for place, miss in declined:
        out.say(f"  declined in {place}: {miss.rule} at {miss.where or '?'}: {miss.reason}")


def to_json(program: Program, records: Sequence[PassRecord]) -> dict[str, Any]:
    return {"captured": program.text, "passes": [pass_json(record) | {"text": record.text} for record in records]}
