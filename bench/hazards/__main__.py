"""Usage: python -m bench.hazards [FAMILY ...] [--before FILE]; writes bench/results/hazards.{json,md}.

A process for each case and backend; one that does not answer within two minutes counts as wrong. `--before` takes the
JSON of an earlier version, run with its package on the path, for a column beside today's; `--page` measures nothing and
writes the table of what was measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.hazards import FAMILIES, Case
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.racing.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "hazards.json"
KINDS = ("right", "refused", "noted", "wrong")
PATIENCE = 120.0  # seconds for one case by one backend

Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    known: Rows = json.loads(asked.output.read_text())["cases"] if asked.output.exists() else []
    families = [] if asked.page else asked.families
    rows = [row for row in known if row["family"] in FAMILIES and row["family"] not in families]
    to_onnx(tsopt.capture(torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)))  # imports what each case would import
    for family in families:
        rows += outcomes_of(family)
    rows.sort(key=lambda row: list(FAMILIES).index(row["family"]))
    asked.output.write_text(json.dumps({"environment": environment().to_json(), "cases": rows}, indent=1) + "\n")
    before = json.loads(asked.before.read_text())["cases"] if asked.before else None
    asked.output.with_suffix(".md").write_text("\n".join(page(rows, before)) + "\n")


def outcomes_of(family: str) -> Rows:
    """What becomes of all cases of a family, each in a process that may crash or hang."""
    cases: tuple[Case, ...] = importlib.import_module(f"bench.hazards.{family}").CASES
    rows: Rows = []
    for number, case in enumerate(cases):
        for backend in case.backends:
            kind, why = _apart(family, number, backend)
            rows.append({"family": family, "case": case.name, "backend": backend, "kind": kind, "why": why})
            print(f"{family:12} {case.name:50.50} {backend:12} {kind:8} {why[:100]}", flush=True)
    return rows


def _apart(family: str, number: int, backend: str) -> tuple[str, str]:
    """One case in a fork of this process, which has imported all that it needs."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, family, number, backend), daemon=False)
    process.start()
    theirs.close()
    try:
        if not mine.poll(PATIENCE):
            return "wrong", f"no answer in {PATIENCE:.0f} s"
        kind, why = mine.recv()
        return kind, why
    except EOFError:
        process.join(10)
        return "wrong", f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _answer(connection: Any, family: str, number: int, backend: str) -> None:
    case: Case = importlib.import_module(f"bench.hazards.{family}").CASES[number]
    found = case.outcome(backend)
    connection.send((found.kind, found.why))


def page(rows: Rows, before: Rows | None) -> list[str]:
    """The table: a row for each family and backend, then every case that is not right."""
    earlier = {(row["family"], row["case"], row["backend"]): row for row in before or ()}
    head = ("family", "backend", "cases", *KINDS, *(("wrong before",) if before is not None else ()))
    lines = [
        "What optimizers get wrong in silence, tried on purpose; the cases are in `bench/hazards/`. `refused`: an",
        "error or a reason that names the cause. `noted`: other than eager, and the report says so. `wrong`: neither.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        of_family = [row for row in rows if row["family"] == family]
        for backend in dict.fromkeys(row["backend"] for row in of_family):
            mine = [row for row in of_family if row["backend"] == backend]
            count = Counter(row["kind"] for row in mine)
            then = [earlier.get((family, row["case"], backend), {}).get("kind") for row in mine]
            cells = [FAMILIES[family], backend, len(mine), *(count[kind] for kind in KINDS)]
            cells += [then.count("wrong")] if before is not None else []
            lines.append(f"| {' | '.join(map(str, cells))} |")
    total = Counter(row["kind"] for row in rows)
    lines += ["", f"In all {len(rows)}: " + ", ".join(f"{total[kind]} {kind}" for kind in KINDS) + "."]
    lines += ["", "| case | backend | today | why |" + (" before |" if before is not None else "")]
    lines += ["|---|---|---|---|" + ("---|" if before is not None else "")]
    for row in rows:
        then = earlier.get((row["family"], row["case"], row["backend"]), {})
        if row["kind"] == "right" and then.get("kind", "right") == "right":
            continue
        cells = [row["case"], row["backend"], row["kind"], row["why"]]
        cells += [then.get("kind", "")] if before is not None else []
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return lines


if __name__ == "__main__":
    main()
