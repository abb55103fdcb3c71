"""Results of races on disk: kept whole, found by what decides a race, never believed when damaged or foreign."""

from __future__ import annotations

import copy
import functools
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tsopt
from tests.runtime.helpers import ENTRY, KEY, candidates
from tests.runtime.racing.cached import RACING, kept
from tsopt.compiler.calls.example import as_example
from tsopt.runtime.racing import cache, cache_files
from tsopt.runtime.rendering import row_cells


def program(scale: float = 1.0, size: int = 3):
    return tsopt.capture(lambda x: x.sin() * scale, torch.ones(size))


def changed(change):
    place = kept()
    data = json.loads(place.read_text())
    change(data)
    place.write_text(json.dumps(data))
    return place


def test_what_is_kept_is_found_as_it_was():
    kept()
    assert cache.find(KEY, RACING, 10.0) == ENTRY


def test_nothing_is_found_where_nothing_is():
    assert cache.find(KEY, RACING, 10.0) is None
    assert not cache.directory().exists()


def test_only_the_user_can_look_into_it():
    place = kept()
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_a_shorter_race_does_not_do_for_a_longer_one():
    kept()
    assert cache.find(KEY, RACING, 10.5) is None
    assert cache.find(KEY, RACING, 1.0) == ENTRY


def test_a_winner_that_does_not_race_is_not_found():
    kept()
    assert cache.find(KEY, candidates("eager", "torchscript"), 1.0) is None


@pytest.mark.parametrize("other", [program(scale=2.0), program(size=4)], ids=["literal", "shape"])
def test_another_program_is_another_race(other):
    same = cache.key_of(program(), program(), RACING, None)
    assert same == cache.key_of(program(), program(), RACING, None)
    assert same != cache.key_of(other, program(), RACING, None)
    assert same != cache.key_of(program(), other, RACING, None)


def test_other_racers_threads_and_machines_are_another_race(monkeypatch):
    keys = [
        cache.key_of(program(), program(), RACING, None),
        cache.key_of(program(), program(), candidates("eager"), None),
        cache.key_of(program(), program(), RACING, 1),
    ]
    there = cache.environment()
    monkeypatch.setattr(cache, "environment", lambda: replace(there, cpu="another"))
    keys.append(cache.key_of(program(), program(), RACING, None))
    monkeypatch.setattr(cache, "__version__", "99")
    keys.append(cache.key_of(program(), program(), RACING, None))
    assert len(set(keys)) == len(keys)


def test_weights_of_other_values_are_the_same_race():
    models = [torch.nn.Linear(3, 3).eval() for _ in range(2)]
    one, other = (tsopt.capture(model, torch.ones(1, 3)) for model in models)
    assert cache.key_of(one, one, RACING, None) == cache.key_of(other, other, RACING, None)


