"""Values that a kernel on a GPU asserts, above all that an index exists. If one fails, no later call on it succeeds.

On the CPU, the model raises an error instead, and the candidates are compared on something else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tsopt.compiler.analysis.intervals import ANY, Range, of_dtype, range_of_tensor
from tsopt.compiler.analysis.ranged_call import Ranges, Values, base_name
from tsopt.compiler.analysis.ranges import ranges_of, recorded
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import flat_inputs
from tsopt.runtime.checking.extremes import VALUES_DECIDE, is_unchecked
from tsopt.runtime.onnx.integers.indices import USES, Use, affine, uses_of

# Of numbers: probabilities, classes, lengths, and conditions of the model's own.
ASSERTED = frozenset({"multinomial", "bernoulli", "binary_cross_entropy", "assert_async", "ctc_loss"}) | frozenset(
    {"multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward"}
)


def of_program(program: Program) -> tuple[str, ...]:
    """The ops of a program on a GPU that may fail there if values are made up for its inputs.

    Not those whose indices are an input, which are drawn from its own, or within bounds whatever the inputs are.
    """
    if not any(device.startswith("cuda") for _, device in program.signature.devices):
        return ()
    return unbounded(program)


def unbounded(program: Program) -> tuple[str, ...]:
    """The same for a program on any device."""
    values = recorded(program)
    whole = [of_dtype(getattr(torch, item.type.dtype)) for item in program.signature.inputs]
    ranges = ranges_of(program, values, whole, with_nan=True)
    uses = {use.call for use in uses_of(program, values) if not _exists(use, values, ranges)}
    found = [node for node in all_calls(program) if node in uses or is_unchecked(node) or base_name(node) in ASSERTED]
    return tuple(dict.fromkeys(map(base_name, found)))


def has_indices(program: Program) -> bool:
    """Whether a program uses any value as an index."""
    return any(base_name(node) in USES for node in all_calls(program))


def all_exist(program: Program, call: Example) -> bool:
    """Whether every index exists in a call of a program for a single size, as far as ranges of numbers tell."""
    values = recorded(program)
    given = [range_of_tensor(value) for value in flat_inputs(program, call)]
    ranges = ranges_of(program, values, given, with_nan=True)
    return all(_is_within(use, ranges) for use in uses_of(program, values))


def among(names: Iterable[str]) -> tuple[str, ...]:
    """Which of these ops may fail on a GPU, as far as their names tell."""
    bases = (name.partition("::")[2].partition(".")[0].strip("_") for name in names)
    return tuple(dict.fromkeys(name for name in bases if name in USES or name in VALUES_DECIDE or name in ASSERTED))


def _exists(use: Use, values: Values, ranges: Ranges) -> bool:
    """Whether every index exists, for all inputs that are drawn from those of the example, one by one."""
    return affine(use.index, values) is not None or _is_within(use, ranges)


def _is_within(use: Use, ranges: Ranges) -> bool:
    """Whether every index exists, or is the one number that is taken although it is no index."""
    taken = use.range if use.also is None else use.range | Range(use.also, use.also)
    return ranges.get(use.index, ANY) in taken
