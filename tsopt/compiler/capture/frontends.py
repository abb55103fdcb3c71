"""Front ends other than torch.export itself: each makes a module that torch.export then captures.

They accept more models because they check less, so their programs are compared with the model, also here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.snapshot import held_by
from tsopt.compiler.calls.structure import Structure, flatten, unflatten
from tsopt.compiler.capture.export_errors import first_lines
from tsopt.compiler.capture.scripted import Scripted
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import as_eval, protected, training_of
from tsopt.compiler.random_state import seed_all
from tsopt.compiler.watching_mode import WatchingMode
from tsopt.errors import GraphBreakError

READERS = ("export", "strict", "fx", "torchscript")
CALLS = 3
SEED = 20011  # other random numbers than those that a tracer may have drawn


def replayed(exported: ExportedProgram) -> nn.Module:
    """An exported program, called as its model was, whose calls keep their places in the model's code.

    Its guards on sizes are checked first. Traced with dynamic sizes, they are guards of that trace.
    """
    module: Any = exported.module()
    guards = getattr(module, "_guards_fn", None)  # absent without inputs, or without the example it was exported on
    for node in module.graph.find_nodes(op="call_module", target="_guards_fn"):
        module.graph.erase_node(node)  # the interpreter would look for its place in the code
    forward, tree = module.forward, exported.call_spec.in_spec

    @functools.wraps(forward)
    def replay(*args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        if form != tree:
            return forward(*args, **kwargs)  # it knows what to say
        if guards is not None:
            guards(*leaves)
        with fx_traceback.preserve_node_meta():
            found = fx.Interpreter(module).run(*leaves, enable_io_processing=False)
        return pytree.tree_unflatten(found, exported.call_spec.out_spec)

    module.forward = replay
    return cast(nn.Module, module)


def strictly(model: Callable[..., Any], example: Example, *, fixed: bool) -> nn.Module:
    """The model as dynamo reads its bytecode, which takes what tracing cannot follow, numpy for one.

    Args:
        fixed: only for the sizes of the example.

    Raises:
        GraphBreakError: dynamo would break the graph, or sizes are to be dynamic.
    """
    if not fixed:
        raise GraphBreakError(
            "torch.export in strict mode specializes on sizes",
            fix="leave dynamic out: each size is captured when it is first called",
        )
    module = model if isinstance(model, nn.Module) else _Function(model)
    leaves, structure = flatten((example.args, example.kwargs))
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    marks = {id(tensor): (tensor, dict(tensor.__dict__)) for tensor in (*module.parameters(), *module.buffers())}
    try:
        return replayed(torch.export.export(module, args, kwargs, strict=True))
    except Exception as error:  # dynamo's own, of many kinds
        raise _unread(
            "torch.export in strict mode cannot capture the model", error, fix='pass frontend="auto"'
        ) from error
    finally:
        for tensor, held in marks.values():
            tensor.__dict__.clear()
            tensor.__dict__.update(held)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def by_fx(flat: nn.Module, count: int) -> nn.Module:
    """A module of `count` tensors, traced by torch.fx; everything else is baked in.

    Raises:
        GraphBreakError: torch.fx cannot trace it, or would freeze random numbers.
    """
    tracer = _Tracer(count)
    try:
        with _NothingRandom():
            module = fx.GraphModule(flat, tracer.trace(flat))
    except GraphBreakError:
        raise
    except Exception as error:  # whatever Python does with a Proxy that it takes for a tensor
        raise _unread(
            "torch.fx cannot trace the model",
            error,
            fix='pass frontend="export", which supports Python code on sizes and values',
        ) from error

    def replay(*leaves: torch.Tensor) -> Any:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(module).run(*leaves)

    module.forward = replay
    return module


class _Tracer(fx.Tracer):
    """Traces a module of tensors, however many, and notes where in the user's code its calls stand."""

    record_stack_traces = True
    proxy_buffer_attributes = True  # or what is written to a buffer is written once, now

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        leaves = [self.create_proxy("placeholder", f"leaf_{i}", (), {}) for i in range(self.count)]
        return root_fn, [self.root, *leaves]


