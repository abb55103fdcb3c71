"""Which items of the data are read: spread over all of it, and none twice."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.calls.calibration import read_calibration
from tsopt.compiler.calls.calibration_kept import MOST
from tsopt.compiler.calls.calibration_order import halves, spread, spread_out
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph.values import flat_inputs
from tsopt.errors import UsageError
from tsopt.passes.quantize.layers import layers_of, readers_of_integers
from tsopt.passes.quantize.observe import observe

CLASSES = 10
ROWS = torch.arange(2000.0)[:, None].expand(-1, 3).contiguous()


def read(data, size=1, **options):
    example = torch.zeros(size, 3)
    program = tsopt.capture(nn.Linear(3, 1).eval(), example, **options)
    return read_calibration(data, program.signature, as_example(example))


def numbers_of(calls):
    return torch.cat([call.args[0] for call in calls])[:, 0].int().tolist()


class Counted(Dataset):
    """Rows by number, and which were asked for."""

    def __init__(self, count=2000):
        self.count, self.asked = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.asked.append(number)
        return ROWS[number], number


class Streamed(IterableDataset):
    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        return iter(ROWS)


DATA = {
    "dataset": Counted,
    "tensors": lambda: TensorDataset(ROWS, torch.arange(2000)),
    "list": lambda: list(ROWS),
    "array": ROWS.numpy,
    "deque": lambda: collections.deque(ROWS),
    "batches": lambda: list(ROWS.split(10)),
    "large batches": lambda: list(ROWS.split(500)),
    "one batch": lambda: [ROWS],
    "loader": lambda: DataLoader(Counted(), batch_size=32),
    "loader of large batches": lambda: DataLoader(Counted(), batch_size=200),
    "loader that drops the rest": lambda: DataLoader(Counted(), batch_size=64, drop_last=True),
    "loader with workers": lambda: DataLoader(Counted(), batch_size=16, num_workers=1),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_sorted_data_is_read_from_all_of_its_classes(data, size):
    found = read(data(), size)
    assert len(found.calls) == MOST
    assert len(set(numbers_of(found.calls))) == MOST * size
    for some in (found.observed, found.choosing, found.judging, found.judging[:16], found.measured):
        classes = {number * CLASSES // 2000 for number in numbers_of(some)}
        assert len(classes) >= (CLASSES if len(some) > 16 else 6), classes


@pytest.mark.parametrize("period", [2, 5, 10, 125])
@pytest.mark.parametrize("data", [Counted, lambda: DataLoader(Counted(), batch_size=32)], ids=["dataset", "loader"])
def test_data_that_goes_through_its_classes_in_turn(data, period):
    for some in (read(data()).observed, read(data()).judging):
        classes = {number % period for number in numbers_of(some)}
        assert len(classes) >= min(period, len(some)) * 0.5
        assert period > 10 or len(classes) == period


def test_what_is_needed_is_read_once_and_no_more():
    data = Counted()
    read(data)
    assert len(set(data.asked)) == len(data.asked) == MOST


def test_of_large_batches_one_is_read():
    data = Counted()
    assert len(read(DataLoader(data, batch_size=512)).calls) == MOST
    assert len(set(data.asked)) == len(data.asked) == 512


class Batches(Counted):
    """Items of several rows."""

    def __init__(self, sizes):
        super().__init__(len(sizes))
        self.batches = ROWS.split(sizes)

    def __getitem__(self, number):
        self.asked.append(number)
        return self.batches[number]


def test_of_items_with_many_rows_some_are_read():
    data = Batches([20] * 100)
    assert len(read(data).calls) == MOST
    assert len(set(data.asked)) == len(data.asked) == 8


def test_items_may_be_larger_than_the_first():
    found = read(Batches([1, *[1] * 9, *[199] * 10]))
    assert len(found.calls) == MOST
    assert max(numbers_of(found.calls)) > 1500


def test_an_item_gives_more_than_its_share_where_others_give_less():
    found = read(Batches([1] * 9 + [1991]))
    assert len(found.calls) == MOST
    assert len(set(numbers_of(found.calls))) == MOST
    assert numbers_of(found.calls) == sorted(numbers_of(found.calls)), "in the order of the data"


class Keyed:
    """Iterated over, it yields rows; in brackets it takes names of columns."""

    def __len__(self):
        return 200

    def __iter__(self):
        return iter(ROWS[:200])

    def __getitem__(self, name):
        return {"x": ROWS}[name]


def test_what_takes_keys_is_iterated_over():
    assert numbers_of(read(Keyed()).calls) == list(range(MOST))


class OfTransformers(Keyed):
    """As a dataset of Hugging Face: no Dataset of torch, but read in the same way."""

    def __getitem__(self, key):
        return ROWS[key] if isinstance(key, int) else super().__getitem__(key)

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def test_what_can_be_fetched_by_numbers_is_spread():
    assert max(numbers_of(read(OfTransformers()).calls)) > 190


class TooLong(Counted):
    """Its length is wrong."""

    def __len__(self):
        return self.count * 2

    def __getitem__(self, number):
        return super().__getitem__(range(self.count)[number])


@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: DataLoader(data, batch_size=8)])
def test_a_length_may_be_wrong(wrapped):
    found = numbers_of(read(wrapped(TooLong())).calls)
    assert len(set(found)) == len(found) == MOST
    assert numbers_of(read(TooLong(50)).calls) == list(range(50))


class NextOne(Counted):
    """Whatever number it is asked for, it returns what comes next."""

    def __getitem__(self, number):
        return super().__getitem__(len(self.asked))


def test_a_dataset_may_ignore_the_number():
    assert sorted(numbers_of(read(NextOne()).calls)) == list(range(MOST))


class Corrupt(Counted):
    def __getitem__(self, number):
        if number > 1000:
            raise OSError("truncated")
        return super().__getitem__(number)


def test_an_item_that_cannot_be_read_is_named():
    with pytest.raises(UsageError, match=r"calibration raises OSError at item 1\d\d\d"):
        read(Corrupt())


@pytest.mark.parametrize("data", [Counted(100), list(ROWS[:100]), DataLoader(Counted(100), batch_size=8)])
def test_all_of_small_data_is_read_in_its_order(data):
    assert numbers_of(read(data).calls) == list(range(100))


def test_batches_of_sizes_that_may_differ_are_calls():
    found = read(DataLoader(Counted(), batch_size=4), 2, dynamic={"input": {0: "batch[1..8]"}})
    assert len(found.calls) == MOST
    assert {len(call.args[0]) for call in found.calls} == {4}
    assert {number * CLASSES // 2000 for number in numbers_of(found.calls)} == set(range(CLASSES))


def test_a_loader_batches_as_it_would():
    def collated(items):
        return {"input": torch.stack([row for row, _ in items]) * 2, "labels": [number for _, number in items]}

    found = read(DataLoader(Counted(), batch_size=32, collate_fn=collated))
    assert all(number % 2 == 0 for number in numbers_of(found.calls))
    assert max(numbers_of(found.calls)) > 3900
    assert found.read == "128 inputs; labels ignored"


class Unsized(Counted):
    def __len__(self):
        raise TypeError("streamed")

    def __iter__(self):
        return iter(ROWS)


SHUFFLED = RandomSampler(ROWS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "data",
    [
        Streamed(),
        DataLoader(Streamed(), batch_size=2),
        iter(ROWS),
        Unsized(),
        DataLoader(Counted(), batch_size=None),
        DataLoader(Counted(), batch_sampler=[[0, 1], *([i, i + 1] for i in range(2, 300))]),
    ],
    ids=["dataset", "loader", "iterator", "no length", "no batches", "batches of the user's"],
)
def test_data_that_is_no_sequence_is_read_from_the_front(data):
    assert max(numbers_of(read(data).calls)) < 129


def test_a_length_that_raises_is_told():
    """Also where it is a bug of the dataset, which then is not sampled evenly."""
    assert "its length is not known: TypeError('streamed')" in read(Unsized()).read


def test_a_loader_that_shuffles_is_read_as_it_is():
    found = read(DataLoader(ROWS, batch_size=8, sampler=SHUFFLED))
    SHUFFLED.generator.manual_seed(0)
    assert numbers_of(found.calls) == list(SHUFFLED)[:MOST]


def test_messages_name_the_number_of_the_item():
    broken = ROWS.clone()
    broken[1000:] = torch.nan
    with pytest.raises(UsageError, match=r"calibration input 1\d\d\d contains NaN"):
        read(list(broken))


@pytest.mark.parametrize(("count", "of"), [(0, 5), (1, 1), (3, 3), (7, 100), (128, 129), (128, 10**9)])
def test_numbers_are_spread(count, of):
    found = spread(count, of)
    assert len(set(found)) == len(found) == count
    assert found == sorted(found)
    assert all(place * of // count <= number < (place + 1) * of // count for place, number in enumerate(found))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 64])
def test_every_item_has_one_place(count):
    items = list(range(count))
    assert sorted(spread_out(items)) == items
    first, second = halves(items)
    assert sorted(first + second) == items
    assert len(first) - len(second) == count % 2


def test_an_array_of_numbers_is_a_sequence_of_rows():
    assert len(read(np.zeros((4, 3), dtype=np.float32)).calls) == 4


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_loader_is_read_in_the_order_of_its_rows(batch):
    found = numbers_of(read(DataLoader(Counted(), batch_size=batch)).calls)
    assert found == sorted(found)
    assert (len(set(found)), max(found) > 1900) == (MOST, True)


def test_a_loader_of_which_all_is_needed_makes_its_own_batches():
    loader = DataLoader(Counted(320), batch_size=32)
    assert numbers_of(read(loader, 32).calls) == list(range(320))


def test_batches_that_hold_more_than_the_first_one_do_not_end_reading_early():
    def collated(items):
        rows = torch.stack([row for row, _ in items])
        return rows if 0 in rows[:, 0] else rows.repeat(20, 1)

    found = numbers_of(read(DataLoader(Counted(), batch_size=2, collate_fn=collated)).calls)
    assert max(found) > 1900
    assert len({number * CLASSES // 2000 for number in found}) == CLASSES


def test_a_state_is_seen_as_the_order_of_a_loader_leaves_it():
    weight = torch.ones(8, 8)

    def forward(self, x):
        y = nn.functional.linear(self.mean + 0 * x, weight)
        self.mean.mul_(0.9).add_(0.1 * x)
        return y

    frames = 10 * torch.sin(torch.arange(1000.0) / 1000 * 6.3)[:, None].expand(-1, 8)
    program = tsopt.capture(Net(forward, mean=torch.zeros(1, 8)), frames[:1])
    (value,) = readers_of_integers(layers_of(program))

    def seen(data):
        calls = read_calibration(data, program.signature, as_example(frames[:1])).observed
        found = observe(program, [flat_inputs(program, call) for call in calls], [value], lambda text: None)
        return found[value.name].low, found[value.name].high

    assert seen(DataLoader(frames, batch_size=1)) == seen(list(frames.split(1)))
    assert seen(DataLoader(frames, batch_size=1))[1] > 7


class BrokenItem(Counted):
    """The code that reads one of its items has an error."""

    def __init__(self, count, broken):
        super().__init__(count)
        self.broken = broken

    def __getitem__(self, number):
        return super().__getitem__([][0] if number in self.broken else number)


# Of 1000, those that are read first are 0, 618, 236, 854, ...
@pytest.mark.parametrize(("count", "broken"), [(1000, {236}), (1000, {854}), (100, {50}), (100, {98})])
@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: DataLoader(data, batch_size=8)])
def test_an_item_that_raises_an_index_error_is_not_the_end(count, broken, wrapped):
    with pytest.raises(UsageError, match=f"calibration raises IndexError at item {min(broken)}"):
        read(wrapped(BrokenItem(count, broken)))


def test_an_index_error_of_a_collating_function_is_not_the_end():
    def collated(items):
        return [][0]

    with pytest.raises(UsageError, match="calibration raises IndexError after 0 items"):
        read(DataLoader(Counted(), batch_size=8, collate_fn=collated))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_length_is_found_and_said(workers):
    data = TooLong()
    found = read(data)
    assert "the length of the data is 4000, but only 2000 items can be read" in found.read
    assert len({number * CLASSES // 2000 for number in numbers_of(found.calls)}) == CLASSES
    assert len(data.asked) < MOST + 15
    found = read(DataLoader(TooLong(), batch_size=8, num_workers=workers))
    assert "the length of the data is 4000, but only 2000 items can be read" in found.read
    assert len({number * CLASSES // 2000 for number in numbers_of(found.calls)}) == CLASSES
    rest = read(DataLoader(TooLong(95), batch_size=8, num_workers=workers), 8)
    assert sorted(numbers_of(rest.calls)) == sorted(set(numbers_of(rest.calls))), "no row twice"
    assert len(rest.calls) == 11


def test_a_dataset_without_a_readable_item_is_refused():
    for wrapped in (BrokenItem(300, range(300)), DataLoader(BrokenItem(300, range(300)), batch_size=8)):
        with pytest.raises(UsageError, match="calibration raises IndexError at item 0"):
            read(wrapped)
