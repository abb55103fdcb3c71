"""Other ways to read a model, where torch.export does not take it as it is: each makes what torch.export takes.

Never part of a program's result: what they make is captured like any other model, and knows nothing of a Program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tsopt.compiler.example import Example
from tsopt.compiler.explain import first_lines
from tsopt.compiler.origin import user_frame
from tsopt.compiler.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.structure import flatten, unflatten
from tsopt.errors import NotOneGraph

FRONTENDS = ("auto", "export", "fx", "torchscript")


def replayed(exported: ExportedProgram) -> nn.Module:
    """An exported program, called as its model was, whose calls keep their places in the model's code."""
    module: Any = exported.module(check_guards=False)
    forward, tree = module.forward, exported.call_spec.in_spec

    @functools.wraps(forward)
    def replay(*args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        if form != tree:
            return forward(*args, **kwargs)  # it knows what to say
        with fx_traceback.preserve_node_meta():
            found = fx.Interpreter(module).run(*leaves, enable_io_processing=False)
        return pytree.tree_unflatten(found, exported.call_spec.out_spec)

    module.forward = replay
    return cast(nn.Module, module)


def strictly(model: Callable[..., Any], example: Example) -> nn.Module:
    """The model as dynamo reads its bytecode, which takes what tracing cannot follow, numpy for one.

    Raises:
        Exception: dynamo's, where it would leave Python between graphs.
    """
    module = model if isinstance(model, nn.Module) else _Function(model)
    return replayed(torch.export.export(module, example.args, dict(example.kwargs), strict=True))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def by_fx(flat: nn.Module, count: int) -> nn.Module:
    """A module of so many tensors as torch.fx traces it: everything else is taken as it is now.

    Raises:
        NotOneGraph: torch.fx cannot trace it, or would freeze random numbers.
    """
    tracer = _Tracer(count)
    try:
        with _NothingRandom():
            module = fx.GraphModule(flat, tracer.trace(flat))
    except NotOneGraph:
        raise
    except Exception as error:  # whatever Python does with a Proxy that it takes for a tensor
        raise NotOneGraph(
            "torch.fx cannot trace the model",
            where=user_frame(error),
            why=f"{type(error).__name__}: {first_lines(error)}",
            fix='frontend="export", which follows sizes and Python values',
        ) from error

    def replay(*leaves: torch.Tensor) -> Any:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(module).run(*leaves)

    module.forward = replay
    return module


class _Tracer(fx.Tracer):
    """Traces a module of tensors, however many, and notes where in the user's code its calls stand."""

    record_stack_traces = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        leaves = [self.create_proxy("placeholder", f"leaf_{i}", (), {}) for i in range(self.count)]
        return root_fn, [self.root, *leaves]


class _NothingRandom(TorchDispatchMode):
    """Refuses random numbers that are drawn while torch.fx traces: they would be the same in every call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotOneGraph(
                f"torch.fx would freeze the numbers that {func} draws",
                why="they do not depend on an input, so they are drawn once, while it traces",
                fix='frontend="export"',
            )
        return func(*args, **kwargs or {})


def by_torchscript(model: Callable[..., Any]) -> Any:
    """The model compiled by TorchScript.

    Raises:
        NotOneGraph: its compiler does not take it.
    """
    try:
        with protected(model):  # the compiler leaves what it has found as an attribute
            return torch.jit.script(model)
    except Exception as error:  # the compiler's own, and those of Python's parser
        raise NotOneGraph(
            "TorchScript cannot compile the model",
            where=user_frame(error),
            why=f"{type(error).__name__}: {first_lines(error)}",
            fix='frontend="auto", which needs no TorchScript',
        ) from error


def computes_the_same(program: Program, model: Callable[..., Any], example: Example) -> bool:
    """Whether a program computes what the model does, on the example and on other values.

    What a reader has frozen, a number that it took for given, shows on other values.
    """
    leaves, structure = flatten((example.args, example.kwargs))
    generator = torch.Generator().manual_seed(0)
    for values in (leaves, [_shuffled(leaf, generator) for leaf in leaves]):
        args, kwargs = unflatten(structure, [value.detach().clone() for value in values])
        with protected(model, written=list(program.state.values())):
            wanted, form = flatten(model(*args, **kwargs), share=True)
        state = [program.state[item.name].clone() for item in program.signature.state_inputs]
        with torch.no_grad():
            found = program.module()(*(value.detach().clone() for value in values), *state)
        found = found[len(program.signature.writes) :]
        if form != program.signature.result or not all(map(_close, found, wanted)):
            return False
    return True


def _shuffled(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values at other places: an index stays an index."""
    return leaf.flatten()[torch.randperm(leaf.numel(), generator=generator)].reshape(leaf.shape)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain = type(b) in (torch.Tensor, nn.Parameter) and a.dtype == b.dtype and a.shape == b.shape
    return plain and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
