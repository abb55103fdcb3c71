"""The bundle `name.tsopt/`: written atomically, and read only after every hash has been checked.

No pickle. Files that are code (TorchScript) are read only with `trust=True`. Reading an ONNX bundle needs
neither torch nor onnx, only ONNX Runtime and numpy. A bundle that this machine has neither written nor probed before is
opened in a separate process first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt._version import __version__
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.structure_json import check_made
from tsopt.compiler.calls.tensor_file import write_tensors
from tsopt.compiler.graph.strict_json import parse
from tsopt.compiler.precision_names import FP32, INT8_STATIC, INT8_WEIGHTS, PRECISIONS
from tsopt.errors import BackendError, BundleError, TsoptError
from tsopt.runtime.backends.table import BACKENDS, BackendInfo, info_of
from tsopt.runtime.bundles import known_bundles
from tsopt.runtime.bundles.members import FORMAT, MANIFEST, MAX_MANIFEST, Bundle, damaged, digest_of, facts_of, reading
from tsopt.runtime.bundles.onnx_file import check_onnx
from tsopt.runtime.bundles.opening import (
    CHECK,
    STATE,
    check_default_dtype,
    check_trust,
    default_dtype,
    open_bundle,
    require,
)
from tsopt.runtime.bundles.probe import try_out
from tsopt.runtime.bundles.staging import staged
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.thread_count import is_thread_count

if TYPE_CHECKING:
    from tsopt.compiler.calls.example import Example
    from tsopt.compiler.calls.signature import Signature
    from tsopt.runtime.report import Report

REPORT = "report.json"  # what the race found
STORED = (*PRECISIONS, INT8_WEIGHTS, INT8_STATIC)  # what a bundle may have been computed in
MOST_IN_A_GROUP = 1 << 16  # elements that share a scale
MOST_TOLERANCE = 1.0  # a relative error, as large as the output itself

SWITCHES = ("spinning", "parallel", "arena", "pinning", "cuda_graph", "float64")
VARIANTS = ("channels_last", "fused", "transposed", "separate_bias")  # of a CUDA graph
# What options may be. Those that are not here are not asked for by name, and may be anything plain.
OPTIONS: dict[str, Callable[[Any], bool]] = {
    "threads": lambda value: value is None or is_thread_count(value),
    "hint": lambda value: value in ("latency", "throughput"),
    "precision": lambda value: value in STORED,
    **{name: lambda value: type(value) is bool for name in (*SWITCHES, *VARIANTS)},
    "int8_weights": lambda value: type(value) is int and 0 <= value <= 127,
    "int8_group": lambda value: type(value) is int and 1 <= value <= MOST_IN_A_GROUP,
    "other_ops": lambda value: value in (FP32, "bf16"),
    "bounds": lambda value: isinstance(value, list),  # each one is checked where it is read
}


def save(executable: Executable, path: str | Path, model: Callable[..., Any], example: Example, report: Report) -> Path:
    """Writes a bundle beside its place and moves it there.

    Raises:
        BundleError: the place cannot be written, or holds something that is not a bundle.
    """
    target = Path(path)
    if executable.save is None:
        raise BundleError(f"{executable.backend} does not support bundles", fix="use another backend")
    _name_to_store(executable)  # before anything is written
    _check_signature(executable.signature)
    _check_default_dtype(executable)
    check_target(target)
    with staged(target) as staging:
        executable.save(staging)
        _write_state(staging / STATE, executable)
        _check_program(staging, executable)
        _write_check(staging / CHECK, model, example, executable.state)
        (staging / REPORT).write_text(json.dumps(report.to_json()))
        digest = _write_manifest(staging, executable, report)
    known_bundles.remember(digest)
    return target


def _name_to_store(executable: Executable) -> str:
    """What a bundle names its backend by: a name in the table, or where a backend of the user's own is imported from.

    Raises:
        BundleError: another process could not import it.
    """
    info, place = BACKENDS.get(executable.backend), executable.place
    if info is not None and place in ("", info.place):
        return info.name
    module, _, name = place.partition(":")
    if module in ("", "__main__") or "." in name:
        raise BundleError(
            f"a bundle cannot refer to the backend {executable.backend}",
            why=f"{place or 'it'} cannot be imported in another process",
            fix="move its class to the top level of an importable module",
        )
    return place


def check_target(target: Path) -> None:
    """Raises BundleError where a bundle would overwrite something that is none."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BundleError(
            "the output exists and is not a bundle", where=str(target), fix="remove it, or choose another name"
        )
    if target.is_dir() and any(target.iterdir()) and not _is_bundle(target):
        raise BundleError(
            "the output is a directory with other files", where=str(target), fix="remove it, or choose another name"
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


def _check_signature(signature: Signature) -> None:
    """Raises BundleError if `load` would refuse the signature, or read it back as a different one."""
    _check_returned(signature)
    stored = signature_json.to_json(signature)
    try:
        signature_json.from_json(parse(json.dumps(stored).encode()))
    except (BundleError, ValueError) as error:
        raise BundleError(
            "what the model takes or returns cannot be stored in a bundle",
            why=getattr(error, "why", None) or str(error)[:200],
            fix="pass and return tensors and plain values, such as numbers, strings and dtypes",
        ) from error


def _check_default_dtype(executable: Executable) -> None:
    """Raises BundleError where the reference answers would be of another dtype than the program's."""
    import torch

    wanted = executable.signature.default_dtype
    if wanted and torch.get_default_dtype() is not getattr(torch, wanted):
        raise BundleError(
            f"the model was compiled under the default dtype {wanted}, and it is {default_dtype(torch)} now",
            why="what the model computes follows the default dtype",
            fix=f"call torch.set_default_dtype(torch.{wanted}) before you save it",
        )


def _check_returned(signature: Signature) -> None:
    for structure in (signature.result, *(effect.parts for effect in signature.effects)):
        check_made(structure)


def _check_program(staging: Path, executable: Executable) -> None:
    """What `load` would refuse is not written. Raises BundleError."""
    from tsopt.compiler.graph.serialize import GRAPH, read_program

    if not (staging / GRAPH).exists():
        return

    try:
        read_program(staging, executable.state)
    except BundleError as error:
        raise BundleError(
            f"the program of {executable.backend} cannot be stored in a bundle",
            why="; ".join(filter(None, (error.what, error.why))),
            fix="use another backend, for example tsopt.optimize(model, x, backends=('onnxruntime',))",
        ) from error


def _write_state(path: Path, executable: Executable) -> None:
    names = [item.name for item in executable.signature.state_inputs]
    if names:
        tensors = zip(names, executable.state, strict=True)
        write_tensors({name: _copy(tensor) for name, tensor in tensors}, path)


def _write_check(path: Path, model: Callable[..., Any], example: Example, state: Sequence[Any]) -> None:
    """The example's inputs and eager's answers: what `tsopt verify` compares with."""
    from tsopt.compiler.calls.effects import outcome_of
    from tsopt.compiler.calls.structure import flatten, unflatten
    from tsopt.compiler.protect import protected
    from tsopt.compiler.random_state import seed_torch

    leaves, structure = flatten((example.args, example.kwargs))
    tensors = {f"input.{i}": _copy(leaf) for i, leaf in enumerate(leaves)}
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    with protected(model, written=state):
        seed_torch(0)
        outputs, *_ = outcome_of(model, args, kwargs)
        # Copied here: a buffer that is returned is put back.
        tensors |= {f"output.{i}": _copy(leaf) for i, leaf in enumerate(outputs)}
    write_tensors(tensors, path)


def _copy(tensor: Any) -> Any:
    return tensor.detach().cpu().contiguous().clone()


def _write_manifest(staging: Path, executable: Executable, report: Report) -> str:
    """Writes the manifest; its digest."""
    members = {file.name: facts_of(file) for file in sorted(staging.iterdir())}
    winner = report.winning
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "tsopt": __version__,
        "model": report.model,
        "backend": _name_to_store(executable),
        "options": executable.options,
        "code": executable.code or info_of(_name_to_store(executable)).is_own,
        "numerics": report.numerics,
        "precision": executable.precision,
        "tolerance": executable.tolerance,
        "environment": report.environment.to_json(),
        "signature": signature_json.to_json(executable.signature),
        "claims": {"winner": report.winner, "speedup": report.speedup, "verified": str(winner.accuracy or "")},
        "notes": list(executable.notes),
        "members": members,
    }
    digest = manifest["sha256"] = digest_of(manifest)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return digest