class _NothingRandom(WatchingMode):
    """Refuses random numbers that are drawn while torch.fx traces: they would be the same in every call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):  # a higher order operator has none
            raise GraphBreakError(
                f"torch.fx would bake in the random numbers from {func}",
                why="they do not depend on an input, so they are drawn once, during tracing",
                fix='pass frontend="export"',
            )
        return func(*args, **kwargs or {})


def by_torchscript(model: Callable[..., Any]) -> Any:
    """The model compiled by TorchScript.

    Raises:
        GraphBreakError: its compiler does not take it.
    """
    try:
        with protected(model):  # the compiler leaves what it has found as an attribute
            script = torch.jit.script(model)
        if not isinstance(script, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise TypeError(f"a {type(model).__name__}")
        return script
    except Exception as error:  # the compiler's own, and those of Python's parser
        raise _unread(
            "TorchScript cannot compile the model", error, fix='pass frontend="auto", which does not need TorchScript'
        ) from error


def _unread(what: str, error: Exception, fix: str) -> GraphBreakError:
    return GraphBreakError(what, where=user_frame(error), why=f"{type(error).__name__}: {first_lines(error)}", fix=fix)


def computes_the_same(program: Program, model: Callable[..., Any], example: Example, *, on_others: bool = True) -> bool:
    """Whether a program does what the model does: in several calls, one after the other, each on what was left behind.

    What a reader has frozen, a number that it took for given or a random one, shows on other values, under other random
    states, or in the next call.
    """
    leaves, structure = flatten((example.args, example.kwargs))
    generator = torch.Generator().manual_seed(0)
    for values in (leaves, [_drawn(leaf, generator) for leaf in leaves])[: 1 + on_others]:
        try:
            wanted = _calls_of_the_model(model, values, structure, program)
        except Exception:  # the model's own refusal of values that were made up
            if values is leaves:
                raise
            continue
        if not _agree(_calls_of_the_program(program, values), wanted):
            return False
    return True


# What a call returns and puts into its objects, the forms of it, and its tensors and the model's state behind it.
_Call = tuple[list[torch.Tensor], tuple[Any, ...], list[torch.Tensor]]


def _calls_of_the_model(
    model: Callable[..., Any], values: Sequence[torch.Tensor], structure: Structure, program: Program
) -> list[_Call]:
    model, state = _judge(model, list(program.state.values()))
    found, held = [], held_by(model)
    with protected(model, written=state):
        seed_all(SEED)
        for _ in range(CALLS):
            inputs = [value.detach().clone() for value in values]
            args, kwargs = unflatten(structure, inputs)
            outputs, *form = outcome_of(model, args, kwargs, held)
            after = [value.detach().clone() for value in (*inputs, *state)]
            if not all(map(ops.is_plain, outputs)):
                raise GraphBreakError(
                    "the model returns a subclass of torch.Tensor", fix="return x.as_subclass(torch.Tensor)"
                )
            found.append(([value.detach().clone() for value in outputs], tuple(form), after))
    return found


def _judge(model: Callable[..., Any], state: list[torch.Tensor]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Whose calls count, and its state: of what reads TorchScript, this itself; a copy if the calls write to it."""
    if not isinstance(model, Scripted):
        return model, state
    evaluated, script = not any(training_of(model.modules())), model.original
    if state:
        script = copy.deepcopy(script)
        paths = {id(tensor): path for path, tensor in (*model.named_parameters(), *model.named_buffers())}
        tensors = (script.named_parameters, script.named_buffers)
        theirs = dict(chain.from_iterable(named(remove_duplicate=False) for named in tensors))
        state = [theirs[paths[id(tensor)]] for tensor in state]
    return as_eval(script, evaluated), state


def _calls_of_the_program(program: Program, values: Sequence[torch.Tensor]) -> list[_Call]:
    signature, module, found = program.signature, program.module(), []
    names = [item.name for item in signature.inputs]
    state = [program.state[item.name].detach().clone() for item in signature.state_inputs]
    with protected(None), torch.no_grad():
        seed_all(SEED)
        for _ in range(CALLS):
            inputs = [*(value.detach().clone() for value in values), *state]
            outputs = list(module(*inputs))
            for item, value in zip(signature.writes, outputs, strict=False):
                inputs[names.index(str(item.writes))] = value
            state = inputs[len(values) :]
            found.append((outputs[len(signature.writes) :], (signature.result, signature.effects), inputs))
    return found


def _agree(mine: Sequence[_Call], theirs: Sequence[_Call]) -> bool:
    return all(
        form == other_form and all(map(_close, (*outputs, *after), (*other_outputs, *other_after)))
        for (outputs, form, after), (other_outputs, other_form, other_after) in zip(mine, theirs, strict=True)
    )


def _drawn(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other values: those of whole numbers at other places, so that an index stays an index."""
    if not leaf.is_floating_point() or not leaf.numel():
        return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator, device="cpu")].reshape(leaf.shape)
    values = widened(leaf.detach())
    noise = torch.randn(leaf.shape, generator=generator, device="cpu").to(values)
    return (values * 0.7 + noise * values.abs().mean().clamp(min=1e-3)).to(leaf.dtype)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    a, b = widened(a), widened(b)
    finite = b[b.isfinite()].abs()
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(finite.max()) if finite.numel() else 0.0, equal_nan=True)
