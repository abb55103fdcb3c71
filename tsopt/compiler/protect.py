"""Restores what a block changes: the user's model, random state, gradients, threads and warnings.

Owns one context manager; capture, verification and timing run inside it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tsopt.compiler.calls.snapshot import in_slots, set_attribute, slot_names
from tsopt.compiler.contents import Contents
from tsopt.compiler.model_reads import reads_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.quiet import unwarned
from tsopt.compiler.random_state import RandomState
from tsopt.compiler.script_state import ScriptState
from tsopt.compiler.small_state import has_values, is_small_state
from tsopt.compiler.tensor_bytes import same_bytes


@contextmanager
def protected(
    model: Any,
    *,
    written: Iterable[torch.Tensor] = (),
    inference: bool = True,
    among_threads: bool = False,
    draws: bool = True,
) -> Iterator[None]:
    """Runs a block in which the model may be called and traced, then puts back what that changed.

    Put back: attributes of every module (tracing transformers' Swin leaves a traced tensor in one), the memory of
    parameters (a model may convert its own), the values of buffers and of other tensors in attributes, random number
    generators, default dtype, thread count, grad mode, warning filters; and, where no other thread may have changed
    them, environment variables and the working directory; the variable that torch's compiler sets in any case. Of a
    function, that is so of the modules that its code reads.

    Args:
        written: parameters that the model writes in a call (an embedding with max_norm); put back as well.
        inference: run the block without gradients.
        among_threads: as for `kept`.
        draws: the block may draw random numbers. Otherwise they are put back only where no other thread runs, which
            would draw once more what it has drawn meanwhile.
    """
    modules, written, of_function = _modules_reached(model), list(written), _is_function(model)
    among_threads = among_threads or (of_function and others_run())
    attributes = Attributes(modules)
    buffers = [t for m in modules for t in m._buffers.values() if isinstance(t, torch.Tensor) and has_values(t)]
    parameters = [p for m in modules for p in m._parameters.values() if p is not None and has_values(p)]
    tables = _tables_with(written if among_threads else (), modules)
    memory = [(tensor, tensor.data) for tensor in (*parameters, *buffers)]
    plain = [t for m in modules for t in vars(m).values() if is_small_state(t)]
    known = written if among_threads else (*buffers, *plain, *written)
    values = [(t, t.detach().clone()) for t in {id(t): t for t in known}.values() if has_values(t)]
    mine = {id(tensor) for tensor in written}
    random_state = RandomState.now()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    variables, directory, alone = dict(os.environ), _directory(), not others_run()
    try:
        with unwarned(), torch.set_grad_enabled(not inference and torch.is_grad_enabled()):
            yield
    finally:
        # The process first: whatever becomes of the model, its switches are back.
        if draws or not others_run():
            random_state.restore()
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        alone = alone and not others_run()
        # Code of a function reaches modules that it does not call, which another thread may be training.
        among_threads = among_threads or (of_function and not alone)
        _put_back(variables, {*os.environ, *variables} if alone else _set_by_inductor(variables))
        if alone and directory and _directory() != directory:
            with contextlib.suppress(OSError):  # it may be gone
                os.chdir(directory)
        attributes.put_back(among_threads=among_threads)
        _put_back_tables(tables)
        with torch.no_grad():
            for tensor, data in memory:
                # Another thread may have given it other memory, but hardly converts a model that is being called.
                is_mine = not among_threads or id(tensor) in mine or tensor.dtype != data.dtype
                if is_mine and not _same_memory(tensor, data):
                    tensor.data = data
            for tensor, value in values:
                # NOTE: an unnecessary write would increase the version counter of an unchanged buffer.
                if (not among_threads or id(tensor) in mine) and not same_bytes(tensor, value):
                    tensor.detach().copy_(value)


@contextmanager
def kept(
    modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor], *, among_threads: bool = False, draws: bool = True
) -> Iterator[None]:
    """Runs calls of a model in between others, then puts back what they have changed of it, and random numbers.

    The part of `protected` that a call may change without meaning to, for where milliseconds are too long.

    Args:
        tensors: whose values are put back.
        among_threads: another thread may meanwhile load weights or change the mode, and that stays: of parameters,
            buffers and submodules, only the tensors given are put back.
        draws: as for `protected`.
    """
    tensors = list(tensors)
    modules = list(modules)
    attributes = Attributes(modules)
    tables = _tables_with(tensors, modules)
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    random_state = RandomState.now()
    try:
        yield
    finally:
        if draws or not others_run():
            random_state.restore()
        attributes.put_back(among_threads=among_threads)
        _put_back_tables(tables)
        with torch.no_grad():
            for tensor, value in values:
                if not same_bytes(tensor, value):
                    tensor.detach().copy_(value)


_Table = dict[str, torch.Tensor | None]


def _tables_with(tensors: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> list[tuple[_Table, _Table]]:
    """Tables of buffers, and what each holds of these tensors."""
    own = set(map(id, tensors))
    tables = [module._buffers for module in modules] if own else []
    return [(table, {name: item for name, item in table.items() if id(item) in own}) for table in tables]


def _put_back_tables(tables: Iterable[tuple[_Table, _Table]]) -> None:
    for table, held in tables:
        if any(table.get(name) is not tensor for name, tensor in held.items()):
            table.update(held)


class InEvalMode:
    """A module called as if it were in eval mode; its flags are what they were before and after each call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with training_flags(self.module, False):
            return self.module(*args, **kwargs)


def as_eval(model: Callable[..., Any], eval_mode: bool) -> Callable[..., Any]:
    """The model as it is called: an exported program as a module; under `eval_mode` with its training flags off."""
    if isinstance(model, ExportedProgram):
        return model.module()
    if not eval_mode or not isinstance(model, nn.Module) or not any(training_of(model.modules())):
        return model
    return InEvalMode(model)


def modules_of(model: Any) -> list[nn.Module]:
    """The modules behind what is called; none for a function."""
    model = model.module if isinstance(model, InEvalMode) else model
    return list(model.modules()) if isinstance(model, nn.Module) else []


def _is_function(model: Any) -> bool:
    return callable(model) and not isinstance(model, (nn.Module, InEvalMode))


def _modules_reached(model: Any) -> list[nn.Module]:
    """The modules behind what is called; of a function, those that its code reads."""
    return reads_of(model).modules if _is_function(model) else modules_of(model)


def training_of(modules: Iterable[nn.Module]) -> list[bool]:
    """Which of them are in training mode; False for frozen TorchScript modules, which have no such flag."""
    return [getattr(module, "training", False) for module in modules]


@contextmanager
def training_flags(model: Any, value: bool) -> Iterator[None]:
    """Sets the flag on every module without calling `train()`, which models override with effects of their own."""
    modules = [module for module in modules_of(model) if hasattr(module, "training")]
    before = training_of(modules)
    try:
        for module in modules:
            module.training = value
        yield
    finally:
        for module, flag in zip(modules, before, strict=True):
            module.training = flag


def _put_back(variables: dict[str, str], names: Iterable[str]) -> None:
    """Environment variables, one by one: other threads read them meanwhile."""
    for name in names:
        if name not in variables:
            os.environ.pop(name, None)
        elif os.environ.get(name) != variables[name]:
            os.environ[name] = variables[name]


def _set_by_inductor(variables: dict[str, str]) -> list[str]:
    """Where its files are, which it writes down for its processes; not if another thread may have set it since."""
    name, module = "TORCHINDUCTOR_CACHE_DIR", sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if module is None or name not in os.environ:
        return []
    own = os.path.abspath(variables.get(name, module.default_cache_dir()))
    return [name] if os.environ[name] == own else []


def _directory() -> str:
    """The working directory; an empty text where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = a.dtype == b.dtype and a.layout == b.layout and a.shape == b.shape
    return kind and (not has_values(a) or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()))


_TABLES = ("_parameters", "_buffers", "_modules")
_OTHERS = frozenset({*_TABLES, "training"})  # what is rarely changed by a call, and often by other threads


class Attributes:
    """The attributes of modules as they are, and what the containers, objects and generators among them hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._of = [(module, dict(module.__dict__)) for module in modules]
        self._scripts = ScriptState(modules)
        self._in_slots = [(module, in_slots(module)) for module, _ in self._of if slot_names(type(module))]
        held = chain.from_iterable(attributes.values() for _, attributes in (*self._of, *self._in_slots))
        # `protected` itself restores the tensors that are attributes of modules.
        self._contents = Contents(value for value in held if not issubclass(type(value), torch.Tensor))

    def put_back(self, *, among_threads: bool = False) -> None:
        """Restores what has changed, and touches nothing else: other threads may be looking.

        Args:
            among_threads: what others may have changed stays: tables and flags, and what has not brought a tensor.
        """
        but = _OTHERS if among_threads else ()
        for module, attributes in self._of:
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]
            for name, value in attributes.items():
                if name not in but and module.__dict__.get(name, attributes) is not value:
                    module.__dict__[name] = value
        for module, attributes in self._in_slots:
            now = in_slots(module)
            for name in now.keys() - attributes.keys():
                object.__delattr__(module, name)
            for name, value in attributes.items():
                if now.get(name, attributes) is not value:
                    set_attribute(module, name, value)
        left = [name for name in _TABLES if name in but]
        tables = [id(attributes.get(name)) for name in left for _, attributes in self._of]
        self._contents.put_back(but=tables, only_tensors="objects" if among_threads else "")
        self._scripts.put_back()

    def are_same(self) -> bool:
        """Whether nothing has changed."""
        pairs = chain(
            ((module.__dict__, attributes) for module, attributes in self._of),
            ((in_slots(module), attributes) for module, attributes in self._in_slots),
        )
        return (self._contents.are_same() and self._scripts.are_same()) and all(
            len(now) == len(attributes)
            and all(now.get(name, attributes) is value for name, value in attributes.items())
            for now, attributes in pairs
        )


def is_untouched(model: Any, call: Callable[[], Any], tensors: Iterable[torch.Tensor] = ()) -> bool:
    """Makes a call, and tells whether it has left the attributes of all modules as they were, and the buffers.

    Args:
        tensors: others that have to be as they were.
    """
    modules = _modules_reached(model)
    attributes = Attributes(modules)
    buffers = [t for m in modules for t in m._buffers.values() if isinstance(t, torch.Tensor)] + [*tensors]
    versions = [None if t.is_inference() else t._version for t in buffers]
    call()
    return attributes.are_same() and versions == [None if t.is_inference() else t._version for t in buffers]
