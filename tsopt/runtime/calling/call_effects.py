"""Side effects of a call of the model, which compiled calls do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import Outside, kept_outside
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing.outcomes import warn
from tsopt.runtime.racing.rehearsal import Rehearsal, StandIn


def call_effects(
    model: Callable[..., Any],
    watch: Watch,
    example: Example,
    apart: StandIn | None = None,
    *,
    knows_state: bool = True,
) -> tuple[list[str], list[str]]:
    """What every call changes outside of the model, and which of its attributes. The watch ignores both from then on.

    Calls what stands in for the model, and the model itself only if that changes anything, or there is none. If it is
    outside, or the model raises, the changes are undone: eager will serve the user's call.

    Args:
        apart: what is known to stand in for the model.
        knows_state: `watch.written` are all the tensors that a call writes: others are left to other threads.
    """
    if apart is not None and _changes_nothing(apart, list(map(apart.shadow.twin, watch.written)), example):
        return [], []
    outside, inside, complete = list[str](), list[str](), False
    before = Outside(model)
    keeping = protected(model, written=watch.written, among_threads=knows_state and others_run())
    with keeping, contextlib.suppress(Exception):
        outside, inside = watch.changes_of(
            partial(_call_once, model, example), partial(kept_outside, model), _other_call(model, example)
        )
        watch.leave_out_changes()
        complete = True
    if outside or not complete:
        before.put_back()
    else:
        before.put_back_values()
    watch.renew(but_writes=knows_state)
    return outside, inside


def effects_of(
    model: Callable[..., Any], example: Example, written: Iterable[torch.Tensor]
) -> tuple[list[str], list[str], Watch]:
    """The same of a call that nothing is compiled for yet, and the model as it is.

    Args:
        written: the tensors that calls write, as far as is known.
    """
    watch = Watch(model, written)
    with kept_outside(model):
        outside, inside = call_effects(model, watch, example)
    return outside, inside, watch


def tell_of_effects(rehearsal: Rehearsal, captured: Program, example: Example) -> None:
    """Warns of what each call of a model changes, and compiled calls do not.

    Args:
        rehearsal: what is called. Not the model itself where other threads may call it, or where a call reads on in an
            iterator.
    """
    if rehearsal.shadow is None and (others_run() or iterator_in(example.args, example.kwargs) is not None):
        return
    outside, inside, _ = effects_of(rehearsal.model, example, captured.state.values())
    if outside or inside:
        fix = "call the model itself where that matters"
        warn(f"tsopt: {captured.name}: {not_changed(inside, outside)}: {fix}", UserWarning)


def why_eager(outside: list[str]) -> str:
    """Why the model itself serves all calls, where they change something outside of it."""
    return f"a call changes {', '.join(outside)} outside of the model, which compiled calls would not"


def not_changed(inside: list[str], outside: Sequence[str] = ()) -> str:
    """What to tell of attributes, and of what is outside of the model, that compiled calls leave as they are."""
    named, held = ([name for name in inside if name.startswith("'") is quoted] for quoted in (True, False))
    names = [f"its attribute{'s' * (len(named) > 1)} {', '.join(named)}"] if named else []
    names += [f"{', '.join(held)} that it holds"] if held else []
    names += [f"{', '.join(outside)} outside of it"] if outside else []
    return f"compiled calls do not change {' and '.join(names)}, which each call of the model itself does"


def _changes_nothing(apart: StandIn, written: list[torch.Tensor], example: Example) -> bool:
    """Whether calls of what stands in for a model change nothing but its state."""
    watch = Watch(apart.reads, written)
    call, kept = partial(_call_once, apart.called, example), partial(kept_outside, apart.called)
    with kept_outside(apart.reads), protected(None), contextlib.suppress(Exception):
        return not any(watch.changes_of(call, kept))
    return False


def _other_call(model: Callable[..., Any], example: Example) -> Callable[[], None] | None:
    """A call with other values in all of its tensors; None where some are indices or masks, and not any will do."""
    leaves, structure = flatten((example.args, example.kwargs))
    if not leaves or not all(leaf.is_floating_point() for leaf in leaves):
        return None
    args, kwargs = unflatten(structure, [leaf.detach() / 2 for leaf in leaves])
    return partial(_call_once, model, Example(args, kwargs))


def _call_once(model: Callable[..., Any], example: Example) -> None:
    call = InputSet("example", example).clone()
    model(*call.args, **call.kwargs)
