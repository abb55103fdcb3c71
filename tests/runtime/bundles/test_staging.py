"""A place is what it was or what it is to be, whenever its writer is killed, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tsopt.errors import BundleError
from tsopt.runtime import locked_directory
from tsopt.runtime.bundles import staging
from tsopt.runtime.bundles.staging import ASIDE, PART, exchange, finished, longest_name, replace, staged, sweep

OLD, NEW = {"a": "old", "b": "old"}, {"a": "new", "c": "new"}


def write(place: Path, files: dict[str, str]) -> None:
    with staged(place) as directory:
        for name, text in files.items():
            (directory / name).write_text(text)


def contents(place: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in finished(place).iterdir()}


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "exchange", lambda a, b: False)


@pytest.fixture(params=["exchange", "two renames"])
def place(request, monkeypatch, tmp_path) -> Iterator[Path]:
    if request.param == "two renames":
        without_exchange(monkeypatch)
    elif not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    return tmp_path / "m.tsopt"


def can_exchange(directory: Path) -> bool:
    (directory / "x").mkdir()
    (directory / "y").mkdir()
    found = exchange(directory / "x", directory / "y")
    (directory / "x").rmdir()
    (directory / "y").rmdir()
    return found


def in_child(work: Callable[[], None]) -> int:
    """How a fork that does some work ends, as `waitpid` says it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def killed_at(step: int) -> None:
    """Ends this process, as SIGKILL would, right before so many things are done to files."""
    left = [step]

    def hook(event: str, _: object) -> None:
        if event != "os.kill" and event.startswith(("os.", "open", "shutil.", "tempfile.", "fcntl.", "ctypes.")):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_what_was_there_is_replaced(place):
    write(place, OLD)
    write(place, NEW)
    assert contents(place) == NEW
    assert os.listdir(place.parent) == ["m.tsopt"]


def test_a_writer_that_is_killed_at_any_step_leaves_the_old_or_the_new(place, fuzz_factor):
    """Every operation on files is one step; the slice takes each seventh, and those around the move."""
    write(place, OLD)
    seen, step, every = set(), 0, 7 if fuzz_factor == 1 else 1
    while True:

        def work(step: int = step) -> None:
            killed_at(step)
            write(place, NEW)

        ended = in_child(work)
        found = contents(place)
        assert found in (OLD, NEW), step
        seen.add(found["a"])
        if not ended:
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL
        write(place, OLD)
        assert contents(place) == OLD
        assert os.listdir(place.parent) == ["m.tsopt"], step
        step += every
    assert seen == {"old", "new"}
    assert step > 20


