"""The comparisons behind `tsopt verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tsopt.errors import AccuracyError, ArtifactError
from tsopt.runtime.artifact import CHECK, load


def against_record(bundle: Path, trust: bool) -> str:
    """Runs the bundle on its stored inputs and compares with the answers that the model gave then.

    Raises:
        AccuracyError: it gives something else here.
    """
    executable = load(bundle, trust=trust)
    from safetensors.torch import load_file

    from tsopt.compiler.structure import flatten
    from tsopt.runtime.accuracy import compare

    stored = load_file(bundle / CHECK)
    inputs = [stored[f"input.{i}"] for i in range(len(executable.signature.user_inputs))]
    outputs, _ = flatten(executable.run_leaves(inputs), share=True)
    expected = [stored[key] for key in sorted((k for k in stored if k.startswith("output.")), key=_number)]
    if len(outputs) != len(expected):
        raise ArtifactError("the bundle's check does not fit its signature", where=str(bundle))
    worst = 0.0
    for item, value, reference in zip(executable.signature.outputs, outputs, expected, strict=False):
        found = compare(value, reference)
        worst = max(worst, found.max_difference)
        if not found.ok:
            raise AccuracyError(
                "the bundle does not give here what the model gave when it was written",
                where=f"{bundle}, output {item.name}",
                why=found.reason,
                fix="export the model again on this machine",
            )
    return f"whole, and equal to the model's stored answer (max difference {worst:.2e})"


def against_model(bundle: Path, trust: bool, loaded: Any, seed: int) -> str:
    """Compares the bundle with a live model on fresh inputs. Raises AccuracyError."""
    executable = load(bundle, trust=trust)
    from tsopt.runtime.accuracy import verify

    return str(verify(loaded.model, executable, loaded.example_input, seed=seed + 1))


def _number(key: str) -> int:
    return int(key.rpartition(".")[2])
