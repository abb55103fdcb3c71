"""How long calls take when each has other sizes than those before.

The rounds repeat the sizes of the example. Engines that prepare a kernel for each size, and keep it, do so there only
once, so that who wins there may lose to eager, or to another engine, in a loop whose sizes go on changing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.sizes.dims import sampled
from tsopt.compiler.sizes.specialize import sizes_in
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.checking.other_sizes import call_at
from tsopt.runtime.racing.speedup import Timing, timing_of
from tsopt.runtime.racing.timing import Remote, rest, seconds_of_calls
from tsopt.runtime.racing.tournament import order_of

log = logging.getLogger("tsopt")
NEW_SIZES, FEWEST_NEW_SIZES = 16, 6  # calls of each, all of different sizes
IN_A_ROW = 4  # of them, right after the largest one: threads are awake, and memory for the others is at hand

SETTLES = 3  # calls of the largest: for the first ones, each block comes from the system; then malloc keeps such blocks


def calls_of_new_sizes(
    signature: Signature, example: Example, known: Iterable[Mapping[str, int]], seed: int
) -> list[InputSet]:
    """Calls that a signature allows, none of which has a size of the example or of another; empty if there are few.

    Args:
        known: other sizes that candidates have been called with.
    """
    seen = {pair for sizes in known for pair in sizes.items()}
    drawn = sampled(signature.dims, sizes_in(signature, example), NEW_SIZES + 1, seed)
    sizes = [item for item in drawn if signature.unmet(item) is None and seen.isdisjoint(item.items())]
    if len(sizes) <= FEWEST_NEW_SIZES:
        return []
    return [InputSet("other sizes", call_at(signature, example, item)) for item in sizes]


def time_at_new_sizes(
    calls: Mapping[str, Callable[..., Any]],
    inputs: Sequence[InputSet],
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times callables in turns, each of them once on each of the inputs. Empty if few of them can be timed.

    The largest input is not timed, but begins every block. Memory for a larger input than any before comes from the
    system page by page. Eager pays for that, and engines that keep memory of their own do not; but a loop that goes on
    has soon seen its largest input.

    The order turns round from block to block: who comes first on new sizes finds no memory that another has given back.

    Args:
        calls: the first one is the model. A block that it does not take is left out: some sizes go with others only,
            and to find out before would prepare eager for them. Another one that raises has an `error` instead of more
            samples.
    """
    model = next(iter(calls))
    largest, inputs = _with_largest(calls[model], inputs)
    spent: dict[str, list[float]] = {name: [] for name in calls}
    errors: dict[str, Exception] = {}
    last = ""
    for number, first in enumerate(range(0, len(inputs), IN_A_ROW)):
        block = inputs[first : first + IN_A_ROW]
        found: dict[str, list[float]] = {}
        failed: dict[str, Exception] = {}
        for name in order_of([name for name in calls if name not in errors], number):
            if last not in ("", name) and not isinstance(calls[last], Remote):
                rest()
            last = name
            # Copies: what one of them writes to its input is not for the next one.
            own = [item.clone() for item in (*largest * SETTLES, *block)]
            try:
                found[name] = seconds_of_calls(calls[name], own, 1, SETTLES, len(block), wait)
            except Exception as error:  # a candidate may raise anything; it costs the candidate alone
                failed[name] = error
        if model not in failed:
            errors |= failed
            for name, seconds in found.items():
                spent[name] += seconds
    if len(spent[model]) < FEWEST_NEW_SIZES:
        return {}
    return {name: timing_of(seconds, errors.get(name)) for name, seconds in spent.items()}


def _with_largest(
    model: Callable[..., Any], inputs: Sequence[InputSet]
) -> tuple[tuple[InputSet, ...], Sequence[InputSet]]:
    """The largest input that the model takes, and the others but for larger ones: some sizes go with others only."""
    for largest in sorted(inputs, key=_elements, reverse=True):
        inputs = [item for item in inputs if item is not largest]
        try:
            seconds_of_calls(model, [largest.clone()], 1)
        except Exception as error:  # a model may raise anything at sizes that it is not made for
            log.info("the model refuses a call with new sizes: %r", error)
        else:
            return (largest,), inputs
    return (), ()


def _elements(call: InputSet) -> int:
    leaves, _ = flatten((call.example.args, call.example.kwargs))
    return sum(leaf.numel() for leaf in leaves)
