"""The weights that rules make: those with the same bits are one, however many calls read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import torch
from torch import fx

from tsopt.compiler.graph.edit import fresh_name, new_weight
from tsopt.compiler.graph.program import Program

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SAMPLED = 8  # elements along each axis


class MadeWeights:
    """The weights that the rules of a pass have made in one run.

    Where a model calls a layer many times, rules make the same weight many times. Kept apart, these would take the
    memory of as many layers, and no later pass compares that many bytes.

    Args:
        erased: nodes that are not part of the graph any longer.
    """

    def __init__(self, program: Program, erased: Container[fx.Node] = ()) -> None:
        self.program, self.erased = program, erased
        self._made: dict[str, tuple[object, fx.Node]] = {}  # by name: the key, and the node that came with the weight
        self._readers: dict[object, dict[str, fx.Node | None]] = defaultdict(dict)  # by key and name: the latest node
        self._bytes: dict[str, int] = {}

    def read(self, value: torch.Tensor, before: fx.Node, hint: str) -> tuple[fx.Node, bool]:
        """A node before another one that reads this value, and whether the node is new.

        Args:
            hint: what the name of a new weight begins with.
        """
        weights, key = self.program.weights, _key(value)
        alike = self._readers[key] if key is not None else {}
        for name, reader in alike.items():
            if torch.equal(_bits(weights[name]), _bits(value)):
                if reader is not None and reader not in self.erased and reader < before:
                    return reader, False
                alike[name] = made = new_weight(self.program, before, name, weights[name])
                return made, True
        name = fresh_name(hint, weights)
        alike[name] = made = new_weight(self.program, before, name, value)
        self._made[name] = key, made
        self._count(name, value.nbytes)
        return made, True

    def forget(self, node: fx.Node) -> None:
        """Takes back a node that is new, and the weight that came with it."""
        name = str(node.target)
        key, first = self._made[name]
        self._readers[key][name] = None
        if node is first:
            del self._made[name], self._readers[key][name]
            self._count(name, -self.program.weights.pop(name).nbytes)
        self.program.graph.erase_node(node)

    def bytes_of(self, mark: str) -> int:
        """Bytes of the weights of the program whose names have a mark, those of earlier runs included."""
        if mark not in self._bytes:
            marked = [weight for name, weight in self.program.weights.items() if mark in name]
            self._bytes[mark] = sum(weight.nbytes for weight in marked)
        return self._bytes[mark]

    def _count(self, name: str, added: int) -> None:
        for mark in self._bytes:
            self._bytes[mark] += added if mark in name else 0


def _key(value: torch.Tensor) -> object:
    """What weights with the same bits have in common, and few others; None for a tensor that is not plain memory."""
    is_plain = value.layout == torch.strided and not (value.is_meta or value.is_quantized)
    if not is_plain or value.is_conj() or value.is_neg():
        return None
    bits = _bits(value)
    sample = bits[tuple(slice(None, None, 1 + size // SAMPLED) for size in bits.shape)]
    kind = (value.dtype, tuple(value.shape), value.stride(), value.device)
    return (*kind, tuple(sample.reshape(-1).tolist()))


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The elements as integers, of which those with the same bits are equal: NaN is, and -0.0 is not 0.0."""
    plain = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    return plain.view(INTEGERS[plain.element_size()])