def test_a_writer_that_is_killed_between_two_renames_leaves_a_whole_directory(tmp_path, monkeypatch, fuzz_factor):
    without_exchange(monkeypatch)
    place, rename = tmp_path / "m.tsopt", Path.rename

    def dying(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if str(target).endswith(ASIDE):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    write(place, OLD)
    for _ in range(100 if fuzz_factor > 1 else 5):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            assert os.WTERMSIG(in_child(lambda: write(place, NEW))) == signal.SIGKILL
        assert not place.exists()
        assert contents(place) == OLD
        sweep(place)
        assert contents(place) == OLD
        assert os.listdir(tmp_path) == ["m.tsopt"]


def test_writers_that_are_killed_at_random_moments_leave_the_old_or_the_new(place, fuzz_factor):
    random.seed(0)
    write(place, OLD)

    def work() -> None:
        while True:
            write(place, NEW)
            write(place, OLD)

    for _ in range(250 if fuzz_factor > 1 else 5):
        child = os.fork()
        if not child:
            work()
        time.sleep(random.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert contents(place) in (OLD, NEW)
    write(place, NEW)
    assert contents(place) == NEW
    assert os.listdir(place.parent) == ["m.tsopt"]


def test_what_a_live_writer_is_writing_is_not_swept(place):
    with staged(place) as mine:
        (mine / "a").write_text("mine")
        write(place, OLD)
        assert (mine / "a").exists()
    assert contents(place) == {"a": "mine"}
    assert os.listdir(place.parent) == ["m.tsopt"]


def test_what_dead_writers_left_is_swept(tmp_path):
    for number in range(3):
        (tmp_path / f".m.tsopt.{number}{PART}").mkdir()
    write(tmp_path / "m.tsopt", NEW)
    assert os.listdir(tmp_path) == ["m.tsopt"]


@pytest.mark.parametrize("name", [".m.tsopt.original", f".other.tsopt.1{PART}", "m.tsopt.bak", ".m.tsopt.aside"])
def test_directories_of_others_are_not_swept(tmp_path, name):
    (tmp_path / name).mkdir()
    write(tmp_path / "m.tsopt", NEW)
    assert (tmp_path / name).is_dir()


def test_a_link_with_our_mark_is_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("")
    (tmp_path / f".m.tsopt.1{PART}").symlink_to(tmp_path / "mine")
    write(tmp_path / "m.tsopt", NEW)
    assert (tmp_path / "mine" / "thesis").exists()


def test_where_there_are_no_locks_nothing_is_swept(tmp_path, monkeypatch):
    (tmp_path / f".m.tsopt.1{PART}").mkdir()
    monkeypatch.setattr(locked_directory, "fcntl", None)
    write(tmp_path / "m.tsopt", NEW)
    assert sorted(os.listdir(tmp_path)) == [f".m.tsopt.1{PART}", "m.tsopt"]


def test_a_writer_that_a_sweeper_took_for_a_dead_one_begins_again(tmp_path, monkeypatch):
    lock, taken = locked_directory._lock, []

    def slow(handle: int) -> bool | None:
        if not taken:
            taken.append(next(tmp_path.glob(f"*{PART}")))
            taken[0].rmdir()
        return lock(handle)

    monkeypatch.setattr(locked_directory, "_lock", slow)
    write(tmp_path / "m.tsopt", NEW)
    assert contents(tmp_path / "m.tsopt") == NEW


def test_the_old_is_set_back_when_the_new_cannot_be_moved(tmp_path, monkeypatch):
    without_exchange(monkeypatch)
    place, rename = tmp_path / "m.tsopt", Path.rename
    write(place, OLD)

    def failing(self: Path, target: Path) -> Path:
        if target == place and self.name.endswith(PART):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BundleError, match="cannot be written"):
        write(place, NEW)
    assert contents(place) == OLD
    assert os.listdir(tmp_path) == ["m.tsopt"]


def test_the_longest_name_in_use_is_known_before_a_place_is_written(tmp_path, monkeypatch):
    without_exchange(monkeypatch)
    place, rename, used = tmp_path / "m.tsopt", Path.rename, []
    write(place, OLD)

    def noted(self: Path, target: Path) -> Path:
        used.extend((self.name, target.name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    write(place, NEW)
    assert any(name.endswith(ASIDE) for name in used)
    assert max(map(len, used)) == len(longest_name(place))


def test_another_writer_that_was_there_first_is_replaced(tmp_path, monkeypatch):
    place, new, lexists = tmp_path / "m.tsopt", tmp_path / "new", os.path.lexists
    new.mkdir()
    (new / "a").write_text("mine")

    def late(path: Path) -> bool:
        monkeypatch.setattr(os.path, "lexists", lexists)
        place.mkdir()
        (place / "a").write_text("theirs")
        return False

    monkeypatch.setattr(os.path, "lexists", late)
    replace(new, place)
    assert contents(place) == {"a": "mine"}
    assert os.listdir(tmp_path) == ["m.tsopt"]


def test_a_system_without_exchange_says_so(tmp_path, monkeypatch):
    class Library:
        def __init__(self, *args: object, **options: object) -> None: ...

    monkeypatch.setattr(staging.ctypes, "CDLL", Library)
    assert not exchange(tmp_path / "a", tmp_path / "b")


def test_an_exchange_that_fails_for_another_reason_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No such file") as caught:
        exchange(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.ENOENT
