"""Which items of calibration data are read, and in which order: spread over all of them, for they may be sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

T = TypeVar("T")
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fill the range from 0 to 1 evenly, and never fall into a period
FEWEST = 8  # items that are read where there are as many, although fewer may hold enough calls


def spread(count: int, of: int) -> list[int]:
    """Increasing numbers below `of`, one from each of `count` stretches that are equally long.

    Not at equal distances: of data that goes through its classes in turn, these could all be of one class.
    """
    ends = [place * of // max(count, 1) for place in range(count + 1)]
    return [start + int(place * GOLDEN % 1 * (end - start)) for place, (start, end) in enumerate(pairwise(ends))]


def scattered(count: int) -> Iterator[int]:
    """All numbers below `count`, in an order of which every beginning is spread over all of them: a Weyl sequence."""
    step = max(1, round(count * GOLDEN))
    while math.gcd(step, count) > 1:  # each number once
        step += 1
    return (place * step % count for place in range(count))


def spread_out(items: Sequence[T]) -> tuple[T, ...]:
    """In an order of which every beginning is spread over all of them."""
    return tuple(items[place] for place in scattered(len(items)))


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """One of each two neighbours, and the other one; the first half is the larger one.

    Not every other one: data may alternate between two kinds. So it goes as in the sequence of Thue and Morse.
    """
    last = len(items) - 1
    is_first = [place.bit_count() % 2 == 0 or (place == last and place % 2 == 0) for place in range(len(items))]
    return list(compress(items, is_first)), [item for item, taken in zip(items, is_first, strict=True) if not taken]


@dataclass
class Unreadable(Exception):
    """An item that cannot be read by its number."""

    number: int
    error: Exception


def in_turn(data: Any, most: int, calls_in: Callable[[Any], float]) -> tuple[Iterable[tuple[int, Any]], int]:
    """The items, each with its number, and how many calls to take of each, so that they are not of a few items only.

    Of a known length (a sequence, a Dataset, or that behind a DataLoader that keeps its order), every beginning of the
    items is spread over all of them; others are read in their order.

    Args:
        most: how many calls are needed.
        calls_in: how many an item holds, a fraction for a part of one.
    """
    if _keeps_order(data):
        return _by_batches(data, most), most
    if (length := _length_of(data)) is not None:
        return _by_number(data, length, most, calls_in), math.ceil(most / max(1, min(FEWEST, length)))
    return enumerate(data), most


def _length_of(data: Any) -> int | None:
    """That of data that is read by numbers.

    Not of what has an iterator of its own beside `__getitem__`: that may take keys. `__getitems__` takes numbers, as
    the fetcher of a DataLoader passes them.
    """
    cls = type(data)
    if not (hasattr(cls, "__getitem__") and hasattr(cls, "__len__")) or hasattr(cls, "keys"):
        return None
    takes_numbers = isinstance(data, (Sequence, Dataset, np.ndarray)) or hasattr(cls, "__getitems__")
    if not (takes_numbers or getattr(cls, "__iter__", None) is None) or isinstance(data, IterableDataset):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # how streamed datasets say that they have no length
        return None


def _by_number(data: Any, length: int, most: int, calls_in: Callable[[Any], float]) -> Iterator[tuple[int, Any]]:
    if not length:
        return
    try:
        first = data[0]
    except Exception as error:
        raise Unreadable(0, error) from error
    yield 0, first
    all_are_needed = length * calls_in(first) <= most
    read = {0}
    # If its length is wrong, then as Python iterates over a sequence: up to the first number that it does not have.
    for numbers in (range(length) if all_are_needed else scattered(length)), range(length):
        for number, item in _up_to_a_missing_one(data, (number for number in numbers if number not in read)):
            read.add(number)
            yield number, item


def _up_to_a_missing_one(data: Any, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
    for number in numbers:
        try:
            item = data[number]
        except IndexError:
            return
        except Exception as error:
            raise Unreadable(number, error) from error
        yield number, item


def _keeps_order(data: Any) -> bool:
    return (
        type(data) is DataLoader
        and type(data.sampler) is SequentialSampler
        and type(data.batch_sampler) is BatchSampler
        and data.batch_size is not None
        and not isinstance(data.dataset, IterableDataset)
    )


def _by_batches(loader: DataLoader[Any], most: int) -> Iterator[tuple[int, Any]]:
    """Batches as a DataLoader makes them, of rows from all of its dataset."""
    count = len(loader.sampler)  # type: ignore[arg-type]
    if count <= most:
        yield from enumerate(loader)
        return
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    }
    options |= {name: getattr(loader, name) for name in ("multiprocessing_context", "generator", "drop_last")}
    number = -1
    try:
        for number, item in enumerate(
            DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=scattered(count), **options)
        ):
            yield number, item
    except IndexError:  # its length is wrong: in its order
        yield from enumerate(loader, number + 1)
