"""What `tsopt doctor` finds."""

from __future__ import annotations

import importlib
from typing import Any

from tsopt.runtime.backend import BACKENDS
from tsopt.runtime.environment import environment


def diagnose(out: Any) -> None:
    """This machine, then a row for each backend: usable, or the one command that mends it."""
    found = environment()
    rows = [(name, *_usable(place)) for name, place in BACKENDS.items()]
    out.json(
        {
            "environment": found.to_json(),
            "backends": {name: {"usable": state == "yes", "fix": fix} for name, state, fix in rows},
        }
    )
    out.say(f"cpu       {found.cpu}, {found.cores} cores, torch uses {found.threads} threads")
    out.say(f"flags     {' '.join(found.flags) or 'none of those that matter'}")
    out.say(f"int8      {_int8(found.flags)}")
    out.say(f"gpu       {found.gpu or 'none that torch can use'}")
    out.say(f"python    {found.python} on {found.platform}")
    for name, version in found.versions.items():
        out.say(f"{name:<13} {version}")
    out.say()
    out.table(("backend", "usable", "to mend it"), rows)


def _usable(place: str) -> tuple[str, str]:
    module, _, name = place.partition(":")
    hint = getattr(importlib.import_module(module), name)().missing()
    return ("no", hint) if hint else ("yes", "")


def _int8(flags: tuple[str, ...]) -> str:
    if any("vnni" in flag or "amx_int8" in flag or flag == "asimddp" for flag in flags):
        return "dot-product instructions: 8-bit kernels run at full speed without saturating"
    return "no dot-product instructions: 8-bit kernels may saturate in 16-bit sums"
