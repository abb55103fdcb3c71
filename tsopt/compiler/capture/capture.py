"""nn.Module or function -> Program, through torch.export and the other front ends. The user's model is left unchanged.

Never imports a pass or a backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tsopt.compiler.calls.effects import Effect, outcome_of
from tsopt.compiler.calls.example import Example, as_examples
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.snapshot import held_by
from tsopt.compiler.calls.structure import Structure, flatten, unflatten
from tsopt.compiler.capture.export_errors import explain, failure_of_the_model
from tsopt.compiler.capture.frontends import READERS, by_fx, by_torchscript, computes_the_same, replayed, strictly
from tsopt.compiler.capture.lowering import follows_default_dtype, functional, lower
from tsopt.compiler.capture.names import collected, input_names, name_of
from tsopt.compiler.capture.program_views import with_views
from tsopt.compiler.capture.recorded_questions import Asked, asked_by
from tsopt.compiler.capture.refusals import (
    check_apart,
    check_attributes,
    check_inputs,
    check_model,
    check_overlap,
    check_repeated,
    check_result,
    check_training,
)
from tsopt.compiler.capture.replaced_tensors import check_replaced, noted
from tsopt.compiler.capture.scripted import Scripted, is_scripted
from tsopt.compiler.capture.shadow import shadow_of
from tsopt.compiler.capture.shadow_check import answers_alike
from tsopt.compiler.capture.thread_patches import TRACING, apart
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.program import Program
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import protected, training_flags, training_of
from tsopt.compiler.quiet import quiet
from tsopt.compiler.sizes.dims import Dynamic, dynamic_of, from_examples, from_mapping
from tsopt.compiler.sizes.symbols import shapes_of, symbols_of, with_dims, with_sizes
from tsopt.compiler.tensor_life import let_go
from tsopt.errors import CaptureError, DataDependentError, GraphBreakError, UsageError

log = logging.getLogger("tsopt")
# Front ends that read a model before torch.export does.
BEFORE_EXPORT = {"strict": "torch.export in strict mode", "fx": "torch.fx", "torchscript": "TorchScript"}
LEAKED = "fake tensor in the exported program constant's list"  # in torch.export's message
ATTEMPTS = 3

DynamicSizes = Mapping[Any, Any] | None  # as the user says which sizes differ from call to call


def capture(
    model: Callable[..., Any],
    example_input: Any,
    *,
    dynamic: Mapping[Any, Any] | None = None,
    frontend: str = "auto",
    eval_mode: bool = False,
    allow_nan: bool = False,
) -> Program:
    """Captures a model as a typed, functional graph.

    Args:
        model: an nn.Module, an ExportedProgram, TorchScript, or a function of tensors.
        example_input: a tensor, a tuple of positional arguments, a dict of keyword arguments, or
            `tsopt.example(*args, **kwargs)`. The program is specialized on its shapes, dtypes and devices. Pass a list
            of several examples to make the sizes that differ between them dynamic.
        dynamic: the dynamic dimensions, by input and axis: `{"x": {0: "batch"}}`, or with a range,
            `{"x": {0: "batch[1..32]"}}`. For a range without an upper end, and for sizes from a list of examples, the
            program guarantees only what torch.export has found; `optimize` checks it at several sizes.
        frontend: how the model is read. `export`: torch.export. `strict`: torch.export in strict mode, which supports
            numpy but resets the torch.compile caches of this process. `fx`: torch.fx, which bakes in everything that
            is not a tensor. `torchscript`: torch.jit.script, which preserves data-dependent branches and loops.
            `auto`: torch.export, then TorchScript if the control flow is data-dependent. Programs from strict mode,
            torch.fx and TorchScript are compared with the model in repeated calls before they are accepted.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: accept weights that contain NaN.

    Raises:
        UsageError: the front end is unknown.
        CaptureError: the model cannot be captured; the message says where, and what to write instead.
        GraphBreakError: a CaptureError; the model runs, but is not one graph.
    """
    with kept_outside(model):
        return capture_apart(
            model, example_input, dynamic=dynamic, frontend=frontend, eval_mode=eval_mode, allow_nan=allow_nan
        )[0]


def capture_apart(
    model: Callable[..., Any],
    example_input: Any,
    *,
    dynamic: Mapping[Any, Any] | None = None,
    frontend: str = "auto",
    eval_mode: bool = False,
    allow_nan: bool = False,
) -> tuple[Program, bool]:
    """`capture`, and whether a shadow copy was enough, so that the model itself was not touched."""
    if frontend not in ("auto", *READERS):
        raise UsageError(f"unknown frontend {frontend!r}", fix=f"use one of: auto, {', '.join(READERS)}")
    examples = as_examples(example_input)
    if isinstance(model, ExportedProgram):
        if frontend in BEFORE_EXPORT:
            raise UsageError(
                f"frontend={frontend!r} does not apply to an exported program",
                why="torch.export has captured it already",
                fix='pass frontend="auto"',
            )
        model = replayed(model)
        eval_mode = True
    check_model(model, allow_nan=allow_nan)
    for example in examples:
        check_inputs(model, example)
        check_apart(example, held_by(model))
    if is_scripted(model):
        model = Scripted(model)
    with TRACING.taken(waits=True), quiet():
        found = _from_shadow(model, examples, dynamic, frontend, eval_mode)
        if found is not None:
            return found, True
        with apart(), protected(model):
            return _in_its_mode(model, examples, dynamic, frontend, eval_mode), False


def _from_shadow(
    model: Callable[..., Any], examples: Sequence[Example], dynamic: DynamicSizes, frontend: str, eval_mode: bool
) -> Program | None:
    """The program of a shadow of the model; None where that is not the same model.

    It is another where it answers otherwise, reaches modules of the model past itself, by a global name or a table of
    its own, or fails where the model may not.
    """
    shadow = shadow_of(model)
    if shadow is None:
        return None
    strayed: list[nn.Module] = []

    def on_call(module: nn.Module) -> None:
        if shadow.holds(module):
            strayed.append(module)

    try:
        with apart(on_call), protected(shadow.called):
            program = _in_its_mode(shadow.called, examples, dynamic, frontend, eval_mode)
    except CaptureError as error:
        if strayed or not isinstance(error, GraphBreakError):
            log.info("capturing %s itself instead of its shadow copy: %s", name_of(model), error)
            return None
        raise
    training = isinstance(model, nn.Module) and any(training_of(model.modules()))
    # What a program writes would have to be put back; and for eval mode flags would be set for all who call the model.
    unasked = bool(program.state) or (training and eval_mode) or any(map(ops.may_trap, all_calls(program)))
    same = not strayed and (unasked or answers_alike(model, shadow.called, examples[0]))
    return shadow.linked(program) if same else None


def _in_its_mode(
    model: Callable[..., Any], examples: Sequence[Example], dynamic: DynamicSizes, frontend: str, eval_mode: bool
) -> Program:
    """The program of a model in eval mode, or in training mode where that makes no difference."""
    training = isinstance(model, nn.Module) and any(training_of(model.modules()))
    if training and eval_mode:
        with training_flags(model, False):
            return _as_asked(model, examples, dynamic, frontend)
    program = _as_asked(model, examples, dynamic, frontend)
    if training:
        with training_flags(model, False):
            check_training(program, _as_asked(model, examples, dynamic, frontend))
    return program


def _as_asked(model: Callable[..., Any], examples: Sequence[Example], dynamic: DynamicSizes, frontend: str) -> Program:
    """The program, with what the model has asked of its inputs as part of its signature."""
    asked = asked_by(model, examples[0])
    check_attributes(examples[0], asked.questions)
    if asked.aliasing:
        check_overlap(examples[0], asked.written)
    else:
        given, examples = examples, [example.apart() for example in examples]
        if examples[0] is not given[0]:  # the answers are for each place
            asked = asked_by(model, examples[0])
    wanted = _dynamic(model, examples, dynamic)
    traced = asked
    if wanted is not None and any(view is not None and view.shape is not None for view in asked.views):
        traced = asked_by(model, wanted.trace)  # one row is a view where more are a copy
    program = _captured(model, examples[0] if wanted is None else wanted.trace, wanted, frontend)
    check_repeated(examples[0], program.signature.written_inputs)
    signature = replace(program.signature, collected=collected(model, program.signature.outer))
    program = replace(program, signature=_with_answers(signature, asked))
    return with_views(program, model, asked, examples[0], traced, wanted)


def _with_answers(signature: Signature, asked: Asked) -> Signature:
    questions = iter(asked.questions)
    inputs = [item if item.state else replace(item, asked=next(questions, ())) for item in signature.inputs]
    aliasing = asked.aliasing or (len(signature.user_inputs) > 1 and bool(signature.written_inputs))
    default_dtype = _default_dtype() if asked.default_dtype else signature.default_dtype
    return replace(signature, inputs=tuple(inputs), aliasing=aliasing, modes=asked.modes, default_dtype=default_dtype)


def _default_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _captured(model: Callable[..., Any], example: Example, wanted: Dynamic | None, frontend: str) -> Program:
    """The program by the front end that is asked for, or by the first that can read the model."""
    if isinstance(model, Scripted):
        return _compared(_capture(model, example, wanted), model, example, "torchscript")
    if frontend in BEFORE_EXPORT:
        return _read(model, example, wanted, frontend)
    try:
        return _capture(model, example, wanted)
    except DataDependentError as error:
        if frontend != "auto":
            raise
        try:
            program = _read(model, example, wanted, "torchscript", runs=True)
        except CaptureError as failure:  # what counts is why the first one did not read it
            log.info("TorchScript cannot capture %s: %s", name_of(model), failure)
            raise error from None
        because = "; ".join(filter(None, (error.what, error.where)))
        return replace(program, frontend=f"{program.frontend}, because torch.export failed: {because}")


def _read(
    model: Callable[..., Any], example: Example, wanted: Dynamic | None, reader: str, *, runs: bool = False
) -> Program:
    """The program by another front end, compared with the model.

    Args:
        runs: whether the model is known to run on its example: a failure need not be looked for there.
    """
    with protected(model):  # whatever the reader leaves on the model must not be what it is compared with
        program = _capture(model, example, wanted, reader, runs=runs)
    program = _compared(program, model, example, reader)
    return replace(program, frontend=f"by {BEFORE_EXPORT[reader]}")


def _compared(program: Program, model: Callable[..., Any], example: Example, reader: str) -> Program:
    """The program, if its calls are those of the model."""
    # On other values the loops of a script may not come to an end, and there is nothing that it could have frozen.
    if not computes_the_same(program, model, example, on_others=reader != "torchscript"):
        raise GraphBreakError(
            f"{BEFORE_EXPORT[reader]} does not reproduce the model",
            why="in repeated calls, the captured program returns different results or leaves different state behind",
            fix="pass the original nn.Module" if isinstance(model, Scripted) else 'pass frontend="auto"',
        )
    return program


def _dynamic(model: Callable[..., Any], examples: Sequence[Example], given: Mapping[Any, Any] | None) -> Dynamic | None:
    """What is to be captured for more than one size; None for a program of one size."""
    if given is None and len(examples) == 1:
        return None
    axes = from_examples(examples) if len(examples) > 1 else {}
    if given is not None:
        _, outer = flatten((examples[0].args, examples[0].kwargs))
        for position, named in from_mapping(given, input_names(model, outer), examples[0]).items():
            axes.setdefault(position, {}).update(named)
    return dynamic_of(examples, axes)


Outcome = tuple[Structure, tuple[Effect, ...]]  # the form of what a call returns, and of what it leaves in its objects


class _Flat(nn.Module):
    """Flat tensors in and out around the user's model, so that no nesting ever reaches torch.export."""

    def __init__(
        self,
        model: Callable[..., Any],
        outer: Structure,
        held: Container[int],
        record: Callable[[Outcome, list[str]], None],
    ) -> None:
        super().__init__()
        self.model = _called_forward(model) if isinstance(model, FunctionType) else model
        self.outer, self.held = outer, held
        self.record = record  # a function: torch.export puts attributes that change back as they were

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self.outer, leaves)
        with noted(self.model) as replaced:
            values, result, effects = outcome_of(self.model, args, kwargs, self.held)
        parts = (replace(effect, parts=with_sizes(effect.parts, self.outer, leaves)) for effect in effects)
        self.record((with_sizes(result, self.outer, leaves), tuple(parts)), replaced)
        return tuple(values)


