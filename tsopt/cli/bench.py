"""`tsopt bench`: parsing its lists, showing the sweep and saving it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tsopt.errors import UsageError

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.sweeps import Sweep

WRITERS: Writers = {
    ".json": lambda sweep: json.dumps(sweep.to_json(), indent=1) + "\n",
    ".csv": lambda sweep: sweep.to_csv(),
    ".md": lambda sweep: sweep.markdown + "\n",
    ".html": lambda sweep: sweep.html,
}


def words(text: str | None, option: str) -> list[str]:
    """The items of `a,b`. Raises UsageError for an empty item."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(parts):
        raise UsageError(f"{option} {text!r} has an empty item", fix=f"write {option} A,B")
    return list(dict.fromkeys(parts))


def numbers(text: str | None, option: str) -> list[int]:
    """The numbers of `1,8,32`. Raises UsageError for anything but integers from 1."""
    found = words(text, option)
    for part in found:
        if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) < 1:
            raise UsageError(
                f"{option} {text!r}: {part!r} is not an integer from 1 to 999999999", fix=f"write {option} 1,8,32"
            )
    return [int(part) for part in found]


def show(out: Any, sweep: Sweep) -> None:
    """The table with the winner of each setting marked, the reasons, the machine."""
    from tsopt.sweeps import COLUMNS

    out.json(sweep.to_json())
    out.table(COLUMNS, sweep.cells(), style_column=len(COLUMNS) - 1)
    out.say()
    for line in (*sweep.reasons, "* winner in its setting", *sweep.machine):
        out.say(line)
