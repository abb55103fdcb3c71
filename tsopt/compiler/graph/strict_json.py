"""Strict JSON: UTF-8, no duplicate keys, no NaN or infinity."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse(raw: bytes) -> Any:
    """What JSON text says.

    Raises:
        ValueError: another encoding, a key twice, NaN, an infinity, nested too deeply, or not JSON.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_every_key_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _every_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice[:40]!r}")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a valid number")
