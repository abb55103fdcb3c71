"""Inputs that are one object or share memory: the model writes one of them, or asks which are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tsopt
from bench.hazards import RIGHT, Case, Outcome, served_by

Call = Callable[[], tuple[Any, ...]]


def writes_first(a, b):
    a.add_(1)
    return a * b


def writes_second(a, b):
    out = a * 2
    b.mul_(3)
    return out + a + b


def writes_view(a, b):
    a[0].fill_(7)
    return a + b


def writes_through_reshape(a, b):
    a.reshape(-1)[0] = 9
    return a - b


def writes_both(a, b):
    a.add_(b)
    b.add_(a)
    return a


def asks_identity(a, b):
    return a if a is b else a + b


def asks_by_id(a, b):
    return a * 2 if id(a) == id(b) else a * b


def asks_in_a_set(a, b):
    return a * len({id(a), id(b)})


def in_a_dict(pair):
    pair["a"].add_(1)
    return pair["a"] * pair["b"]


def in_a_list(values):
    values[0].add_(1)
    return values[0] + values[1]


def three(a, b, c):
    a.add_(1)
    return a + b * c


def copies(a, b):
    a.copy_(b * 2)
    return a + b


class Accumulates(nn.Module):
    def forward(self, total, step):
        total += step
        return total * 1.5


class Swaps(nn.Module):
    def forward(self, a, b):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b


class MaybeSame(nn.Module):
    def forward(self, query, key):
        return query @ query.t() if query is key else query @ key.t() + 1


def t(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape or (3, 3)).numel()).reshape(shape or (3, 3))


def apart() -> tuple[Any, ...]:
    return t(), t() + 10


def same() -> tuple[Any, ...]:
    one = t()
    return one, one


def view() -> tuple[Any, ...]:
    one = t()
    return one, one.view(3, 3)


def partly() -> tuple[Any, ...]:
    base = t(12)
    return base[:9].view(3, 3), base[3:].view(3, 3)


def transposed() -> tuple[Any, ...]:
    one = t()
    return one, one.t()


def side_by_side() -> tuple[Any, ...]:
    base = t(18)
    return base[:9].view(3, 3), base[9:].view(3, 3)


def nested(call: Call, kind: type) -> Call:
    def made() -> tuple[Any, ...]:
        a, b = call()
        return ({"a": a, "b": b} if kind is dict else [a, b],)

    return made


def thrice(call: Call) -> Call:
    return lambda: (*call(), t() + 20)


def check(model: Any, example: Call, later: tuple[Call, ...]) -> Callable[[str], Outcome]:
    """Calls what was made as later, and compares results and what is left in the inputs with eager."""

    def outcome(backend: str) -> Outcome:
        run = model().eval() if isinstance(model, type) else model
        refused = ""
        for called in served_by(run, example(), backend):
            for call in (example, *later):
                mine, theirs = call(), call()
                try:
                    wanted = run(*theirs)
                except RuntimeError:  # eager refuses this way to share memory: nothing to compare with
                    continue
                try:
                    found = called(*mine)
                except tsopt.SignatureError as error:
                    refused = error.what
                    continue
                pairs = [(found, wanted), *zip(leaves(mine), leaves(theirs), strict=True)]
                if not all(torch.allclose(a, b) for a, b in pairs):
                    return Outcome("wrong", f"{call.__name__}: other values than eager")
        return Outcome("refused", refused) if refused else RIGHT

    return outcome


def leaves(call: tuple[Any, ...]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in call:
        found += [item] if isinstance(item, torch.Tensor) else item.values() if isinstance(item, dict) else item
    return found


ALL = (same, view, partly, transposed, side_by_side, apart)
CASES = (
    Case("writes the first of two; called with one tensor twice", check(writes_first, apart, (same,))),
    Case("writes the first of two; called with overlapping views", check(writes_first, apart, (partly, view))),
    Case("the example is one tensor twice, the first is written", check(writes_first, same, (apart, same))),
    Case("the example overlaps partly, the first is written", check(writes_first, partly, (apart,))),
    Case("writes the second; all ways to share", check(writes_second, apart, ALL)),
    Case("writes a view of an input; all ways to share", check(writes_view, apart, ALL)),
    Case("writes through a reshape; all ways to share", check(writes_through_reshape, apart, ALL)),
    Case("writes both; all ways to share", check(writes_both, apart, ALL)),
    Case("asks `a is b`", check(asks_identity, apart, ALL)),
    Case("asks `a is b`, the example is one tensor twice", check(asks_identity, same, ALL)),
    Case("asks for ids", check(asks_by_id, apart, ALL)),
    Case("counts ids in a set", check(asks_in_a_set, apart, ALL)),
    Case("in a dict", check(in_a_dict, nested(apart, dict), tuple(nested(call, dict) for call in ALL))),
    Case("in a list", check(in_a_list, nested(apart, list), tuple(nested(call, list) for call in ALL))),
    Case("three inputs, two of them one", check(three, thrice(apart), tuple(map(thrice, ALL)))),
    Case("copies one into the other", check(copies, apart, ALL)),
    Case("a module that accumulates", check(Accumulates, apart, ALL)),
    Case("a module that swaps its inputs", check(Swaps, apart, ALL)),
    Case("a module with a path of its own for `query is key`", check(MaybeSame, apart, ALL)),
    Case("the same, the example is one tensor twice", check(MaybeSame, same, ALL)),
)
