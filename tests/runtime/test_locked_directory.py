"""Directories that say whether their owner is alive."""

from __future__ import annotations

import os
import tempfile

import pytest

from tsopt.runtime import locked_directory
from tsopt.runtime.locked_directory import JOB, OURS, RACE, create, find, owner_is_dead, sweep_ours


def test_the_owner_of_a_directory_is_alive_until_its_lock_is_released(tmp_path):
    made, lock = create(tmp_path, "a-", ".b")
    assert find(tmp_path, "a-", ".b") == [made]
    with owner_is_dead(made) as dead:
        assert not dead
    os.close(lock)
    with owner_is_dead(made) as dead, owner_is_dead(made) as at_the_same_time:
        assert (dead, at_the_same_time) == (True, False), "one sweeper is enough"


def test_only_directories_with_both_marks_are_found(tmp_path):
    for name in ("a-1.b", "a-2", "3.b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a-4.b").write_text("")
    (tmp_path / "a-5.b").symlink_to(tmp_path / "a-2")
    assert find(tmp_path, "a-", ".b") == [tmp_path / "a-1.b"]
    assert find(tmp_path / "missing", "a-", ".b") == []


@pytest.mark.parametrize("path", ["missing", "link"])
def test_what_cannot_be_opened_is_an_error_of_the_system(path, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError), owner_is_dead(tmp_path / path):  # noqa: PT011
        pass


def test_without_locks_nobody_is_known_to_be_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(locked_directory, "fcntl", None)
    made, lock = create(tmp_path, "a-", ".b")
    os.close(lock)
    with owner_is_dead(made) as dead:
        assert not dead


def test_a_sweep_before_the_lock_is_another_try(tmp_path, monkeypatch):
    made, real = [], tempfile.mkdtemp

    def swept_at_once(**options):
        made.append(real(**options))
        if len(made) == 1:
            locked_directory.sweep(tmp_path, "a-", ".b")
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    found, lock = create(tmp_path, "a-", ".b")
    os.close(lock)
    assert [str(found)] == made[1:]


@pytest.mark.parametrize("suffix", [RACE, JOB])
def test_what_a_live_process_of_ours_uses_survives_the_sweep_of_another(tmp_path, suffix):
    made, lock = create(tmp_path, f"{OURS}1-", suffix)
    sweep_ours(tmp_path)
    assert made.exists()
    os.close(lock)
    sweep_ours(tmp_path)
    assert not made.exists()
