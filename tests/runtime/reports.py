"""Reports to render: a race of four rows, and records of passes."""

from __future__ import annotations

from dataclasses import replace

from tests.runtime.helpers import report
from tsopt.compiler.rewriting.pass_base import Declined, Done
from tsopt.compiler.rewriting.pipeline import PassRecord, Size
from tsopt.runtime.checking.verdict import Verdict
from tsopt.runtime.racing.row import Row
from tsopt.runtime.racing.speedup import Speedup, Timing
from tsopt.runtime.racing.timing import ColdStart

BASE = Row("eager", timing=Timing((2.0, 2.0, 4.0)))
GOOD = Row(
    "ONNX Runtime",
    key="onnxruntime",
    timing=Timing((1.0, 1.0, 1.2)),
    speedup=Speedup(2.0, 1.8, 2.2),
    accuracy=Verdict(
        True,
        "element",
        3e-7,
        ("example", "random"),
        ("large: eager raises ValueError",),
        differences=(1e-7, 3e-7),
        sizes=(2.0, 1.5),
    ),
    compile_seconds=1.25,
    cold=ColdStart(9.0, 2),
    notes=("takes negative indices",),
)
WRONG = Row("TorchScript", "wrong", "output on the large input: NaN at other places than eager", key="torchscript")
GONE = Row("eager + passes", "unsupported", "no float8 (fc1, model.py:12)", key="eager")
FULL = replace(report(), rows=(BASE, GOOD, WRONG, GONE), winner_key="onnxruntime", why="2.00x as fast")


BEFORE, AFTER = Size(9, 1000, 64), Size(7, 1500, 32)


def record(name, done="", declined="", before=BEFORE, after=AFTER):
    """done: rules, by spaces; declined: `rule:reason`."""
    near = [item.split(":") for item in declined.split()]
    return PassRecord(
        name,
        bool(done),
        before,
        after,
        0.25,
        tuple(Done(rule, f"place {i}") for i, rule in enumerate(done.split())),
        tuple(Declined(rule, f"place {i}", reason) for i, (rule, reason) in enumerate(near)),
    )
