"""Optimized: what `optimize` hands back. Runs the winner; a call of another form is captured once, or goes eager."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.example import Example
from tsopt.compiler.memory import overlaps
from tsopt.compiler.program import Program
from tsopt.compiler.structure import Structure, flatten
from tsopt.compiler.types import TensorType, unlike_a_tensor
from tsopt.errors import SignatureError, TsoptError
from tsopt.runtime import artifact
from tsopt.runtime.accuracy import verify
from tsopt.runtime.ambient import Unserved, objection_to, untraced
from tsopt.runtime.backend import Executable, compile
from tsopt.runtime.guard import leaves_of
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
POLICIES = ("capture", "eager", "error")
MAX_FORMS = 16  # kept at a time, those that were called last
MAX_CAPTURES = 2 * MAX_FORMS  # in all: each takes seconds; who calls with still more wants a program for many sizes


Form = tuple[Structure, tuple[Any, ...]]  # what calls that can be served alike have in common


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool = False) -> Form:
    """What is the same in calls that can be served alike.

    Args:
        aliasing: tell apart calls whose tensors share memory in other ways.
    """
    leaves, structure = flatten((args, kwargs))
    shared = overlaps(leaves) if aliasing and not any(map(unlike_a_tensor, leaves)) else ()
    return structure, (*map(_kind, leaves), *shared)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or unlike_a_tensor(leaf) is not None:
        return type(leaf), str(getattr(leaf, "layout", ""))
    return TensorType.of(leaf)


class Forms:
    """What was made for forms of call; those that were called last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Form, Callable[..., Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, form: Form) -> Callable[..., Any] | None:
        """Raises TypeError for a form with a constant that cannot be hashed: it cannot be recognized again."""
        found = self._kept.get(form)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread may just have put it away
                self._kept.move_to_end(form)
        return found

    def keep(self, form: Form, made: Callable[..., Any]) -> None:
        if len(self._kept) >= MAX_FORMS:
            self._kept.popitem(last=False)
        self._kept[form] = made


class Optimized:
    """A drop-in for the model it was made from: called the same, returns the same, without gradients.

    Attributes:
        report: what was raced and why the winner won.
        program: the optimized program.
        backend: name of the winner's backend; `eager` when the model itself is the fastest.
        executable: the winner; None when that is the model itself.
        example: the call that it was made for.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        program: Program,
        executable: Executable | None,
        report: Report,
        example: Example,
        another: Callable[[Example], Executable],
        on_new_signature: str = "capture",
        on_gradients: str = "eager",
    ) -> None:
        self.model, self.program, self.report = model, program, report
        self.backend = "eager" if executable is None else executable.backend
        self.executable, self.example = executable, example.renewed()  # what the user makes of theirs is their own
        self._another, self._policy = another, on_new_signature
        self._unserved = Unserved(model, report.model, on_gradients)
        self._leaves = leaves_of(program.signature) if executable is None else executable.accepts
        self._forms = Forms()
        self._captures = 0
        self._lock = threading.Lock()

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        executable = self.executable
        if executable is None:
            return self._by_the_model(args, kwargs)
        quick = executable.quick
        if quick is not None and len(args) == 1 and not kwargs:
            result = quick(args[0])
            if result is not None:
                return result
        leaves = self._leaves(args, kwargs)
        if leaves is not None:
            return executable.run_leaves(leaves, args, kwargs)
        return self._thorough(executable, args, kwargs)

    def _by_the_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._leaves(args, kwargs) is None:
            reason = objection_to(args, kwargs)
            if reason:
                return self._unserved(reason, args, kwargs)
            if self._policy == "error":  # whether a form is refused must not depend on who won
                self.program.signature.bind(args, kwargs)
        return self._eager(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _thorough(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        try:
            leaves = executable.bind(args, kwargs)
        except SignatureError:
            if self._policy == "error":
                raise
            return self._by_form(args, kwargs)
        return executable.run_leaves(leaves, args, kwargs)

    def _by_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._form(args, kwargs)
        if not isinstance(found, Executable):
            return found(*args, **kwargs)
        try:
            leaves = found.bind(args, kwargs)
        except SignatureError as error:  # the model asks what no capture answers as this call does
            self._note("a call", f"eager, because: {error.what}")
            return self._eager(*args, **kwargs)
        return found.run_leaves(leaves, args, kwargs)

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self._policy == "eager":
            return self._eager
        form = form_of(args, kwargs, aliasing=self.program.signature.aliasing)
        try:
            found = self._forms.get(form)
        except TypeError:
            return self._eager
        if found is None:
            with self._lock:
                found = self._forms.get(form) or self._add(form, Example(args, kwargs))
        return found

    def _add(self, form: Form, example: Example) -> Callable[..., Any]:
        if self._captures >= MAX_CAPTURES:
            self._note("any further form", f"eager, {MAX_CAPTURES} were captured; dynamic= makes one program for many")
            return self._eager
        self._captures += 1
        made = self._capture(example, ", ".join(str(kind) for kind in form[1] if isinstance(kind, TensorType)))
        self._forms.keep(form, made)
        return made

    def _capture(self, example: Example, form: str) -> Callable[..., Any]:
        try:
            executable = self._another(example)
        except TsoptError as error:
            self._note(form, f"eager, because: {error.what}")
            return self._eager
        self._note(form, f"captured for {executable.backend}")
        return executable

    def _note(self, form: str, outcome: str) -> None:
        log.info("call of another form, %s: %s", form, outcome)
        if (form, outcome) not in self.report.signatures:
            self.report = self.report.with_signature(form, outcome)

    def save(self, path: str | Path) -> Path:
        """Writes a bundle that `tsopt.load` reads; atomically: a complete bundle or none.

        When eager won, the optimized program is stored, to be run by torch, once it has been verified.

        Raises:
            ArtifactError: the path cannot be written or holds something else.
            AccuracyError: eager won, because the program computes something else.
        """
        executable = self.executable or self.verified("eager")
        return artifact.save(executable, path, self.model, self.example, self.report)

    def verified(self, backend: str, **options: Any) -> Executable:
        """The optimized program on another backend, verified against the model: for a file in a format of its own.

        Raises:
            BackendError: the backend cannot take it, or it fails.
            AccuracyError: it computes something else.
        """
        executable = compile(self.program, backend, **options)
        verify(self.model, executable, self.example, program=self.program)
        return executable

    def __repr__(self) -> str:
        return f"<tsopt.Optimized {self.report.model} on {self.backend}, {self.report.why}>"
