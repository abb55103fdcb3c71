"""The comparisons behind `tsopt verify`."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsopt.cli.process import lacking
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.signature import Signature, mismatch
from tsopt.compiler.calls.tensor_file import read_tensors
from tsopt.errors import AccuracyError, BackendError, BundleError, TsoptError
from tsopt.runtime.bundles.members import Bundle, reading
from tsopt.runtime.bundles.opening import CHECK, run_on_reference
from tsopt.runtime.bundles.store import vetted
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.racing.environment import is_installed

EXPORT_AGAIN = "export the model again on this machine"


@dataclass(frozen=True, slots=True)
class Checked:
    """A bundle that passed; the seconds to load it into this process, including the libraries it needs."""

    verdict: str
    load_seconds: float


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    """Puts the default dtype back, which `_load` takes from a bundle."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_default_dtype()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_default_dtype(before)


@_default_dtype_kept()
def against_record(bundle: Path, trust: bool) -> Checked:
    """Runs the bundle on its stored inputs and compares the outputs with those the model gave.

    Raises:
        BundleError: the bundle, or its reference data, is missing or damaged.
        BackendError: it fails here.
        AccuracyError: its outputs differ here.
    """
    executable, seconds, (inputs, expected) = reading(bundle, lambda found: _with_record(found, trust))
    compare = _comparison()
    signature = executable.signature
    returned = signature.outputs[len(signature.writes) :]
    worst = 0.0
    answers = run_on_reference(executable, inputs, bundle, failure=BackendError, fix=EXPORT_AGAIN)
    for item, value, reference in zip(returned, answers, expected, strict=True):
        found = compare(value, reference, executable)
        worst = max(worst, found.max_difference)
        if not found.ok:
            raise AccuracyError(
                "the bundle's outputs differ from the model's reference outputs",
                where=f"{bundle}, output {item.name}",
                why=found.reason,
                fix=EXPORT_AGAIN,
            )
    return Checked(f"intact, outputs match the model's reference outputs (max difference {worst:.2e})", seconds)


@_default_dtype_kept()
def against_model(bundle: Path, trust: bool, loaded: Any, seed: int, *, eval_mode: bool = False) -> Checked:
    """Compares the bundle with a live model on fresh inputs.

    Args:
        eval_mode: treat a model in training mode as if it were in eval mode.

    Raises:
        BundleError: the bundle is missing or damaged.
        BackendError: it fails on inputs the model accepts.
        AccuracyError: its outputs differ.
    """
    executable, seconds = reading(bundle, lambda found: _load(found, trust))
    from tsopt.compiler.calls.example import as_examples
    from tsopt.compiler.capture.capture import capture
    from tsopt.compiler.protect import as_eval
    from tsopt.runtime.checking.accuracy import verify

    example = as_examples(loaded.example_input)[0]
    program = capture(loaded.model, example, eval_mode=eval_mode, allow_nan=True)
    model = as_eval(loaded.model, eval_mode)
    found = verify(model, executable, example, program=program, precision=executable.precision, seed=seed + 1)
    return Checked(str(found), seconds)


def _comparison() -> Callable[[Any, Any, Executable], Any]:
    """Compares what an executable returns with a reference: tensors, or arrays if torch is not installed."""
    if not is_installed("torch"):
        from tsopt.runtime.checking import compare_arrays

        limits = compare_arrays.LIMITS
        return lambda value, wanted, run: compare_arrays.compare_arrays(
            value, wanted, limit=run.tolerance or limits.get(run.precision)
        )
    from tsopt.runtime.checking.accuracy import LIMITS
    from tsopt.runtime.checking.compare import compare

    return lambda value, wanted, run: compare(value, wanted, limit=run.tolerance or LIMITS.get(run.precision))


def _load(bundle: Bundle, trust: bool) -> tuple[Executable, float]:
    """Tries a bundle in a separate process, then loads it here and times the loading."""
    try:
        _take_default_dtype(bundle)
        opened = vetted(bundle, trust, probe=True)
        start = time.perf_counter()
        return opened(), time.perf_counter() - start
    except TsoptError as error:
        absent = lacking(error.__cause__)
        if absent is None:
            raise
        raise absent from error


def _take_default_dtype(bundle: Bundle) -> None:
    """A command has no settings of the user's: the default dtype is that which the bundle was saved under."""
    wanted = signature_json.from_json(bundle.manifest.get("signature")).default_dtype
    if wanted and is_installed("torch"):
        torch = importlib.import_module("torch")
        torch.set_default_dtype(getattr(torch, wanted))


def _with_record(bundle: Bundle, trust: bool) -> tuple[Executable, float, tuple[list[Any], list[Any]]]:
    executable, seconds = _load(bundle, trust)
    return executable, seconds, _record(bundle.directory, executable.signature)


def _record(bundle: Path, signature: Signature) -> tuple[list[Any], list[Any]]:
    """The stored inputs and outputs, checked against the types of the signature."""
    from safetensors import SafetensorError

    try:
        stored = read_tensors(bundle / CHECK, arrays=not is_installed("torch"))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # numpy has no bfloat16
        raise BundleError(
            "the bundle's reference data cannot be read",
            where=str(bundle / CHECK),
            why=str(error),
            fix=EXPORT_AGAIN,
        ) from error
    returned = signature.outputs[len(signature.writes) :]
    inputs = _fitting(bundle, stored, "input", signature.user_inputs)
    return inputs, _fitting(bundle, stored, "output", returned)


def _fitting(bundle: Path, stored: dict[str, Any], kind: str, items: Sequence[Any]) -> list[Any]:
    count = sum(key.startswith(f"{kind}.") for key in stored)
    if count != len(items):
        raise _unfit(bundle, f"it has {count} {kind}s, but the signature has {len(items)}")
    values = []
    for position, item in enumerate(items):
        value = stored.get(f"{kind}.{position}")
        if value is None:
            raise _unfit(bundle, f"{kind}.{position} is missing")
        if hasattr(value, "to"):
            value = value.to(item.type.device)
        reason = mismatch(item.type, value, item.axes)
        if reason:
            raise _unfit(bundle, f"{kind} {item.name!r} {reason}")
        values.append(value)
    return values


def _unfit(bundle: Path, why: str) -> BundleError:
    return BundleError(
        "the bundle's reference data does not match its signature",
        where=str(bundle / CHECK),
        why=why,
        fix=EXPORT_AGAIN,
    )
