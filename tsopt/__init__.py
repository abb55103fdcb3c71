"""tsopt: the fastest verified form of a PyTorch model that this machine can run, with one call.

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
    from tsopt.api import compile, optimize, transform
    from tsopt.compiler.capture import capture
    from tsopt.compiler.example import Example, example
    from tsopt.compiler.pipeline import Repeat
    from tsopt.compiler.program import Numerics, Program
    from tsopt.compiler.rewrite import Rule, RulePass, rule
    from tsopt.errors import (
        AccuracyError,
        ArtifactError,
        BackendError,
        CaptureError,
        DecidedByValues,
        InvalidProgram,
        NoGain,
        NotOneGraph,
        NotReady,
        PassError,
        RuleError,
        SignatureError,
        TsoptError,
        UsageError,
        WeightsChangedError,
    )
    from tsopt.hybrid import hybridize, wait
    from tsopt.passes import STANDARD
    from tsopt.runtime.accuracy import verify
    from tsopt.runtime.artifact import load
    from tsopt.runtime.dispatch import Optimized
    from tsopt.runtime.executable import Executable
    from tsopt.runtime.fallback import InEager
    from tsopt.runtime.parts import InParts
    from tsopt.runtime.race import benchmark
    from tsopt.runtime.report import Report
    from tsopt.sweeps import Sweep, sweep

# name -> the module it lives in, imported at first use: `import tsopt` must not wait for torch.
_PLACES = {
    "capture": "tsopt.compiler.capture",
    "Example": "tsopt.compiler.example",
    "example": "tsopt.compiler.example",
    "Repeat": "tsopt.compiler.pipeline",
    "Numerics": "tsopt.compiler.program",
    "Program": "tsopt.compiler.program",
    "Rule": "tsopt.compiler.rewrite",
    "RulePass": "tsopt.compiler.rewrite",
    "rule": "tsopt.compiler.rewrite",
    "AccuracyError": "tsopt.errors",
    "ArtifactError": "tsopt.errors",
    "BackendError": "tsopt.errors",
    "CaptureError": "tsopt.errors",
    "DecidedByValues": "tsopt.errors",
    "InvalidProgram": "tsopt.errors",
    "NoGain": "tsopt.errors",
    "NotOneGraph": "tsopt.errors",
    "NotReady": "tsopt.errors",
    "PassError": "tsopt.errors",
    "RuleError": "tsopt.errors",
    "SignatureError": "tsopt.errors",
    "TsoptError": "tsopt.errors",
    "UsageError": "tsopt.errors",
    "WeightsChangedError": "tsopt.errors",
    "hybridize": "tsopt.hybrid",
    "wait": "tsopt.hybrid",
    "optimize": "tsopt.api",
    "transform": "tsopt.api",
    "STANDARD": "tsopt.passes",
    "verify": "tsopt.runtime.accuracy",
    "load": "tsopt.runtime.artifact",
    "Executable": "tsopt.runtime.executable",
    "compile": "tsopt.api",
    "Optimized": "tsopt.runtime.dispatch",
    "InEager": "tsopt.runtime.fallback",
    "InParts": "tsopt.runtime.parts",
    "benchmark": "tsopt.runtime.race",
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
    "ArtifactError",
    "BackendError",
    "CaptureError",
    "DecidedByValues",
    "Example",
    "Executable",
    "InEager",
    "InParts",
    "InvalidProgram",
    "NoGain",
    "NotOneGraph",
    "NotReady",
    "Numerics",
    "Optimized",
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
    "compile",
    "example",
    "hybridize",
    "load",
    "optimize",
    "rule",
    "sweep",
    "transform",
    "verify",
    "wait",
]
