"""Which items of calibration data are read, and in which order: spread over all of them, for they may be sorted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice, pairwise
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from tsopt.compiler.calls.calibration_kept import LEAST

T = TypeVar("T")
Measure = Callable[[Any], tuple[float, int]]  # how many calls an item holds, a fraction for a part of one; how many do
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


@dataclass(frozen=True, slots=True)
class Item:
    """What is read at once: an item of a sequence, or a batch.

    Attributes:
        places: in the order of the data, of each part that it was made from.
        share: how many calls to take of it, so that they are not of a few items only.
    """

    places: Sequence[int]
    value: Any
    share: float = math.inf

    def place_of(self, call: int, count: int) -> int:
        """Where one of the calls that it holds is in the order of the data."""
        return self.places[call * len(self.places) // count]


def in_turn(data: Any, measure: Measure, end: float, notes: list[str]) -> Iterator[Item]:
    """The items of calibration data.

    Of a known length (a sequence, a Dataset, or that behind a DataLoader that keeps its order), those that are read
    are spread over all of them; others are read in their order.

    Args:
        measure: how many calls an item holds, and how many calls of this size are needed.
        end: when reading should be over, by the monotonic clock.
        notes: gets what is wrong with the data, for the report.
    """
    if _keeps_order(data):
        return _Batches(data, notes).read(measure, end)
    if (length := _length_of(data, notes)) is not None:
        return _by_number(data, length, measure, end, notes)
    return (Item((number,), item) for number, item in enumerate(data))


def _length_of(data: Any, notes: list[str]) -> int | None:
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
    except (TypeError, NotImplementedError) as error:  # torch's convention for datasets without a length
        notes.append(f"the data is read from its beginning, because its length is not known: {error!r}"[:200])
        return None


def _by_number(data: Any, length: int, measure: Measure, end: float, notes: list[str]) -> Iterator[Item]:
    if not length:
        return
    start = time.monotonic()
    try:
        first = data[0]
    except Exception as error:
        raise Unreadable(0, error) from error
    pace = time.monotonic() - start
    calls, needed = measure(first)
    share = math.ceil(needed / max(1, min(FEWEST, length)))
    yield Item((0,), first, share)
    read = {0}
    while True:
        # Parts of calls belong to their neighbours. Where reading may end early, its beginning has to be spread.
        takes_all = length * calls <= needed and time.monotonic() + length * pace <= end
        for number in range(length) if takes_all else scattered(length):
            if number in read:
                continue
            try:
                item = data[number]
            except IndexError as error:
                length = _real_length(data, length, max(read), number, error, notes)
                break
            except Exception as error:
                raise Unreadable(number, error) from error
            read.add(number)
            yield Item((number,), item, share)
        else:
            return


def _real_length(data: Any, length: int, last: int, missing: int, error: Exception, notes: list[str]) -> int:
    """How many items there are, where the length of the data is wrong: not the last one can be read either.

    Args:
        last: the largest number that was read.
        missing: a number for which the data raises an IndexError.

    Raises:
        Unreadable: the length is right, and an item is broken.
    """
    if missing < last or _is_there(data, length - 1):
        raise Unreadable(missing, error) from error
    there, end = last, missing
    while end - there > 1:
        middle = (there + end) // 2
        there, end = (middle, end) if _is_there(data, middle) else (there, middle)
    if not end:
        raise Unreadable(missing, error) from error
    notes.append(f"the length of the data is {length}, but only {end} items can be read")
    return end


def _is_there(data: Any, number: int) -> bool:
    try:
        data[number]
    except IndexError:
        return False
    except Exception:  # it is there, and broken
        return True
    return True


def _keeps_order(data: Any) -> bool:
    return (
        type(data) is DataLoader
        and type(data.sampler) is SequentialSampler
        and type(data.batch_sampler) is BatchSampler
        and data.batch_size is not None
        and not isinstance(data.dataset, IterableDataset)
    )


class _Batches:
    """Batches as a DataLoader makes them, of rows from all of its dataset, in their order."""

    def __init__(self, loader: DataLoader[Any], notes: list[str]) -> None:
        self._loader, self._notes = loader, notes
        self._size, self._count = loader.batch_size or 1, len(loader.sampler)  # type: ignore[arg-type]
        self._order = scattered(self._count)
        self._read: set[int] = set()
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        self._options = {
            name: getattr(loader, name) for name in (*names, "multiprocessing_context", "generator", "drop_last")
        }

    def read(self, measure: Measure, end: float) -> Iterator[Item]:
        """The batches. The first one tells how many are needed, and how long they take."""
        start, done = time.monotonic(), 0
        share, needed = 1, 0  # calls of a batch; batches
        rows: Sequence[int] = self._rows(1)
        while rows:
            for places, batch in self._made_of(rows):
                if not needed:
                    calls, wanted = measure(batch)
                    share, needed = math.ceil(calls), math.ceil(wanted / calls) if calls else self._count
                    pace = (time.monotonic() - start) * self._count / self._size
                    if needed * self._size >= self._count and time.monotonic() + pace <= end:
                        self._order = iter(range(self._count))  # all of them, just as the loader makes them
                        break
                done += 1
                self._read.update(places)
                yield Item(places, batch, share)
            more = needed - done if needed > done else max(done, 1)
            spent = time.monotonic() - start
            if done and spent and end < math.inf:
                # Each loader starts its own workers, so the batches that are needed in any case are read by one.
                least = max(1, math.ceil(LEAST / share) - done)
                more = min(more, max(least, int((end - start - spent) * done / spent)))
            rows = self._rows(more)

    def _rows(self, batches: int) -> list[int]:
        """The next rows for so many batches."""
        return sorted(islice(self._order, batches * self._size))

    def _made_of(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], Any]]:
        """Batches of these rows, up to one that the dataset lacks; then the order goes on with the rows that it has."""
        loader = self._loader
        batches = iter(DataLoader(loader.dataset, batch_size=self._size, sampler=rows, **self._options))
        for start in range(0, len(rows), self._size):
            places = rows[start : start + self._size]
            try:
                batch = next(batches, None)
            except IndexError as error:
                missing = next((number for number in places if not _is_there(loader.dataset, number)), None)
                if missing is None:  # it is raised by the function that makes batches
                    raise
                last = max(self._read, default=-1)
                self._count = _real_length(loader.dataset, self._count, last, missing, error, self._notes)
                self._order = (number for number in scattered(self._count) if number not in self._read)
                return
            if batch is None:  # the rest is dropped
                return
            yield places, batch
