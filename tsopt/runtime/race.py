"""The race: candidates compiled, checked, timed side by side with eager; the fastest that is right wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.example import Example, as_example
from tsopt.compiler.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.structure import flatten
from tsopt.errors import NoGain, TsoptError
from tsopt.runtime.accuracy import Oracle, is_exact
from tsopt.runtime.backend import Executable, compile, get_backend
from tsopt.runtime.inputs import input_sets
from tsopt.runtime.report import Benchmark, Row
from tsopt.runtime.timing import Timing, measure, speedup

EAGER = "eager"
PASSES = "eager + passes"
TITLES = {
    "eager": PASSES,
    "onednn": "torch + oneDNN",
    "torchscript": "TorchScript",
    "onnxruntime": "ONNX Runtime",
    "null": "null",
}
STANDARD_BACKENDS = ("eager", "onednn", "torchscript", "onnxruntime")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Race:
    """The outcome: a row for everybody, the winner's executable (None: eager), and all that were right."""

    rows: tuple[Row, ...]
    winner: str
    why: str
    executable: Executable | None
    verified: dict[str, Executable]


def race(
    model: Callable[..., Any],
    captured: Program,
    optimized: Program,
    example: Example,
    *,
    backends: Sequence[str] = STANDARD_BACKENDS,
    threads: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Race:
    """Runs the race.

    A candidate that cannot be compiled, fails or is wrong costs itself alone and is a row with its reason.
    The winner is verified once more on inputs that the race did not use.

    Raises:
        AccuracyError: the model itself fails on its example, or nothing about it can be verified.
    """
    tell = progress or (lambda text: None)
    tell("eager")
    oracle = Oracle(model, example, captured, seed=seed)
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        rows, executables = _prepare(optimized, oracle, backends, threads, tell)
        rows = _timed(model, captured, example, rows, executables, seconds, seed, tell)
        executables = {
            row.name: executables[row.name] for row in rows if row.status == "ok" and row.name in executables
        }
    finally:
        torch.set_num_threads(before)
    return _choose(model, captured, example, rows, executables, seed, tell)


def _prepare(
    program: Program, oracle: Oracle, backends: Sequence[str], threads: int | None, tell: Progress
) -> tuple[list[Row], dict[str, Executable]]:
    rows: list[Row] = [Row(EAGER)]
    executables: dict[str, Executable] = {}
    for backend in backends:
        title = TITLES.get(backend, backend)
        tell(f"compile {title}")
        start = time.perf_counter()
        try:
            refused = get_backend(backend).unsupported(program)
            if refused:
                reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
                rows.append(Row(title, "unsupported", reason))
                continue
            executable = compile(program, backend, threads=threads)
            took = time.perf_counter() - start
            tell(f"check {title}")
            verdict = oracle.judge(executable, exact=is_exact(program, backend))
            if not verdict.ok and is_exact(program, backend):
                verdict = oracle.judge(executable)
                executable.notes += ("not bit-equal to eager, which has kernels of its own for this model",)
        except NoGain as error:
            rows.append(Row(title, "no gain", error.what))
            continue
        except TsoptError as error:
            rows.append(Row(title, "failed", _reason(error)))
            continue
        except Exception as error:  # a candidate may raise anything; it costs the candidate alone
            rows.append(Row(title, "failed", f"{type(error).__name__}: {str(error)[:200]}"))
            continue
        if not verdict.ok:
            rows.append(Row(title, "wrong", verdict.reason, accuracy=verdict, compile_seconds=took))
            continue
        executables[title] = executable
        rows.append(Row(title, accuracy=verdict, compile_seconds=took, notes=executable.notes))
    return rows, executables


def _reason(error: TsoptError) -> str:
    return "; ".join(part for part in (error.what, error.where, error.why) if part)


def _timed(
    model: Callable[..., Any],
    captured: Program,
    example: Example,
    rows: list[Row],
    executables: Mapping[str, Executable],
    seconds: float,
    seed: int,
    tell: Progress,
) -> list[Row]:
    inputs = [item.clone() for item in input_sets(example, seed)[:3]]
    calls: dict[str, Callable[..., Any]] = {EAGER: model, **executables}
    # NOTE: inference mode for everybody: it is eager at its best, and costs the compiled ones nothing.
    with protected(model, written=captured.state.values()), torch.inference_mode():
        timings = measure(
            calls, inputs, seconds=seconds, wait=device_wait(example), progress=lambda text: tell(f"time: {text}")
        )
    base = timings[EAGER]
    return [_with_timing(row, timings.get(row.name), base) for row in rows]


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    leaves, _ = flatten((example.args, example.kwargs))
    return torch.cuda.synchronize if any(leaf.is_cuda for leaf in leaves) else lambda: None


def _with_timing(row: Row, timing: Timing | None, base: Timing) -> Row:
    if timing is None:
        return row
    if timing.error:
        return replace(row, status="failed", reason=f"while it was timed: {timing.error}")
    return replace(row, timing=timing, speedup=None if row.name == EAGER else speedup(timing, base))


def _choose(
    model: Callable[..., Any],
    captured: Program,
    example: Example,
    rows: list[Row],
    executables: dict[str, Executable],
    seed: int,
    tell: Progress,
) -> Race:
    oracle: Oracle | None = None
    ranked = sorted((row for row in rows if row.speedup is not None and row.speedup.low > 1.0), key=_median)
    for row in ranked:
        tell(f"verify {row.name}")
        # Fresh inputs: what the race measured must not be all that is right.
        oracle = oracle or Oracle(model, example, captured, seed=seed + 1)
        try:
            verdict = oracle.judge(executables[row.name])
            failure = "" if verdict.ok else verdict.reason
        except Exception as error:  # state that timing corrupted shows here
            failure = f"{type(error).__name__}: {str(error)[:200]}"
        if not failure:
            return Race(tuple(rows), row.name, f"{row.speedup} as fast as eager", executables[row.name], executables)
        rows = [replace(r, status="wrong", reason=f"after timing: {failure}") if r is row else r for r in rows]
        del executables[row.name]
    why = "no candidate is faster beyond noise" if executables else "no candidate could be used"
    return Race(tuple(rows), EAGER, why, None, executables)


def _median(row: Row) -> float:
    return row.timing.p50 if row.timing is not None else float("inf")


def benchmark(
    model: Callable[..., Any],
    candidates: Mapping[str, Callable[..., Any]],
    example_input: Any,
    *,
    seconds: float = 5.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Benchmark:
    """Times a model and candidates side by side: interleaved rounds, the same warm-up, medians, intervals.

    Args:
        candidates: callables by name; each is called as the model is.
    """
    example = as_example(example_input)
    inputs = [item.clone() for item in input_sets(example, seed)[:3]]
    # NOTE: no program here to say which parameters the model writes, so all of them are kept safe.
    written = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    with protected(model, written=written), torch.inference_mode():
        timings = measure(
            {EAGER: model, **candidates}, inputs, seconds=seconds, wait=device_wait(example), progress=progress
        )
    return Benchmark(tuple(_with_timing(Row(name), timings[name], timings[EAGER]) for name in timings))
