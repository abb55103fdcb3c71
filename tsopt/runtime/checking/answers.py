"""What a model answers to calls on data, and a candidate beside it: what they return, and what they write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.calls.calibration import called_on_data
from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.protect import protected
from tsopt.compiler.random_state import seed_torch
from tsopt.runtime.checking.agreement import Outputs
from tsopt.runtime.checking.compare import bit_equal

Called = Callable[..., Any]

LEAST = 16  # calls that are answered, however long they take
SECONDS = 0.1  # for those beyond: every candidate has to answer them, too
MOST_BYTES = 1 << 29  # of eager's answers that are kept: fewer inputs judge where one answer is large


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call has returned, and what it has left behind.

    Attributes:
        leaves: copies of the tensors that it returned, then of those that it put into objects of the call.
        returned: how many it returned.
        names: of the leaves.
        before, after: the inputs and the state, as they were and as the call has left them.
    """

    leaves: Outputs
    returned: int
    names: tuple[str, ...]
    before: tuple[torch.Tensor, ...]
    after: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """The model's answers.

    Attributes:
        calls: those that it has answered; of the given ones, only the first where answers are large or slow.
        outputs: of each call, what it returned, then what it put into objects of the call.
        returned: how many of these it returned.
        names: of the outputs, and then of what is written; empty for a single output.
        written: which of the inputs, followed by the state, a call has written to.
        after: of each call, those of them that it has changed, by position.
    """

    calls: tuple[Example, ...]
    outputs: tuple[Outputs, ...]
    returned: int
    names: tuple[str, ...]
    written: tuple[int, ...]
    after: tuple[dict[int, torch.Tensor], ...]

    def first(self, count: int) -> Answers:
        """Those to the first calls."""
        return replace(self, calls=self.calls[:count], outputs=self.outputs[:count], after=self.after[:count])

    def beside(self, called: Called, state: Sequence[torch.Tensor]) -> tuple[list[Outputs], list[Outputs]]:
        """What a candidate answers to the same calls, and what it should have: outputs, then what is written.

        Of what is written, only the elements that either of the two has changed: a step of a decoder writes to one
        place of its cache, and how near the others are says nothing.
        """
        found: list[Outputs] = []
        wanted: list[Outputs] = []
        for call, outputs, after in zip(self.calls, self.outputs, self.after, strict=True):
            answer = answer_of(called, call, state, written=self.written)
            mine, theirs = list(answer.leaves), list(outputs)
            for position, before, value in zip(self.written, answer.before, answer.after, strict=True):
                reference = after.get(position, before)
                changed = _differs(before, value) | _differs(before, reference)
                mine.append(widened(value)[changed])
                theirs.append(widened(reference)[changed])
            found.append(mine)
            wanted.append(theirs)
        return found, wanted


def answers_of(model: Called, data: Sequence[Example], state: Sequence[torch.Tensor], kept: Any = None) -> Answers:
    """The model's answers, which those of candidates are measured by; to the first calls only, where calls take long.

    Args:
        kept: see `answer_of`.

    Raises:
        UsageError: the model fails on an input.
    """
    outputs: list[Outputs] = []
    changed: list[dict[int, torch.Tensor]] = []
    names: tuple[str, ...] = ()
    returned = inputs = 0
    end = time.monotonic() + SECONDS
    for call in data:
        if len(outputs) >= LEAST and time.monotonic() > end:
            break
        if outputs and _bytes(outputs, changed) + _bytes(outputs[:1], changed[:1]) > MOST_BYTES:
            break
        with called_on_data(Exception):  # whatever the model raises
            answer = answer_of(model, call, state, kept)
        outputs.append(answer.leaves)
        both = enumerate(zip(answer.before, answer.after, strict=True))
        changed.append({position: after for position, (before, after) in both if not bit_equal(before, after)})
        names, returned, inputs = answer.names, answer.returned, len(answer.before) - len(state)
    written = tuple(sorted({position for after in changed for position in after}))
    names += tuple(f"input {position}" if position < inputs else "the model's state" for position in written)
    names = names if len(names) > 1 else ("",)
    return Answers(tuple(data[: len(outputs)]), tuple(outputs), returned, names, written, tuple(changed))


def answer_of(
    called: Called,
    call: Example,
    state: Sequence[torch.Tensor],
    kept: Any = None,
    written: Sequence[int] | None = None,
) -> Answer:
    """Makes a call, on copies of its inputs. State that it writes is restored.

    Args:
        kept: a model that is put back as it was, too.
        written: which inputs and state to copy, as `Answers.written`; None: all of them.
    """
    given, structure = flatten((call.args, call.kwargs))
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in given])  # a model may write to its inputs
    own, _ = flatten((args, kwargs))
    chosen = range(len(given) + len(state)) if written is None else written
    with protected(kept, written=state), torch.no_grad():
        before = [*given, *state]
        before = [before[i].detach().clone() if i >= len(given) else before[i].detach() for i in chosen]
        seed_torch(0)
        leaves, result, effects = outcome_of(called, args, kwargs)
        after = [[*own, *state][i].detach().clone() for i in chosen]
        labels = {index: f"{path}.new" for effect in effects for index, path in effect.labels()}
        labels |= dict(result.paths())
        return Answer(
            [leaf.detach().clone() for leaf in leaves],  # here: one of them may be state itself
            result.highest() + 1,
            tuple(f"output {labels.get(i) or i}" for i in range(len(leaves))),
            tuple(before),
            tuple(after),
        )


def outputs_of(called: Called, call: Example, state: Sequence[torch.Tensor], kept: Any = None) -> Outputs:
    """Copies of what a call returns. State that the call writes is restored.

    Args:
        kept: see `answer_of`.
    """
    answer = answer_of(called, call, state, kept, written=())
    return answer.leaves[: answer.returned]


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements are not equal; NaN is equal to nothing."""
    return widened(a) != widened(b)


def _bytes(outputs: Sequence[Outputs], changed: Sequence[dict[int, torch.Tensor]]) -> int:
    return sum(leaf.nbytes for kept, after in zip(outputs, changed, strict=True) for leaf in (*kept, *after.values()))
