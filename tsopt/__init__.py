"""tsopt: turns a PyTorch model into the fastest verified form that this machine can run, in one call.

>>> import torch, tsopt
>>> fast = tsopt.optimize(torch.nn.Linear(4, 2).eval(), torch.randn(1, 4), seconds=0.1)
>>> fast(torch.randn(1, 4)).shape
torch.Size([1, 2])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tsopt._version import __version__

if TYPE_CHECKING:
    from tsopt.api import compile, optimize
    from tsopt.compiler.calls.example import Example, example
    from tsopt.compiler.capture.capture import capture
    from tsopt.compiler.graph.program import Numerics, Program
    from tsopt.compiler.rewriting.pass_base import Repeat
    from tsopt.compiler.rewriting.rewrite import Rule, RulePass, rule
    from tsopt.errors import (
        AccuracyError,
        BackendError,
        BundleError,
        CaptureError,
        DataDependentError,
        GraphBreakError,
        InvalidProgram,
        NoGain,
        NotReady,
        PassError,
        RuleError,
        SignatureError,
        TsoptError,
        UsageError,
        WeightsChangedError,
    )
    from tsopt.hybrid import hybridize, report, wait
    from tsopt.passes import STANDARD
    from tsopt.regression.baseline import Baseline
    from tsopt.regression.check import check
    from tsopt.regression.outcome import Check
    from tsopt.runtime.bundles.store import load
    from tsopt.runtime.calling.executable import Executable
    from tsopt.runtime.calling.fallback import InEager
    from tsopt.runtime.calling.optimized import Optimized
    from tsopt.runtime.calling.partitioned import Partitioned
    from tsopt.runtime.checking.accuracy import verify
    from tsopt.runtime.racing.race import benchmark
    from tsopt.runtime.report import Report
    from tsopt.sweeps import Sweep, sweep
    from tsopt.transforms import transform

# name -> the module that defines it, imported at first use: `import tsopt` must not import torch.
_PLACES = {
    "capture": "tsopt.compiler.capture.capture",
    "Example": "tsopt.compiler.calls.example",
    "example": "tsopt.compiler.calls.example",
    "Repeat": "tsopt.compiler.rewriting.pass_base",
    "Numerics": "tsopt.compiler.graph.program",
    "Program": "tsopt.compiler.graph.program",
    "Rule": "tsopt.compiler.rewriting.rewrite",
    "RulePass": "tsopt.compiler.rewriting.rewrite",
    "rule": "tsopt.compiler.rewriting.rewrite",
    "AccuracyError": "tsopt.errors",
    "BundleError": "tsopt.errors",
    "BackendError": "tsopt.errors",
    "CaptureError": "tsopt.errors",
    "DataDependentError": "tsopt.errors",
    "InvalidProgram": "tsopt.errors",
    "NoGain": "tsopt.errors",
    "GraphBreakError": "tsopt.errors",
    "NotReady": "tsopt.errors",
    "PassError": "tsopt.errors",
    "RuleError": "tsopt.errors",
    "SignatureError": "tsopt.errors",
    "TsoptError": "tsopt.errors",
    "UsageError": "tsopt.errors",
    "WeightsChangedError": "tsopt.errors",
    "Baseline": "tsopt.regression.baseline",
    "check": "tsopt.regression.check",
    "Check": "tsopt.regression.outcome",
    "hybridize": "tsopt.hybrid",
    "report": "tsopt.hybrid",
    "wait": "tsopt.hybrid",
    "optimize": "tsopt.api",
    "transform": "tsopt.transforms",
    "STANDARD": "tsopt.passes",
    "verify": "tsopt.runtime.checking.accuracy",
    "load": "tsopt.runtime.bundles.store",
    "Executable": "tsopt.runtime.calling.executable",
    "compile": "tsopt.api",
    "Optimized": "tsopt.runtime.calling.optimized",
    "InEager": "tsopt.runtime.calling.fallback",
    "Partitioned": "tsopt.runtime.calling.partitioned",
    "benchmark": "tsopt.runtime.racing.race",
    "Report": "tsopt.runtime.report",
    "Sweep": "tsopt.sweeps",
    "sweep": "tsopt.sweeps",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'tsopt' has no attribute {name!r}")
    found = getattr(importlib.import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*_PLACES, "__version__"])


__all__ = [
    "STANDARD",
    "AccuracyError",
    "BackendError",
    "Baseline",
    "BundleError",
    "CaptureError",
    "Check",
    "DataDependentError",
    "Example",
    "Executable",
    "GraphBreakError",
    "InEager",
    "InvalidProgram",
    "NoGain",
    "NotReady",
    "Numerics",
    "Optimized",
    "Partitioned",
    "PassError",
    "Program",
    "Repeat",
    "Report",
    "Rule",
    "RuleError",
    "RulePass",
    "SignatureError",
    "Sweep",
    "TsoptError",
    "UsageError",
    "WeightsChangedError",
    "__version__",
    "benchmark",
    "capture",
    "check",
    "compile",
    "example",
    "hybridize",
    "load",
    "optimize",
    "report",
    "rule",
    "sweep",
    "transform",
    "verify",
    "wait",
]