def load(path: str | Path, *, trust: bool = False, probe: bool | None = None) -> Executable:
    """Loads a bundle; the result is called like the model.

    Args:
        path: the `.tsopt` directory.
        trust: execute code from the bundle, if it contains code (TorchScript, for example).
        probe: open the bundle in a separate process first and call it once there, with time and memory limits. None
            does this only for bundles that this machine has neither written nor probed before.

    Raises:
        BundleError: the bundle is missing, damaged, modified since it was written, from a newer version, unsafe to
            open, or contains code and `trust` is not set.
        BackendError: a library that the bundle needs is missing, is broken, or rejects it.
    """
    return reading(Path(path), lambda bundle: read(bundle, trust, probe))


def read(bundle: Bundle, trust: bool, probe: bool | None) -> Executable:
    """The executable of a bundle; see `load`."""
    return vetted(bundle, trust, probe)()


def vetted(bundle: Bundle, trust: bool, probe: bool | None) -> Callable[[], Executable]:
    """Checks a bundle before any engine sees it here; what opens it."""
    directory, manifest = bundle.directory, bundle.manifest
    with _told(directory):
        info, options = _backend(directory, manifest), _options(directory, manifest)
        check_trust(info, directory, trust)
        signature = signature_json.from_json(manifest["signature"])
        _check_returned(signature)
        precision = manifest.get("precision", FP32)
        if precision not in STORED:
            raise damaged(directory, f"unknown precision {str(precision)[:40]!r}")
        tolerance = manifest.get("tolerance")
        if tolerance is not None and (type(tolerance) is not float or not 0 < tolerance <= MOST_TOLERANCE):
            raise damaged(directory, f"invalid tolerance {str(tolerance)[:40]!r}")
        require(info.name)
        check_default_dtype(info, directory, signature)
        new = not known_bundles.is_known(bundle.digest)
        if new and info.through_onnx:
            check_onnx(directory, bundle.sizes)
        if probe or (new and probe is None):
            try_out(directory, info.name, options, signature, bundle.sizes, trust)
            known_bundles.remember(bundle.digest)

    def opened() -> Executable:
        with _told(directory):
            executable = open_bundle(directory, info.name, options, signature, trust)
            executable.precision, executable.model = precision, str(manifest.get("model", ""))
            executable.tolerance = tolerance
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
            "a library that the bundle needs cannot be imported",
            where=str(directory),
            why=str(error)[:300],
            fix="run `tsopt doctor` to see which backends are available",
        ) from error
    except Exception as error:  # the files decide what goes wrong; all of it means the same
        raise damaged(directory, f"{type(error).__name__}: {error}"[:300]) from error


def _backend(directory: Path, manifest: Mapping[str, Any]) -> BackendInfo:
    backend = str(manifest["backend"])
    info = info_of(backend) if ":" in backend else BACKENDS.get(backend)
    if info is None or not info.needs:
        raise BundleError(
            f"the bundle needs the unknown backend {backend[:40]!r}",
            where=str(directory),
            fix="load it with a version of tsopt that has this backend",
        )
    return info


def _options(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    options = manifest["options"]
    if not isinstance(options, dict):
        raise damaged(directory, "the options are not a dictionary")
    for name, value in options.items():
        allowed = OPTIONS.get(name, lambda value: value is None or isinstance(value, (bool, int, str)))
        if not allowed(value):
            raise damaged(directory, f"invalid value {str(value)[:40]!r} of the option {name[:40]!r}")
    return options
