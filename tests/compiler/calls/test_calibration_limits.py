"""How much calibration data is read: not more than memory and time allow, and of all of it even so."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.compiler.calls.calibrated import first, read, rows
from tsopt.compiler.calls import calibration_again, calibration_kept, calibration_order
from tsopt.compiler.calls.calibration_again import readable_again
from tsopt.compiler.calls.calibration_kept import LEAST, MOST
from tsopt.errors import UsageError

ROW = 12  # bytes
LATE = "; more would take too long for the budget"


class Slow(Dataset):
    """Rows by number, each of which takes a second."""

    def __init__(self, clock, count=2000):
        self.clock, self.count, self.asked = clock, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.clock.now += 1
        self.asked.append(number)
        return torch.full((3,), float(number))


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def numbers_of(found):
    return torch.cat(first(found))[:, 0].int().tolist()


FORMS = {
    "dataset": lambda data: data,
    "loader": lambda data: DataLoader(data, batch_size=4),
    "loader of rows": lambda data: DataLoader(data, batch_size=1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("count", [100, 2000])
def test_reading_ends_in_time_and_the_inputs_are_of_all_of_the_data(clock, form, count):
    data = Slow(clock, count)
    found = read(form(data), size=1, end=clock.now + 40)
    assert 40 <= len(data.asked) <= 48
    assert 36 <= len(found.calls) <= 44
    assert found.read.startswith(f"{len(found.calls)} inputs{LATE}")
    numbers = numbers_of(found)
    assert len({number * 8 // count for number in numbers}) == 8
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("form", [*FORMS.values(), iter], ids=[*FORMS, "iterator"])
def test_a_few_inputs_are_read_however_long_they_take(clock, form):
    found = read(form(Slow(clock)), size=1, end=clock.now)
    assert len(found.calls) == LEAST
    assert LATE in found.read


def test_data_that_is_read_in_time_is_read_to_its_end(clock):
    for form in FORMS.values():
        found = read(form(Slow(clock, 20)), size=1, end=clock.now + 1000)
        assert numbers_of(found) == list(range(20))
        assert LATE not in found.read


@pytest.mark.parametrize("form", [*FORMS.values(), iter], ids=[*FORMS, "iterator"])
@pytest.mark.parametrize(("room", "count"), [(30, 30), (1, LEAST), (1000, MOST)])
def test_the_memory_of_inputs_is_limited(monkeypatch, clock, form, room, count):
    monkeypatch.setattr(calibration_kept, "LARGEST", room * ROW)
    data = Slow(clock)
    found = read(form(data), size=1)
    assert len(found.calls) == count
    assert len(data.asked) < count + 8
    assert ("; more would take over" in found.read) == (count < MOST)
    assert form is iter or len({number * 8 // 2000 for number in numbers_of(found)}) == 8


def test_of_large_items_not_more_is_kept_than_memory_allows(monkeypatch):
    monkeypatch.setattr(calibration_kept, "LARGEST", 40 * ROW)
    found = read([rows(500, 3 * 500 * i) for i in range(10)], size=1)
    assert len(found.calls) == 40
    assert len({int(x[0, 0]) // 1500 for x in first(found)}) == 8
    assert len(read([rows(500)], size=1).calls) == 40


def test_of_an_iterator_only_so_much_is_read_as_a_run_asks_for():
    taken = []

    def batches():
        for number in range(1000):
            taken.append(number)
            yield rows(100, number)

    data = readable_again(batches())
    assert not taken
    found = read(data, size=1)
    assert len(taken) == 2
    assert torch.equal(torch.cat(first(read(data, size=1))), torch.cat(first(found)))
    assert len(taken) == 2
    assert len(read(data, size=20).calls) == MOST
    assert len(taken) == 26


def test_an_iterator_of_rows_serves_large_batches():
    data = readable_again(iter(rows(20_000).split(1)))
    assert len(read(data, size=128).calls) == MOST
    assert len(read(data, size=1).calls) == MOST


def test_what_an_iterator_raises_is_for_each_run():
    def broken():
        yield rows(2)
        raise RuntimeError("the disk is gone")

    data = readable_again(broken())
    for _ in range(2):
        with pytest.raises(UsageError, match="calibration raises RuntimeError after 1 item"):
            read(data)


def test_of_an_iterator_another_process_gets_what_it_probably_needs(monkeypatch):
    data = readable_again(iter(rows(1000).split(1)))
    assert len(pickle.loads(pickle.dumps(data))) == MOST
    read(data, size=2)
    assert len(pickle.loads(pickle.dumps(data))) == 2 * MOST, "what has been read"
    monkeypatch.setattr(calibration_again, "LARGEST", 30 * ROW)
    assert len(pickle.loads(pickle.dumps(readable_again(iter(rows(1000).split(1)))))) == 30


def test_workers_of_a_loader_are_not_started_for_each_batch(clock, monkeypatch):
    made = []

    class SlowToStart(DataLoader):
        def __iter__(self):
            clock.now += 50
            made.append(self)
            return super().__iter__()

    monkeypatch.setattr(calibration_order, "DataLoader", SlowToStart)
    found = read(SlowToStart(Slow(clock), batch_size=2), size=2, end=clock.now + 20)
    assert len(first(found)) >= LEAST
    assert len(made) == 2, "one for the first batch, which tells how many more there are"
