"""Which items of calibration data are read, and in which order: spread over all of them, for they may be sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

T = TypeVar("T")
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fill the range from 0 to 1 evenly, and never fall into a period
FEWEST = 16  # items that are read of more, although fewer would hold enough calls


def spread(count: int, of: int) -> list[int]:
    """Increasing numbers below `of`, one from each of `count` stretches that are equally long.

    Not at equal distances: of data that goes through its classes in turn, these could all be of one class.
    """
    ends = [place * of // max(count, 1) for place in range(count + 1)]
    return [start + int(place * GOLDEN % 1 * (end - start)) for place, (start, end) in enumerate(pairwise(ends))]


def spread_out(items: Sequence[T]) -> tuple[T, ...]:
    """In an order of which every beginning is spread over all of them."""
    return tuple(items[place] for place in sorted(range(len(items)), key=lambda place: place * GOLDEN % 1))


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """One of each two neighbours, and the other one; the first half is the larger one.

    Not every other one: data may alternate between two kinds. So it goes as in the sequence of Thue and Morse.
    """
    last = len(items) - 1
    is_first = [place.bit_count() % 2 == 0 or (place == last and place % 2 == 0) for place in range(len(items))]
    return list(compress(items, is_first)), [item for item, taken in zip(items, is_first, strict=True) if not taken]


@dataclass(frozen=True, slots=True)
class Numbered:
    """Data whose parts can be read by their numbers.

    Attributes:
        count: of parts.
        at: reads parts as items.
        size: how many parts are in an item.
        fewest: how many items to read in any case.
    """

    count: int
    at: Callable[[Sequence[int]], Iterable[Any]]
    size: int = 1
    fewest: int = FEWEST

    def chosen(self, calls_in: Callable[[Any], float], most: int) -> tuple[list[int] | None, int]:
        """The numbers of the parts to read, None for all of them; and how many calls to take of each item.

        Args:
            calls_in: how many calls an item holds, up to twice as many as are needed.
            most: how many are needed.
        """
        first = next(iter(self.at(range(min(self.size, self.count)))), None) if self.count > 1 else None
        calls = 0.0 if first is None else calls_in(first)
        if not calls:
            return None, most
        have = -(-self.count // self.size)
        items = max(self.fewest, math.ceil(most / calls))
        # Items may differ in size. Where there is hardly more than is needed, all is taken.
        share = math.ceil(most / min(items, have)) if calls * have > 2 * most else most
        return (spread(items * self.size, self.count) if items < have else None), share


def numbered(data: Any) -> Numbered | None:
    """Data of a known length by its parts: a sequence, a Dataset, or that behind a DataLoader that keeps its order."""
    if type(data) is DataLoader:
        return _behind(data)
    cls = type(data)
    by_number = hasattr(cls, "__getitem__") and hasattr(cls, "__len__") and not hasattr(cls, "keys")
    if not by_number or isinstance(data, (torch.Tensor, Mapping, IterableDataset)):
        return None
    try:
        count = len(data)
    except (TypeError, NotImplementedError):  # it has the method, but no length
        return None
    return Numbered(count, lambda numbers: map(data.__getitem__, numbers))


def _behind(loader: DataLoader[Any]) -> Numbered | None:
    sampler, is_plain = loader.sampler, type(loader.batch_sampler) is BatchSampler
    if type(sampler) is not SequentialSampler or not is_plain or loader.batch_size is None:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None

    def at(numbers: Sequence[int]) -> Iterator[Any]:
        options = {
            name: getattr(loader, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        }
        options |= {name: getattr(loader, name) for name in ("multiprocessing_context", "generator", "drop_last")}
        return iter(DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=numbers, **options))

    return Numbered(len(sampler), at, loader.batch_size, fewest=0)
