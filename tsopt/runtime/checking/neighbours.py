"""What else eager could have returned: its answers when the inputs change by one rounding.

Where a model amplifies rounding errors, as a softmax of large scores does, eager's error on one input is a draw from a
wide range, and says little about how large that of another order of the same operations may be. This is the idea of
stochastic arithmetic: Vignes, "A stochastic arithmetic for reliable scientific computation", 1993.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.narrow_floats import widened

DRAWS = 8
MOST_BYTES = 1 << 29  # of answers that are kept


def neighbours(leaves: Sequence[torch.Tensor], seed: int, step: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """The inputs with each floating-point element moved by about one unit in its last place; nothing without any.

    Args:
        step: how far to move it, relative to it, if that is not the unit of its dtype.
    """
    if not any(leaf.is_floating_point() for leaf in leaves):
        return
    draw = torch.Generator().manual_seed(seed)
    for _ in range(DRAWS):
        yield [_moved(leaf, draw, step) if leaf.is_floating_point() else leaf.clone() for leaf in leaves]


def _moved(leaf: torch.Tensor, draw: torch.Generator, step: float) -> torch.Tensor:
    wide = widened(leaf)
    signs = (torch.randint(0, 2, leaf.shape, generator=draw, device="cpu") * 2 - 1).to(wide.device, wide.dtype)
    return (wide * (1 + signs * (step or torch.finfo(leaf.dtype).eps))).to(leaf.dtype)


class Answers:
    """Answers for such inputs. Each output of a model is compared by itself, and so are those of several candidates."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Sequence[Any]]] = {}
        self._bytes = 0

    def answer(self, inputs: Hashable, number: int, ask: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """An answer, asked for if it is not kept; it is then, unless all together take more than MOST_BYTES.

        Args:
            inputs: a name for what has been moved.
            number: of the draw; they are asked for in order.
        """
        kept = self._kept.setdefault(inputs, [])
        if number < len(kept):
            return kept[number]
        found = ask()
        size = sum(value.nbytes for value in found if isinstance(value, torch.Tensor))
        if number == len(kept) and self._bytes + size <= MOST_BYTES:
            kept.append(found)
            self._bytes += size
        return found
