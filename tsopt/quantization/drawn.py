"""Calibration data that is drawn like the example: only inputs that the model takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tsopt.compiler.calls.calibration import Calibration
from tsopt.compiler.calls.calibration_again import counted
from tsopt.compiler.calls.calibration_kept import MOST
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import protected
from tsopt.runtime.checking.answers import outputs_of
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE, InputSet, by_column
from tsopt.runtime.checking.made_up import made_up

log = logging.getLogger("tsopt")
IN_VAIN = 3  # seeds in a row of whose inputs the model takes none, after which no more are drawn


def like_the_example(model: Callable[..., Any], program: Program, example: Example, seed: int) -> Calibration:
    """The example and a few values made up like it, where there is no data. Too few to split."""
    with protected(model, written=program.state.values()):
        return Calibration((example, *_drawn(model, program, example, seed)), "no data", is_split=False)


def drawn(model: Callable[..., Any], program: Program, example: Example, seed: int, count: int) -> Calibration:
    """The example and as many inputs drawn like it as the user has asked for; fewer where the model refuses others."""
    count, made, in_vain = min(count, MOST), [example], 0
    with protected(model, written=program.state.values()):
        while len(made) < count and in_vain < IN_VAIN:
            seed += 1
            before = len(made)
            for call in _drawn(model, program, example, seed):
                made.append(call)
                if len(made) >= count:
                    break
            in_vain = 0 if len(made) > before else in_vain + 1
    calls = tuple(made)
    some = counted(len(calls), "input")
    if len(calls) < count:
        some = f"{len(calls)} of {counted(count, 'input')} (the model refuses others)"
    return Calibration(calls, f"{some} drawn like the example, which says little about real data")


def _drawn(model: Callable[..., Any], program: Program, example: Example, seed: int) -> Iterator[Example]:
    """The inputs of one seed that the model takes."""
    state = tuple(program.state.values())
    sets = [item for item in made_up(program, example, seed) if item.kind.startswith(OF_THE_SAME_SIZE)]
    for place, item in enumerate(sets):
        taken = next((call for call in _forms(item, example, seed, place) if _is_taken(model, call, state)), None)
        if taken is not None:
            yield taken


def _forms(item: InputSet, example: Example, seed: int, place: int) -> Iterator[Example]:
    """A drawn input, and what to try if the model refuses it: columns of a table have codes of their own.

    Args:
        place: of the input among those of the seed, so that no two are drawn alike.
    """
    yield item.example
    # Codes may be floats, which the model converts.
    for one_seed, floats in ((seed, False), (1000 * seed + place, True)):
        made = by_column(item, example, one_seed, floats=floats)
        if made is not None:
            yield made.example


def _is_taken(model: Callable[..., Any], call: Example, state: tuple[torch.Tensor, ...]) -> bool:
    try:
        outputs_of(model, call, state)
    except Exception as error:  # whatever the model says about values that it does not take
        log.debug("the model refuses a drawn input: %s", error)
        return False
    return True
