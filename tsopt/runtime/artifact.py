"""The bundle `name.tsopt/`: written as a whole or not at all, read with every hash checked first.

No pickle. Files that are code (TorchScript) are read only with `trust=True`. Reading an ONNX bundle needs
neither torch nor onnx, only ONNX Runtime and numpy. What this machine neither wrote nor tried out before is opened in
a process of its own first.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt._version import __version__
from tsopt.compiler.signature import Input, Output, Signature, mismatch
from tsopt.errors import ArtifactError, BackendError, TsoptError
from tsopt.runtime import known
from tsopt.runtime.backend import CODE, PRECISIONS, compile, race_options
from tsopt.runtime.environment import is_installed
from tsopt.runtime.executable import FULL, Executable
from tsopt.runtime.members import FORMAT, MANIFEST, MAX_MANIFEST, Bundle, damaged, digest_of, facts_of, reading
from tsopt.runtime.onnx_file import check_onnx
from tsopt.runtime.probe import try_out
from tsopt.runtime.staging import staged

if TYPE_CHECKING:
    from tsopt.compiler.example import Example
    from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
CHECK, REPORT = "check.safetensors", "report.json"  # the example's inputs and eager's answers; what the race found
STATE = "state.safetensors"  # what the model writes in a call, as it was when the bundle was made
MOST_THREADS = 1024

PROGRAMS = ("eager", "onednn", "cudagraph")  # backends whose files are a Program
ONNX = ("onnxruntime", "openvino")  # and those whose file is an ONNX model

# backend -> the libraries that its files need, each with a name that it has where it is whole.
NEEDS: dict[str, dict[str, str]] = {
    "onnxruntime": {"numpy": "ndarray", "onnxruntime": "InferenceSession"},
    "openvino": {"numpy": "ndarray", "openvino": "Core"},
    **{name: {"torch": "Tensor"} for name in (*PROGRAMS, *CODE)},
}

# What options may be. Those that are not here are not asked for by name, and may be anything plain.
OPTIONS: dict[str, Callable[[Any], bool]] = {
    "threads": lambda value: value is None or (type(value) is int and 1 <= value <= MOST_THREADS),
    "hint": lambda value: value in ("latency", "throughput"),
    "precision": lambda value: value in PRECISIONS,
    **{name: lambda value: type(value) is bool for name in ("spinning", "parallel", "arena", "cuda_graph")},
    "bounds": lambda value: isinstance(value, list),  # each one is checked where it is read
}


def save(executable: Executable, path: str | Path, model: Callable[..., Any], example: Example, report: Report) -> Path:
    """Writes a bundle beside its place and moves it there.

    Raises:
        ArtifactError: the place cannot be written, or holds something that is not a bundle.
    """
    target = Path(path)
    if executable.save is None:
        raise ArtifactError(f"what {executable.backend} made cannot be stored", fix="choose another backend")
    check_target(target)
    with staged(target) as staging:
        executable.save(staging)
        _write_state(staging / STATE, executable)
        _check_program(staging, executable)
        _write_check(staging / CHECK, model, example, executable.state)
        (staging / REPORT).write_text(json.dumps(report.to_json()))
        digest = _write_manifest(staging, executable, report)
    known.remember(digest)
    return target


def check_target(target: Path) -> None:
    """Raises ArtifactError where a bundle would overwrite something that is none."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError(
            "the output exists and is not a bundle", where=str(target), fix="remove it or choose another name"
        )
    if target.is_dir() and any(target.iterdir()) and not _is_bundle(target):
        raise ArtifactError(
            "the output is a directory with other files", where=str(target), fix="remove it or choose another name"
        )


def _is_bundle(directory: Path) -> bool:
    """Whether a directory holds a manifest of ours and nothing that it does not name."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            manifest = json.loads(file.read(MAX_MANIFEST))
        names = {MANIFEST, *manifest["members"]}
        return {"format", "sha256"} <= set(manifest) and {file.name for file in directory.iterdir()} <= names
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _check_program(staging: Path, executable: Executable) -> None:
    """What `load` would refuse is not written. Raises ArtifactError."""
    if executable.backend not in PROGRAMS:
        return
    from tsopt.compiler.serialize import read_program

    try:
        read_program(staging, executable.state)
    except ArtifactError as error:
        raise ArtifactError(
            f"the program that {executable.backend} runs cannot be kept in a bundle",
            why="; ".join(filter(None, (error.what, error.why))),
            fix="choose another backend for it: tsopt.optimize(model, x, backends=('onnxruntime',))",
        ) from error


def _write_state(path: Path, executable: Executable) -> None:
    from safetensors.torch import save_file

    names = [item.name for item in executable.signature.state_inputs]
    if names:
        tensors = zip(names, executable.state, strict=True)
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}, path)


def _read_state(directory: Path, signature: Signature) -> list[Any]:
    """State in signature order: torch tensors, or numpy arrays where torch is not installed."""
    wanted = {item.name: item for item in signature.state_inputs}
    return fitting(stored_tensors(directory / STATE), wanted, directory / STATE, on=False) if wanted else []


def stored_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file: of torch, or numpy arrays where torch is not installed. Raises ArtifactError."""
    if not is_installed("torch"):
        from safetensors.numpy import load_file
    else:
        from safetensors.torch import load_file  # type: ignore[assignment]
    try:
        return dict(load_file(path))
    except Exception as error:  # the file decides what goes wrong; all of it means the same
        raise ArtifactError(
            f"{path.name} cannot be read", where=str(path), why=f"{type(error).__name__}: {error}"[:300]
        ) from error