def test_a_race_with_foreign_code_has_no_name():
    assert cache.key_of(program(), program(), candidates("eager", "package.module:Class"), None) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\x00", b"[]", b"null", b"[" * 100_000, b"{}", b"0" * (2 << 20)])
def test_an_entry_that_is_none_is_removed(raw):
    place = kept()
    place.write_bytes(raw)
    assert cache.find(KEY, RACING, 1.0) is None
    assert not place.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=1),
        lambda d: d.update(key="cd" * 32),
        lambda d: d.update(rows=[]),
        lambda d: d.update(rows=3),
        lambda d: d.update(winner=["ONNX Runtime"]),
        lambda d: d.update(winner="somebody"),
        lambda d: d.update(seconds="long"),
        lambda d: d.update(seconds=float("nan")),
        lambda d: d.update(seconds=True),
        lambda d: d.update(seconds="10.0"),
        lambda d: d.update(when=1e300),
        lambda d: d.update(when=float("nan")),
        lambda d: d.update(when=-1.0),
        lambda d: d.update(when=10**400),
        lambda d: d.update(recalls=-1),
        lambda d: d.update(recalls=0.5),
        lambda d: d.update(recalls=True),
        lambda d: d.update(checked=None),
        lambda d: d.update(more=1),
        lambda d: d.pop("why"),
        lambda d: d["rows"][1].update(timing={"samples": [], "calls_per_sample": 1}),
        lambda d: d["rows"][1].update(timing={"samples": ["x"], "calls_per_sample": 1}),
        lambda d: d["rows"][1].update(speedup={"ratio": float("nan"), "low": 1, "high": 1}),
        lambda d: d["rows"][1].update(timing={"samples": [1e300], "calls_per_sample": 1}),
        lambda d: d["rows"][1].update(timing={"samples": [0.0], "calls_per_sample": 1}),
        lambda d: d["rows"][1].update(timing={"samples": [True], "calls_per_sample": 1}),
        lambda d: d["rows"][1].update(timing={"samples": "11", "calls_per_sample": 1}),
        lambda d: d["rows"][1]["speedup"].update(ratio=-1.0),
        lambda d: d["rows"][1]["speedup"].update(high=1e300),
        lambda d: d["rows"][1]["speedup"].update(rounds=1),
        lambda d: d["rows"][1].update(compile_seconds=float("inf")),
        lambda d: d["rows"][1].update(status="splendid"),
        lambda d: d["rows"][1].update(status="crashed"),
        lambda d: d["rows"][1].update(notes=[3]),
        lambda d: d["rows"][1].update(notes="a note"),
        lambda d: d["rows"][1].update(reason=["it is"]),
        lambda d: d["rows"][1].update(name=7),
        lambda d: d["rows"][1]["accuracy"].update(test="faith"),
        lambda d: d["rows"][1]["accuracy"].update(max_difference="0"),
        lambda d: d["rows"][1]["cold"].update(slow_calls=1.5),
        lambda d: d["rows"].append(d["rows"][1]),
        lambda d: d["rows"].pop(0),
        lambda d: d.update(winner="model"),
        lambda d: d.update(winner="torchscript"),
        lambda d: d["rows"][1].update(key=7),
        lambda d: d["rows"][1].update(timing=None),
        lambda d: d["rows"][1].update(accuracy={"ok": True}),
        lambda d: d["rows"][1].update(cold=5),
        lambda d: d["rows"][0].update(evil=1),
    ],
)
def test_a_damaged_entry_is_removed(change):
    place = changed(change)
    assert cache.find(KEY, RACING, 1.0) is None
    assert not place.exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside a value of JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


WHOLE = json.loads(json.dumps(cache._json(ENTRY, KEY)))


@given(st.sampled_from([path for path in places(WHOLE) if path]), JSON)
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_whatever_stands_in_an_entry_it_is_read_or_refused_and_can_be_shown(path, value):
    data = copy.deepcopy(WHOLE)
    *outer, last = path
    functools.reduce(lambda item, key: item[key], outer, data)[last] = value
    cache_files.write(KEY, json.dumps(data).encode())
    found = cache.find(KEY, RACING, 1.0)
    if found is not None:
        assert found.date.startswith(("19", "20"))
        assert all(row_cells(row) and row.record() for row in found.rows)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None, database=None, derandomize=True)
def test_bytes_of_any_kind_are_no_entry(raw):
    cache_files.write(KEY, raw)
    assert cache.find(KEY, RACING, 1.0) is None


def test_an_entry_from_the_future_is_removed():
    kept()
    assert cache.find(KEY, RACING, 1.0, now=ENTRY.when - cache.AHEAD - 1) is None
    assert cache.find(KEY, RACING, 1.0) is None
    kept()
    assert cache.find(KEY, RACING, 1.0, now=ENTRY.when - cache.AHEAD + 1) == ENTRY


def test_the_oldest_entries_go(monkeypatch):
    monkeypatch.setattr(cache, "MOST", 2)
    keys = [letter * 64 for letter in "abc"]
    for age, key in enumerate(keys):
        cache.keep(key, ENTRY)
        os.utime(cache.directory() / f"{key}.json", (age, age))
    assert [path.stem for path in cache.entries()] == keys[1:]


def test_the_files_of_winners_go_with_their_entries(monkeypatch):
    monkeypatch.setattr(cache, "MOST", 1)
    for age, letter in enumerate("ab"):
        cache.keep(letter * 64, ENTRY, b"files")
        os.utime(cache.directory() / f"{letter * 64}.json", (age, age))
    assert [cache.files_of_winner(letter * 64) for letter in "ab"] == [None, b"files"]
    cache.forget("b" * 64)
    assert cache.files_of_winner("b" * 64) is None


