"""What being right costs: calls, audits, `optimize` and `load`, beside those of an earlier version.

Usage: python -m bench.costs --before DIRECTORY; writes bench/results/costs.{json,md}. DIRECTORY holds the other
version, `git worktree add DIRECTORY REVISION`. Each version is measured in processes of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 5
CALLS = 10_000
RESULTS = Path(__file__).parent / "results" / "costs.json"
# name -> what is measured, in which unit
MEASURED: dict[str, tuple[str, str]] = {
    "call": ("a call of the optimized MLP, without what the engine takes", "us"),
    "hybrid": ("a call of the hybridized MLP, without what the engine takes", "us"),
    "audited": (f"share of the time of {CALLS:,} calls of the MLP that audits took, the first one included", "%"),
    "audited_later": (f"share of the time of {CALLS:,} calls of the MLP that audits took, without the first one", "%"),
    "audited_deep": (
        f"share of the time of {CALLS:,} calls of 16 layers that audits took, the first one included",
        "%",
    ),
    "audited_deep_later": (
        f"share of the time of {CALLS:,} calls of 16 layers that audits took, without the first one",
        "%",
    ),
    "optimize_mlp": ("`optimize` of the MLP, default settings", "s"),
    "optimize_cnn": ("`optimize` of a small convolutional network, default settings", "s"),
    "load": ("`load` of a bundle that this machine has opened before", "ms"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    trees = {"before": asked.before.resolve(), "today": Path(__file__).resolve().parents[1]}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(asked.rounds):
        for name in sorted(trees, reverse=bool(number % 2)):
            found[name].append(_in_process(trees[name]))
            print(name, found[name][-1], flush=True)
    from tsopt.runtime.racing.environment import environment

    RESULTS.write_text(json.dumps({"environment": environment().to_json(), "rounds": found}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text("\n".join(page(found)) + "\n")


def _in_process(tree: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", __file__]  # without this directory on the path
    with tempfile.TemporaryDirectory() as cache:
        environment["TSOPT_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True, cwd=cache)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if Path(str(answer.pop("package"))).parents[1] != tree:
        raise SystemExit(f"what was measured is not the version in {tree}")
    return answer


def page(found: dict[str, list[dict[str, float]]]) -> list[str]:
    lines = [
        "What the checks of a call, audits, and more input sets cost; medians of rounds in turns, lowest to highest.",
        "",
        "| | before | today | difference | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (what, unit) in MEASURED.items():
        before = [row[name] for row in found["before"] if name in row]
        today = [row[name] for row in found["today"]]
        cells = [_range(before, unit), _range(today, unit), "", ""]
        if before:
            pairs = list(zip(before, today, strict=True))
            cells[2] = f"{statistics.median(b - a for a, b in pairs):+.2f} {unit}"
            cells[3] = f"{statistics.median(b / a for a, b in pairs):.2f}x"
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def _range(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.2f} {unit} [{min(values):.2f}, {max(values):.2f}]" if values else ""


def measure() -> dict[str, Any]:
    """All of it, for the version that is on the path."""
    import torch
    from torch import nn

    import tsopt
    from tsopt.hybrid import compiled_of

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    cnn = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    ).eval()
    x, image = torch.randn(1, 64), torch.randn(1, 3, 32, 32)
    found: dict[str, Any] = {"package": tsopt.__file__}
    found["optimize_mlp"], fast = _timed(lambda: tsopt.optimize(mlp, x, cache=False))
    found["optimize_cnn"], _ = _timed(lambda: tsopt.optimize(cnn, image, cache=False))
    # Always the same backend, so that rounds are comparable, and one thread: the worker threads of a closed session
    # keep spinning while the next one opens.
    fast.executable = fast.verified("onnxruntime", threads=1)
    with tempfile.TemporaryDirectory() as directory:
        bundle = fast.save(Path(directory) / "mlp.tsopt")
        tsopt.load(bundle)
        found["load"] = statistics.median(timeit.repeat(lambda: tsopt.load(bundle), repeat=300, number=1)) * 1e3
    with torch.no_grad():
        net = tsopt.hybridize(mlp, backends=("onnxruntime",), cache=False)
        net(x)
        behind = compiled_of(net).fast
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for made, called, name in ((fast, fast, "call"), (behind, net, "hybrid")):
            made.executable = _stub(made.program, mlp(x))
            found[name] = _best(lambda called=called: called(x))
    if hasattr(fast, "_audits"):
        found |= _audits(tsopt.optimize(mlp, x, backends=("onnxruntime",), cache=False), x)
        layers = [module for _ in range(16) for module in (nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())]
        row = torch.randn(8, 256)
        shares = _audits(
            tsopt.optimize(nn.Sequential(*layers).eval(), row, backends=("onnxruntime",), cache=False), row
        )
        found |= {name.replace("audited", "audited_deep"): share for name, share in shares.items()}
    return found


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _stub(program: Any, answer: Any) -> Any:
    """An engine that takes no time."""
    from tsopt import Executable

    answers = (answer,)
    return Executable("stub", program.signature, lambda inputs: answers)


def _best(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, repeat=25, number=20_000)) / 20_000 * 1e6


def _audits(fast: Any, x: Any) -> dict[str, float]:
    """Of calls that come one after another; what audits took is their own account, the time served is the clock's."""
    if fast.executable is None:
        raise SystemExit("eager won the race, so there is nothing to audit")
    start = time.perf_counter()
    first = 0.0
    for _ in range(CALLS):
        fast(x)
        if fast._audits.count == 1 and not first:
            first = fast._audits.spent
    took = time.perf_counter() - start
    spent = fast._audits.spent
    return {"audited": 100 * spent / took, "audited_later": 100 * (spent - first) / took}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        warnings.simplefilter("ignore")
        print(json.dumps(measure()))