def fitting(
    tensors: Mapping[str, Any], wanted: Mapping[str, Input | Output], path: Path, *, on: bool = True
) -> list[Any]:
    """The tensors of these names, each of the type that the signature gives it, in order.

    Args:
        on: put them on the device of the signature, too.

    Raises:
        ArtifactError: one is missing, or of another type.
    """
    found = []
    for name, item in wanted.items():
        value = tensors.get(name)
        if value is None:
            raise ArtifactError("a stored tensor is missing", where=str(path), why=f"there is no {name[:80]!r}")
        type_ = replace(item.type, device="cpu")
        reason = mismatch(type_, value, item.axes)
        if reason:
            raise ArtifactError("a stored tensor does not fit the signature", where=str(path), why=f"{name!r} {reason}")
        found.append(value.to(item.type.device) if on and item.type.device != "cpu" else value)
    return found


def _write_check(path: Path, model: Callable[..., Any], example: Example, state: Sequence[Any]) -> None:
    """The example's inputs and eager's answers: what `tsopt verify` compares with."""
    import torch
    from safetensors.torch import save_file

    from tsopt.compiler.effects import outcome_of
    from tsopt.compiler.protect import protected
    from tsopt.compiler.structure import flatten, unflatten

    leaves, structure = flatten((example.args, example.kwargs))
    tensors = {f"input.{i}": leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(leaves)}
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    with protected(model, written=state):
        torch.manual_seed(0)
        outputs, *_ = outcome_of(model, args, kwargs)
    tensors |= {f"output.{i}": leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(outputs)}
    save_file(tensors, path)


def _write_manifest(staging: Path, executable: Executable, report: Report) -> str:
    """Writes the manifest; its digest."""
    members = {file.name: facts_of(file) for file in sorted(staging.iterdir())}
    winner = report.row(report.winner)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "tsopt": __version__,
        "model": report.model,
        "backend": executable.backend,
        "options": executable.options,
        "code": executable.code,
        "numerics": report.numerics,
        "precision": executable.precision,
        "environment": report.environment.to_json(),
        "signature": executable.signature.to_json(),
        "claims": {"winner": report.winner, "speedup": report.speedup, "verified": str(winner.accuracy or "")},
        "notes": list(executable.notes),
        "members": members,
    }
    digest = manifest["sha256"] = digest_of(manifest)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return digest


def load(path: str | Path, *, trust: bool = False, probe: bool | None = None) -> Executable:
    """Reads a bundle; called as the model was.

    Args:
        trust: run code from the bundle, where it holds code (TorchScript).
        probe: open it in a process of its own first, and call it once there, with limits of time and memory. None does
            so with a bundle that this machine has neither written nor tried out before.

    Raises:
        ArtifactError: missing, damaged, changed since it was written, from a newer version, not safe to open, or code
            without trust.
        BackendError: a library that it needs is missing, broken, or refuses it.
    """
    return reading(Path(path), lambda bundle: read(bundle, trust, probe))


def read(bundle: Bundle, trust: bool, probe: bool | None) -> Executable:
    """The executable of a bundle; see `load`."""
    return vetted(bundle, trust, probe)()