def _called_forward(function: FunctionType) -> FunctionType:
    """The same function under another name: torch.export records source lines only for frames named `forward`."""
    code = function.__code__.replace(co_name="forward")
    made = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _capture(
    model: Callable[..., Any],
    example: Example,
    wanted: Dynamic | None,
    reader: str = "export",
    *,
    runs: bool = False,
) -> Program:
    leaves, outer = flatten((example.args, example.kwargs))
    outer = outer if wanted is None else wanted.structure
    names = input_names(model, outer)
    # Detached, and apart from the user's tensors: nothing that tracing does may reach them.
    inputs = tuple(leaf.detach().clone() for leaf in leaves)
    outcomes: list[Outcome] = []
    replaced: list[str] = []

    def record(outcome: Outcome, names: list[str]) -> None:
        outcomes.append(outcome)
        replaced[:] = names

    held = held_by(model)
    shapes = None if wanted is None else (shapes_of(wanted, inputs),)
    try:
        called = model
        if reader == "strict":
            called = strictly(model, example, fixed=wanted is None)
        elif reader == "torchscript":
            called = Scripted(by_torchscript(model))
        flat: nn.Module = _Flat(called, outer, held, record)
        flat.training = False
        if reader == "fx":
            flat = by_fx(flat, len(inputs))
        traced = _exported(flat, inputs, shapes)
        exported = functional(traced)
        if replaced:
            check_replaced(model, example)
    except GraphBreakError as error:
        raise (None if runs else failure_of_the_model(model, example, error)) or error from error
    except Exception as error:
        raise explain(error, model, example, runs=runs) from error
    result, effects = outcomes[-1]
    check_result(result, effects, held)
    program = lower(exported, names, outer, result, effects, name_of(model))
    let_go(program.fake_mode)
    if follows_default_dtype(traced):
        program = replace(program, signature=replace(program.signature, default_dtype=_default_dtype()))
    return program if wanted is None else with_dims(program, symbols_of(exported, wanted, names))


def _exported(flat: nn.Module, inputs: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    """What torch.export makes of it, in a few attempts where another thread may be why it fails.

    A thread that looks at the frames of this one, as sampling profilers and error trackers do, keeps their tensors
    alive. torch.export then takes one for a constant now and then (BERT, every 5 ms: in half of the attempts).
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=False)
        except RuntimeError as error:
            if LEAKED not in str(error):
                raise
            log.info("torch.export is asked again: %s", str(error)[:200])
    return torch.export.export(flat, inputs, dynamic_shapes=shapes, strict=False)
