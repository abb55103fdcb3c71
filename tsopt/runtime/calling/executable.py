"""A compiled program that is called like the model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.compiler.calls.memory import overlap
from tsopt.compiler.calls.result_views import INPUT, JOINT, OUTPUT, WEIGHT, View, of_copies
from tsopt.compiler.calls.signature import Dim, Signature, mismatch, same_sizes
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, SignatureError
from tsopt.runtime import forks
from tsopt.runtime.backends.table import BACKENDS
from tsopt.runtime.calling.ambient import objection, untraced
from tsopt.runtime.calling.result_code import Unbind, unbind_of
from tsopt.runtime.calling.signature_guard import Leaves, leaves_of, other_mode, quick_call
from tsopt.runtime.untrusted_text import printable

if TYPE_CHECKING:
    from tsopt.compiler.graph.program import Program


Runner = Callable[[Sequence[Any]], Sequence[Any]]
REMEMBERED = 256  # combinations of sizes
NO_GRADIENTS = "call the model itself, or use torch.no_grad() if gradients are not needed"


class Executable:
    """A compiled program that is called like the model.

    Checks that a call matches the signature it was compiled for, runs it, checks the outputs against the signature,
    writes state back, and nests the outputs as the model does.

    Args:
        backend: name of the backend.
        signature: inputs and outputs.
        run: flat inputs (the user's, then state) to flat outputs (writes, then the user's).
        state: the live tensors of the state inputs, in order.
        save: writes the files that rebuild it into a directory, or a single file if the path is not a directory;
            `options` rebuild its session.
        hand_over: writes what its backend opens once more in another process, if that is not what `save` writes.
        code: whether reading those files executes code; a bundle then requires trust.
        notes: how the backend differs from eager, for the caller.
        precision: the precision of matrix products, one of PRECISIONS.
        tolerance: how far a call may be from eager, as a relative error; None for the limit of the precision.
        reference: the captured program, by which audits tell rounding from errors.
        model: the name of the model.
        place: `package.module:Class` of the backend, for bundles of a custom backend.
    """

    def __init__(
        self,
        backend: str,
        signature: Signature,
        run: Runner,
        *,
        state: Sequence[Any] = (),
        save: Callable[[Path], None] | None = None,
        hand_over: Callable[[Path], None] | None = None,
        options: Mapping[str, Any] | None = None,
        code: bool = False,
        notes: Sequence[str] = (),
        precision: str = FP32,
        tolerance: float | None = None,
        reference: Program | None = None,
        place: str = "",
        model: str = "",
    ) -> None:
        self.backend, self.place, self.model = backend, place, model
        self.precision, self.tolerance = precision, tolerance
        self.signature = signature
        self.save, self.hand_over = save, hand_over or save
        self.options = dict(options or {})
        self.code = code
        self.notes = tuple(notes)
        self.state = list(state)
        if sys.modules.get("torch") is not None:
            untraced(type(self).__call__)
        self.reference = reference
        self.draws: bool | None = None  # whether calls of the model draw random numbers; None: as `reference` does
        self.limits: tuple[Dim, ...] = ()  # how far the ranges of its dynamic sizes can be widened
        self.passed_over: tuple[str, ...] = ()  # candidates that were tried before it, and why they were not chosen
        # Of the quantized layers of its program, in graph order: whether each runs on integers; empty where that is not
        # for the engine to choose.
        self.int8: tuple[bool, ...] = ()
        self._bare = run
        self._leaves: Leaves = self._leaves_at_first
        self._outputs = [_expectation(o.type)[1:3] for o in signature.outputs]
        self._axes = [o.axes for o in signature.outputs] if any(o.axes for o in signature.outputs) else []
        self._writes = len(signature.writes)
        positions = {item.name: i for i, item in enumerate(signature.inputs)}
        self._targets = [positions[str(item.writes)] for item in signature.writes]
        self._unbind: Unbind = self._unbind_at_first
        self._single = signature.result.kind == "leaf" and not self._writes and not signature.effects
        self.share(())
        self._runs(run)
        forks.tell(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.quick is not None and len(args) == 1 and not kwargs:
            result = self.quick(args[0])
            if result is not None:
                return result
        leaves = self.accepts(args, kwargs)
        if leaves is None:
            leaves = self.bind(args, kwargs)
        return self.run_leaves(leaves, args, kwargs)

    def called_as(self, signature: Signature) -> Executable:
        """The same executable for another nesting of the same tensors, or for other ranges of sizes."""
        made = Executable(
            self.backend,
            signature,
            self._run,
            state=self.state,
            save=self.save,
            options=self.options,
            code=self.code,
            notes=self.notes,
            precision=self.precision,
            tolerance=self.tolerance,
            reference=self.reference,
            place=self.place,
            model=self.model,
        )
        made.limits, made.draws = self.limits, self.draws
        made.share(self.returned_weights)
        return made

    def __repr__(self) -> str:
        inputs = ", ".join(f"{item.name}: {item.type}" for item in self.signature.user_inputs)
        dims = f"; {', '.join(map(str, self.signature.dims))}" if self.signature.dims else ""
        return printable(f"<tsopt.Executable {self.model or 'model'}({inputs}{dims}) on {self.backend}>")

    def share(self, weights: Iterable[Any]) -> None:
        """From now on, results that are these weights of the model or views of them are just that; others are copies.

        Args:
            weights: in the order in which views count them; None for one that is not known here.
        """
        self.returned_weights = tuple(weights)
        returned = self.signature.returned if sys.modules.get("torch") is not None else ()
        known = [number for number, weight in enumerate(self.returned_weights) if weight is not None]
        views = [(i, view) for i, view in enumerate(of_copies([item.view for item in returned], known)) if view]
        # Views of results behind those of inputs: what they are views of is settled then.
        self._views = sorted(views, key=lambda found: found[1].kind == OUTPUT)
        self._parts_by_size = any(view.places is not None or view.where for _, view in self._views)
        self._placed: dict[tuple[Any, ...], list[tuple[int, View]]] = {}  # the views, by the sizes of a call
        viewed = {i for i, _ in self._views}
        self._lasting = [i for i, item in enumerate(returned) if item.lasting and i not in viewed]

    def after(self, check: Callable[[], None] | None) -> Executable:
        """The same executable with a check before each run; None removes the check."""
        bare = self._bare
        made = self.called_as(self.signature)
        made._bare = bare

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            check()  # type: ignore[misc]
            return bare(inputs)

        made._runs(bare if check is None else run)
        return made

    def forked(self) -> None:
        """Its engine has no threads here. Most compute without, in the thread of the call; none may be freed."""
        info = BACKENDS.get(self.backend)
        if info is None or info.through_onnx:
            forks.never_free(self._run, self._bare)
        if info is not None and info.through_onnx:
            forks.end_at_once()
        if self.options.get("parallel"):
            self._bare = self._threadless
            self._runs(self._bare)

    def _threadless(self, inputs: Sequence[Any]) -> Sequence[Any]:
        raise BackendError(
            f"{self.backend} cannot run this call",
            why="the option parallel=True needs threads, which are those of the process that has forked this one",
            fix="compile or load the model in the process that calls it, or leave out parallel=True",
        )

    def _runs(self, run: Runner) -> None:
        self._run = run
        self.quick: Callable[[Any], Any] | None = None if self.state else self._quick_at_first

    # All three are compiled at the first call that needs them: that takes as long as opening a small bundle.
    def _quick_at_first(self, value: Any) -> Any:
        self.quick = quick_call(self.signature, self._run, self._broken)
        return None if self.quick is None else self.quick(value)

    def _leaves_at_first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        self._leaves = leaves_of(self.signature)
        return self._leaves(args, kwargs)

    def _unbind_at_first(self, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._unbind = unbind_of(self.signature)
        return self._unbind(values, args, kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The call's tensors in signature order, after a thorough check.

        Raises:
            SignatureError: the call does not match the signature, or a mode is active that a compiled form does not
                support.
        """
        _check_served(objection(()))  # before sizes are compared, which a tracer would note
        leaves = self.signature.bind(args, kwargs)
        torch = sys.modules.get("torch")
        for item, leaf in zip(self.signature.user_inputs, leaves, strict=True):
            if torch is not None and not isinstance(leaf, torch.Tensor):
                kind = f"{type(leaf).__module__} array"
                raise SignatureError(
                    f"input {item.name!r} is a {kind}, expected a tensor", fix="torch.from_numpy(array)"
                )
        given = "an input aliases a tensor of the model that the call writes"
        _check_served(objection(leaves) or (given if self._given_state(leaves) else ""))
        _check_served(
            other_mode(self.signature), fix="call it under the settings of the example, or call the model itself"
        )
        return leaves

    def accepts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """The call's tensors if the call matches the signature, else None. Takes a few microseconds."""
        leaves = self._leaves(args, kwargs)
        return None if leaves is None or self._given_state(leaves) else leaves

    def _given_state(self, leaves: Sequence[Any]) -> bool:
        """Whether a call passes memory that the model keeps its state in, which the call writes."""
        return bool(self.state) and any(overlap(leaf, kept) for leaf in leaves for kept in self.state)

    def run_leaves(self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs on the tensors of a matching call, in signature order; returns what the model would return."""
        outputs = self.run_flat(leaves)
        return outputs[0] if self._single else self._unbind(outputs, args, kwargs)

    def run_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs on matching tensors; returns the output tensors in signature order, without those written back."""
        inputs = [*leaves, *self.state] if self.state else leaves
        outputs = self._run(inputs)
        if len(outputs) != len(self._outputs):
            raise self._broken(outputs)
        if not self._as_promised(outputs):
            raise self._broken(outputs)
        for position, value in zip(self._targets, outputs, strict=False):
            _write(inputs[position], value)
        returned = outputs[self._writes :] if self._writes else outputs
        return self._as_memory(returned, inputs) if self._views or self._lasting else returned

    def _as_memory(self, returned: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """Results as eager hands them out: memory of an input where they are that, and never memory of the engine."""
        made = list(returned)
        for position in self._lasting:
            made[position] = made[position].clone()
        joint: dict[int, Any] = {}
        for position, view in self._views_at(made, inputs) if self._parts_by_size else self._views:
            value = made[position]
            if view.kind == JOINT:
                memory = joint.get(view.of)
                memory = joint[view.of] = value.new_empty(view.layout) if memory is None else memory
                made[position] = view.moved(memory, value)
            else:
                bases = inputs if view.kind == INPUT else self.returned_weights if view.kind == WEIGHT else made
                found = view.within(bases[view.of], value)
                made[position] = value.clone() if found is value and view.kind == WEIGHT else found
        return made

    def _views_at(self, made: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[int, View]]:
        """The views as they are for the sizes of a call."""
        given = inputs[: len(self.signature.user_inputs)]
        shapes = [tuple(made[position].shape) for position, _ in self._views]
        key = (*[tuple(leaf.shape) for leaf in given], *shapes)
        placed = self._placed.get(key)
        if placed is None:
            sizes = {name: next(iter(size)) for name, size in self.signature.sizes_of(given).items()}
            pairs = zip(self._views, shapes, strict=True)
            placed = [(i, found) for (i, view), shape in pairs if (found := view.at(sizes, shape)) is not None]
            if len(self._placed) >= REMEMBERED:
                self._placed = {}
            self._placed[key] = placed
        return placed

    def _as_promised(self, outputs: Sequence[Any]) -> bool:
        if not self._axes:
            for value, (dtype, shape) in zip(outputs, self._outputs, strict=True):
                if value.dtype != dtype or value.shape != shape:
                    return False
            return True
        return all(
            value.dtype == dtype and same_sizes(tuple(value.shape), shape, axes)
            for value, (dtype, shape), axes in zip(outputs, self._outputs, self._axes, strict=True)
        )

    def _broken(self, outputs: Sequence[Any]) -> BackendError:
        if len(outputs) != len(self._outputs):
            return BackendError(
                f"{self.backend} returned {len(outputs)} outputs, expected {len(self._outputs)}",
                fix="use another backend for this model",
            )
        for item, value in zip(self.signature.outputs, outputs, strict=True):
            reason = mismatch(item.type, value, item.axes)
            if reason:
                return BackendError(
                    f"{self.backend} returned an unexpected output: {item.name!r} {reason}",
                    fix="use another backend for this model",
                )
        return BackendError(f"{self.backend} returned outputs that do not match the signature")


def _check_served(reason: str, fix: str = NO_GRADIENTS) -> None:
    if reason:
        raise SignatureError(
            "the compiled model cannot serve this call",
            why=reason,
            fix=fix,
        )


def _expectation(type_: TensorType) -> tuple[Any, Any, tuple[int, ...], Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        numpy = importlib.import_module("numpy")
        return numpy.ndarray, type_.dtype, type_.shape, None
    return torch.Tensor, getattr(torch, type_.dtype), type_.shape, torch.device(type_.device)


def _write(target: Any, value: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(target, torch.Tensor):
        target[...] = value
        return
    with torch.no_grad():
        target.copy_(value)
