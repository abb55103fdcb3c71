"""Opens the files of a bundle as an executable. Does not read the manifest."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsopt.compiler.calls.signature import Input, Output, Signature, mismatch
from tsopt.compiler.calls.tensor_file import read_tensors
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, BundleError, TsoptError
from tsopt.runtime.backends.backend import Loads, compile, race_options
from tsopt.runtime.backends.table import PLAIN, BackendInfo, info_of
from tsopt.runtime.bundles.members import damaged
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.racing.environment import is_installed
from tsopt.runtime.telemetry import without_telemetry

log = logging.getLogger("tsopt")
CHECK = "check.safetensors"  # the example's inputs and eager's answers
STATE = "state.safetensors"  # what the model writes in a call, as it was when the bundle was made


def check_trust(info: BackendInfo, directory: Path, trust: bool) -> None:
    """Raises BundleError where reading the files of a backend executes them, and nobody has said that it may."""
    if info.code and not trust:
        raise BundleError(
            f"loading the bundle executes code ({info.code})",
            where=str(directory),
            why="the code comes from the author of the bundle",
            fix="if you trust its source, use tsopt.load(path, trust=True)",
        )


def check_default_dtype(info: BackendInfo, directory: Path, signature: Signature) -> None:
    """Raises BundleError where torch would compute the program otherwise than where it was saved."""
    torch = sys.modules.get("torch")
    wanted = signature.default_dtype
    if torch is None or not wanted or info.through_onnx or torch.get_default_dtype() is getattr(torch, wanted):
        return
    raise BundleError(
        f"the bundle was saved under the default dtype {wanted}, and that of this process is {default_dtype(torch)}",
        where=str(directory),
        why="what its model computes follows the default dtype",
        fix=f"call torch.set_default_dtype(torch.{wanted}) before you load it",
    )


def default_dtype(torch: Any) -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def require(backend: str) -> None:
    """Imports what the files of a backend need.

    Raises:
        BackendError: it is not installed, or it is and cannot be used.
    """
    for library, part in info_of(backend).needs.items():
        try:
            with without_telemetry():
                getattr(importlib.import_module(library), part)
        except Exception as error:  # a broken installation raises whatever it breaks on
            if isinstance(error, ModuleNotFoundError) and error.name == library:
                raise BackendError(
                    f"the bundle needs {library}, which is not installed", fix=f"pip install {library}"
                ) from error
            raise BackendError(
                f"the bundle needs {library}, which is installed but does not work",
                why=f"{type(error).__name__}: {str(error)[:200]}",
                fix=f"pip install --force-reinstall {library}",
            ) from error


def open_bundle(
    directory: Path, backend: str, options: dict[str, Any], signature: Signature, trust: bool
) -> Executable:
    """The executable of a bundle's files.

    Raises:
        BundleError: the files are damaged, or code that is not trusted.
        BackendError: a backend of the user's own cannot be imported, or an engine refuses the files.
    """
    info = info_of(backend)
    check_trust(info, directory, trust)
    if info.through_onnx:  # whose files name every dtype
        signature = replace(signature, default_dtype="")
    cls = info.load()
    if not is_loaded_by(cls):
        return _of_program(directory, info, options, signature)
    runner = cls.load_runner(directory, signature, options)
    state = _read_state(directory, signature)
    place = info.place if info.is_own else ""
    return Executable(info.name, signature, runner, state=state, options=options, code=bool(info.code), place=place)


def is_loaded_by(cls: type[Loads] | type) -> bool:
    """Whether a backend reads its own files; those of the others hold a Program."""
    return hasattr(cls, "load_runner")


def _of_program(directory: Path, info: BackendInfo, options: Mapping[str, Any], signature: Signature) -> Executable:
    from tsopt.compiler.graph.quantized import in_float
    from tsopt.compiler.graph.serialize import read_program
    from tsopt.compiler.graph.stored_ops import fill_uninitialized

    program = read_program(directory, _read_state(directory, signature))
    fill_uninitialized(program)
    threads = options.get("threads")
    if info is not PLAIN:
        own = {name: options[name] for name in info.options() if name in options}
        if own.get("precision", FP32) not in (FP32, *info.precisions):
            raise damaged(directory, f"{info.name} has no precision {str(own['precision'])[:40]!r}")
        try:
            return compile(program, info.name, share_weights=True, **race_options(info.name, threads) | own)
        except BackendError as error:  # on this machine torch's own kernels may be the faster ones, or the only ones
            log.info("%s: %s", directory, error.what)
        program = in_float(program)
    return compile(program, PLAIN.name, share_weights=True, threads=threads)


def _read_state(directory: Path, signature: Signature) -> list[Any]:
    """State in signature order: torch tensors, or numpy arrays where torch is not installed."""
    wanted = {item.name: item for item in signature.state_inputs}
    return fitting(stored_tensors(directory / STATE), wanted, directory / STATE, on=False) if wanted else []


def run_on_reference(
    executable: Executable, inputs: Sequence[Any], place: Path, *, failure: type[TsoptError], fix: str
) -> list[Any]:
    """The outputs for the reference inputs that are stored in a bundle.

    Raises:
        TsoptError: a `failure` with the engine's words, or what the executable itself raises.
    """
    try:
        return list(executable.run_flat(inputs))
    except TsoptError:
        raise
    except Exception as error:  # the engine may raise anything
        raise failure(
            "the bundle fails on its own reference inputs",
            where=str(place),
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix=fix,
        ) from error


def stored_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file: of torch, or numpy arrays where torch is not installed. Raises BundleError."""
    try:
        return read_tensors(path, arrays=not is_installed("torch"))
    except Exception as error:  # the file decides what goes wrong; all of it means the same
        raise BundleError(
            f"{path.name} cannot be read", where=str(path), why=f"{type(error).__name__}: {error}"[:300]
        ) from error


def fitting(
    tensors: Mapping[str, Any], wanted: Mapping[str, Input | Output], path: Path, *, on: bool = True
) -> list[Any]:
    """The tensors of these names, each of the type that the signature gives it, in order.

    Args:
        on: put them on the device of the signature, too.

    Raises:
        BundleError: one is missing, or of another type.
    """
    found = []
    for name, item in wanted.items():
        value = tensors.get(name)
        if value is None:
            raise BundleError("a stored tensor is missing", where=str(path), why=f"{name[:80]!r} does not exist")
        type_ = replace(item.type, device="cpu")
        reason = mismatch(type_, value, item.axes)
        if reason:
            raise BundleError("a stored tensor does not match the signature", where=str(path), why=f"{name!r} {reason}")
        found.append(value.to(item.type.device) if on and item.type.device != "cpu" else value)
    return found