def test_the_files_of_winners_take_only_so_much(monkeypatch):
    monkeypatch.setattr(cache_files, "MOST_BYTES", 25)
    for age, letter in enumerate("abc"):
        cache.keep(letter * 64, ENTRY, bytes(10))
        os.utime(cache.directory() / f"{letter * 64}.files", (age, age))
    assert [cache.files_of_winner(letter * 64) is None for letter in "abc"] == [True, False, False]
    assert len(cache.entries()) == 3
    assert cache_files.size() > 20


def test_steps_are_counted_limited_and_cleared(monkeypatch):
    monkeypatch.setattr(cache_files, "MOST_BYTES", 25)
    for age, letter in enumerate("abc"):
        cache_files.write(letter * 64, bytes(10), cache_files.STEP)
        os.utime(cache.directory() / f"{letter * 64}.step", (age, age))
    cache_files.drop_oldest_steps()
    monkeypatch.setattr(cache_files, "MOST_STEPS", 2)
    cache_files.drop_oldest_steps()
    assert [cache_files.read(letter * 64, cache_files.STEP) for letter in "abc"] == [None, bytes(10), bytes(10)]
    assert (cache_files.size(), cache.entries()) == (20, [])
    cache.clear()
    assert list(cache.directory().iterdir()) == []


def test_an_entry_without_files_removes_those_of_an_earlier_winner():
    cache.keep(KEY, ENTRY, b"files")
    cache.keep(KEY, ENTRY)
    assert cache.files_of_winner(KEY) is None


def test_what_is_in_place_of_files_is_not_read():
    cache.keep(KEY, ENTRY)
    (cache.directory() / f"{KEY}.files").symlink_to(cache.directory() / f"{KEY}.json")
    assert cache.files_of_winner(KEY) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_race_is_likely_to_be_known_by_sizes_and_types():
    model, x = torch.nn.Linear(2, 2), as_example(torch.ones(1, 2))
    kind = cache.kind_of(model, x)
    assert not cache.may_know(kind)
    cache.keep(f"{kind}-{KEY}", ENTRY)
    assert cache.may_know(kind)
    assert cache.may_know(cache.kind_of(torch.nn.Linear(2, 2), as_example(torch.zeros(1, 2))))
    others = [(model.double(), x), (torch.nn.Linear(2, 3), x), (torch.nn.LazyLinear(2), x)]
    others += [(torch.nn.Linear(2, 2), as_example(torch.ones(2, 2))), (torch.relu, x)]
    assert not any(cache.may_know(cache.kind_of(*other)) for other in others)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert cache.kind_of(model, as_example(nested)) == ""


def test_clear_removes_all_entries_and_nothing_else():
    other = kept().parent / "notes.txt"
    other.write_text("mine")
    cache.keep("cd" * 32, ENTRY)
    cache.keep(f"{'e' * 16}-{KEY}", ENTRY, b"files")
    (cache.directory() / f"{'cd' * 32}.files").write_text("of an entry that has gone")
    assert cache.clear() == 3
    assert cache.clear() == 0
    assert [path.name for path in cache.directory().iterdir()] == ["notes.txt"]


def test_clear_removes_what_somebody_was_writing_when_killed(monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            cache.keep(f"{'e' * 16}-{KEY}", ENTRY)
    assert len(list(cache.directory().glob("*.new"))) == 1
    cache.clear()
    assert list(cache.directory().iterdir()) == []


@pytest.mark.parametrize("name", ["package.json", "left.new", "a.files", f"{'A' * 64}.json", f"{'a' * 65}.json"])
def test_files_of_the_user_in_the_same_directory_are_neither_counted_nor_removed(monkeypatch, name):
    monkeypatch.setattr(cache, "MOST", 1)
    monkeypatch.setattr(cache_files, "MOST_BYTES", 0)
    other = kept().parent / name
    other.write_text("mine")
    os.utime(other, (0, 0))
    cache.keep("cd" * 32, ENTRY)
    assert len(cache.entries()) == 1
    assert not cache.may_know(name[:5])
    cache.clear()
    assert other.read_text() == "mine"
