"""A candidate as a metric calls it: with batches of other sizes, and like a module in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.calibration import are_rows, pieces
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import Structure, flatten, unflatten
from tsopt.compiler.protect import InEvalMode
from tsopt.errors import SignatureError

READS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
STAYS = ("eval", "train", "to", "requires_grad_")  # a candidate has one mode, and is where its example is


class InPieces:
    """Wraps a candidate for a metric.

    Larger batches are cut to the size that it takes; rows that do not fill a batch are repeated, and the results of
    the repetitions dropped. What a metric reads of a module beside (parameters, configuration) is the model's.

    Args:
        model: what the candidate replaces.

    Attributes:
        has_nan: whether a call has returned NaN.
    """

    training = False

    def __init__(self, called: Callable[..., Any], signature: Signature, model: Callable[..., Any]) -> None:
        self._called, self._signature = called, signature
        self._model = model.module if isinstance(model, InEvalMode) else model
        self.has_nan = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._called(*args, **kwargs)
        except SignatureError:
            leaves, structure = self._signature.flattened(args, kwargs)
            if not are_rows(self._signature, leaves) or not len(leaves[0]):
                raise
            result = self._in_batches(leaves, structure)
        self.has_nan = self.has_nan or any(map(_has_nan, flatten(result)[0]))
        return result

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if name in STAYS:
            return self._itself
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._model, name)
        if name in READS or not callable(found):
            return found
        raise AttributeError(f"{name!r} would run the model itself")

    def _itself(self, *args: Any, **kwargs: Any) -> InPieces:
        return self

    def _in_batches(self, leaves: Sequence[torch.Tensor], structure: Structure) -> Any:
        """Calls with batches of the right size, of which the last may be filled up, and concatenates the results."""
        count, size = len(leaves[0]), self._signature.user_inputs[0].type.shape[0]
        batches = pieces(self._signature, leaves)
        rest = [leaf[len(batches) * size :] for leaf in leaves]
        if left := len(rest[0]):
            batches.append([leaf[torch.arange(size, device=leaf.device) % left] for leaf in rest])
        found = []
        for batch in batches:
            args, kwargs = unflatten(structure, batch)
            found.append(flatten(self._called(*args, **kwargs)))
        form = found[0][1]
        for index, place in form.paths():
            output = found[0][0][index]
            if not output.dim() or len(output) != size:
                name = f"output {place!r}" if place else "the output"
                raise SignatureError(
                    f"a batch of {count} rows cannot be cut to the {size} that candidates take",
                    why=f"{name} has shape {list(output.shape)}, and only outputs with one row per input row can be "
                    "joined",
                    fix=f"call the model with {size} rows at a time, or pass dynamic= for other sizes",
                )
        joined = [torch.cat(values)[:count] for values in zip(*(values for values, _ in found), strict=True)]
        return unflatten(form, joined)


def _has_nan(value: Any) -> bool:
    is_real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return is_real and bool(value.isnan().any())