def vetted(bundle: Bundle, trust: bool, probe: bool | None) -> Callable[[], Executable]:
    """Checks a bundle before any engine sees it here; what opens it."""
    directory, manifest = bundle.directory, bundle.manifest
    with _told(directory):
        backend, options = _backend(directory, manifest, trust), _options(directory, manifest)
        signature = Signature.from_json(manifest["signature"])
        precision = manifest.get("precision", FULL)
        if precision not in PRECISIONS:
            raise damaged(directory, f"the precision is {str(precision)[:40]!r}")
        require(backend)
        new = not known.is_known(bundle.digest)
        if new and backend in ONNX:
            check_onnx(directory, bundle.sizes)
        if probe or (new and probe is None):
            try_out(directory, backend, options, signature, bundle.sizes, trust)
            known.remember(bundle.digest)

    def opened() -> Executable:
        with _told(directory):
            executable = open_bundle(directory, backend, options, signature, trust)
            executable.precision = precision
            return executable

    return opened


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Every error becomes one that says what to do."""
    try:
        yield
    except (TsoptError, OSError):
        raise
    except ImportError as error:
        raise BackendError(
            "a library that the bundle needs cannot be used",
            where=str(directory),
            why=str(error)[:300],
            fix="tsopt doctor shows what is usable",
        ) from error
    except Exception as error:  # the files decide what goes wrong; all of it means the same
        raise damaged(directory, f"{type(error).__name__}: {error}"[:300]) from error


def _backend(directory: Path, manifest: Mapping[str, Any], trust: bool) -> str:
    backend = str(manifest["backend"])
    if backend not in NEEDS:
        raise ArtifactError(
            f"the bundle needs the backend {backend[:40]!r}",
            where=str(directory),
            fix="load it with a version that has it",
        )
    if backend in CODE and not trust:
        raise ArtifactError(
            f"the bundle holds {CODE[backend]}, which is code",
            where=str(directory),
            why="loading it runs what its author wrote",
            fix="if you know where it comes from: tsopt.load(path, trust=True)",
        )
    return backend


def _options(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    options = manifest["options"]
    if not isinstance(options, dict):
        raise damaged(directory, "the options are not a dictionary")
    for name, value in options.items():
        allowed = OPTIONS.get(name, lambda value: value is None or isinstance(value, (bool, int, str)))
        if not allowed(value):
            raise damaged(directory, f"the option {name[:40]!r} is {str(value)[:40]!r}")
    return options


def require(backend: str) -> None:
    """Imports what the files of a backend need.

    Raises:
        BackendError: it is not installed, or it is and cannot be used.
    """
    for library, part in NEEDS[backend].items():
        try:
            getattr(importlib.import_module(library), part)
        except Exception as error:  # a broken installation raises whatever it breaks on
            if isinstance(error, ModuleNotFoundError) and error.name == library:
                raise BackendError(
                    f"the bundle needs {library}, which is not installed", fix=f"pip install {library}"
                ) from error
            raise BackendError(
                f"the bundle needs {library}, which is installed but cannot be used",
                why=f"{type(error).__name__}: {str(error)[:200]}",
                fix=f"pip install --force-reinstall {library}",
            ) from error


def open_bundle(
    directory: Path, backend: str, options: dict[str, Any], signature: Signature, trust: bool
) -> Executable:
    """The executable of a bundle's files, without a look at the manifest."""
    threads = options.get("threads")
    if backend == "onnxruntime":
        return _open_onnx(directory, options, signature)
    if backend == "openvino":
        return _open_openvino(directory, options, signature)
    if backend in CODE and trust:
        return _open_code(directory, backend, {**options, "threads": threads}, signature)
    return _open_program(directory, backend, threads, signature)


def _open_program(directory: Path, backend: str, threads: int | None, signature: Signature) -> Executable:
    from tsopt.compiler.serialize import read_program
    from tsopt.compiler.stored_ops import fill_uninitialized

    program = read_program(directory, _read_state(directory, signature))
    fill_uninitialized(program)
    if backend != "eager":
        try:
            return compile(program, backend, share_weights=True, **race_options(backend, threads))
        except BackendError as error:  # on this machine torch's own kernels may be the faster ones, or the only ones
            log.info("%s: %s", directory, error.what)
    return compile(program, "eager", share_weights=True, threads=threads)


def _open_onnx(directory: Path, options: dict[str, Any], signature: Signature) -> Executable:
    from tsopt.runtime.ort import FILE, load_session

    runner = load_session(directory / FILE, signature, options)
    state = _read_state(directory, signature)
    return Executable("onnxruntime", signature, runner, state=state, options=options)


def _open_openvino(directory: Path, options: dict[str, Any], signature: Signature) -> Executable:
    from tsopt.runtime.openvino import load_runner

    runner = load_runner(directory, signature, options)
    return Executable("openvino", signature, runner, state=_read_state(directory, signature), options=options)


def _open_code(directory: Path, backend: str, options: dict[str, Any], signature: Signature) -> Executable:
    module = importlib.import_module(f"tsopt.runtime.{backend}")
    runner = module.load_runner(directory, signature, options)
    return Executable(backend, signature, runner, state=_read_state(directory, signature), code=True)
