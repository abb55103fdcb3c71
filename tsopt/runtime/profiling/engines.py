"""Times the layers of an optimized program: op by op in torch, and in the engine that won the race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tsopt.compiler.graph.drawing import drawing_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import UsageError
from tsopt.runtime.backends.backend import Profiles, get_backend, race_options
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import PLAIN
from tsopt.runtime.profiling import limits
from tsopt.runtime.profiling.kernels import Timed, ms_of_values
from tsopt.runtime.profiling.precisions import precisions_of
from tsopt.runtime.profiling.profile import ELSEWHERE, Profile
from tsopt.runtime.profiling.rows import profile_of
from tsopt.runtime.profiling.work import OpWork


def profile(
    model: str,
    programs: Mapping[str, Program],
    winner: Candidate,
    inputs: Sequence[Any],
    threads: int | None,
    notes: Sequence[str] = (),
) -> Profile:
    """Times the layers of a program.

    Args:
        model: its name.
        programs: the variants of the program that are known, by name; `fp32` is one of them.
        winner: the candidate that runs.
        inputs: flat, in the order of the signature, state included.
        threads: of each engine whose candidate has no number of its own; None: torch's.
        notes: what the profile says as well.

    Raises:
        UsageError: the program is not on the CPU.
        BackendError: an engine cannot compile it.
    """
    check_on_cpu(inputs)
    timed: dict[str, Timed] = {}
    candidates = dict.fromkeys((Candidate(PLAIN.name), winner.in_full_precision(), winner))
    for candidate in candidates:
        backend = get_backend(candidate, **race_options(candidate, threads))
        if candidate.variant in programs and isinstance(backend, Profiles):
            timed[candidate.title] = backend.profile(programs[candidate.variant], inputs)
    said = [*notes, *([] if winner.title in timed else [f"no layer can be timed as {winner.title} runs it"])]
    for candidate in candidates:
        found = timed.get(candidate.title)
        if found is not None and programs[candidate.variant].node_count and not any(k.nodes for k in found.kernels):
            said.append(
                f"{candidate.title} does not say which layer a kernel belongs to, so all of its time is {ELSEWHERE}"
            )
    last = [candidate for candidate in candidates if candidate.title in timed][-1]
    program, threads_of_last = programs[last.variant], dict(last.options).get("threads", threads)
    precisions = precisions_of(last, program)
    lower = sorted({*precisions.known.values(), precisions.others} - {FP32})
    if lower:
        said.append(
            f"MB are those of full precision, of which {last.title} moves fewer; the limits are those of the precision "
            "that a layer runs in"
        )
    known = limits.measured(threads_of_last, lower)
    work, batch = OpWork(programs[FP32], inputs), _batch(programs[FP32])
    made = profile_of(model, timed, work, known, said, batch, precisions)
    return replace(made, drawing=drawing_of(program, ms_of_values(program, timed[last.title].kernels)))


def check_on_cpu(inputs: Sequence[Any]) -> None:
    """Raises UsageError for tensors elsewhere: the clocks of the engines are those of the CPU."""
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
        raise UsageError("only a model on the CPU can be profiled", fix="move the model and its example to the CPU")


def _batch(program: Program) -> int | None:
    """Samples in a call: the size of the first axis, if all inputs agree on it."""
    sizes = {item.type.shape[0] if item.type.shape else 0 for item in program.signature.user_inputs}
    return (sizes.pop() or None) if len(sizes) == 1 else None
