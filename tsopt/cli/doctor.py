"""What `tsopt doctor` reports."""

from __future__ import annotations

import importlib
from typing import Any

from tsopt.cli.process import lacking
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.racing.environment import environment, is_installed

NO_ENGINE = ("null",)  # returns zeros, to test the compiler without an engine: in the JSON only
NEEDED = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime", "safetensors")


def diagnose(out: Any) -> None:
    """This machine, then a row for each backend: whether it is usable, and how to fix it if not."""
    found = environment()
    absent = [name for name in NEEDED if not is_installed(name)]
    rows = [(name, *_usable(info)) for name, info in BACKENDS.items()]
    out.json(
        {
            "environment": found.to_json(),
            "missing": absent,
            "backends": {name: {"usable": state == "yes", "fix": fix} for name, state, fix in rows},
        }
    )
    uses = (
        "torch is not installed"
        if "torch" in absent
        else f"torch uses {found.threads} {'thread' if found.threads == 1 else 'threads'}"
    )
    out.say(f"cpu       {found.cpu}, {found.cores} cores, {uses}")
    out.say(f"flags     {' '.join(found.flags) or 'none of the relevant ones'}")
    out.say(f"int8      {_int8(found.flags)}")
    out.say(f"gpu       {found.gpu or 'none usable by torch'}")
    out.say(f"python    {found.python} on {found.platform}")
    for name, version in found.versions.items():
        out.say(f"{name:<13} {version}")
    for name in absent:
        out.say(f"{name:<13} missing; {'pip install torch-tsopt' if name == 'torch' else f'pip install {name}'}")
    if "torch" in absent:
        out.say("without torch, ONNX Runtime bundles can be run and verified, but models cannot be optimized")
    out.say()
    out.table(("backend", "usable", "fix"), [row for row in rows if row[0] not in NO_ENGINE])


def _usable(info: BackendInfo) -> tuple[str, str]:
    module, _, name = info.place.partition(":")
    try:
        hint = getattr(importlib.import_module(module), name)().missing()
    except (ImportError, OSError) as error:  # a broken installation has its own message
        found = lacking(error)
        hint = (found and found.fix) or f"{type(error).__name__}: {str(error)[:100]}"
    return ("no", hint) if hint else ("yes", "")


def _int8(flags: tuple[str, ...]) -> str:
    if any("vnni" in flag or "amx_int8" in flag or flag == "asimddp" for flag in flags):
        return "with dot-product instructions, 8-bit kernels run at full speed without saturation"
    return "without dot-product instructions, 8-bit kernels may saturate 16-bit intermediate sums"
