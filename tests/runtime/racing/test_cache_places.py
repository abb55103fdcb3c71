"""What else may be where results of races are kept: links, devices, directories of others, full disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat

import pytest

from tests.runtime.helpers import ENTRY, KEY
from tests.runtime.racing.cached import RACING, kept
from tsopt.runtime.racing import cache


def test_an_entry_is_not_read_through_a_link(tmp_path):
    place = kept()
    target = tmp_path / "elsewhere.json"
    place.rename(target)
    place.symlink_to(target)
    assert cache.find(KEY, RACING, 1.0) is None
    assert target.exists()


def fifo(place):
    os.mkfifo(place)


def folder(place):
    place.mkdir()
    (place / "mine").write_text("mine")


def tcp(place):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made, contextlib.chdir(place.parent):
        made.bind(place.name)


def sparse(place):
    with place.open("wb") as file:
        file.truncate(1 << 40)


def device(place):
    place.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, folder, tcp, sparse, device])
def test_what_is_in_the_place_of_an_entry_is_neither_read_nor_waited_for(make):
    place = kept()
    place.unlink()
    make(place)
    assert cache.find(KEY, RACING, 1.0) is None
    assert os.path.lexists(place) == (make is folder)
    cache.keep(KEY, ENTRY)
    assert cache.find(KEY, RACING, 1.0) == (None if make is folder else ENTRY)
    place.parent.joinpath(f"{'cd' * 32}.json").write_text("{}")
    assert cache.clear() == (1 if make is folder else 2)
    assert [path.name for path in place.parent.iterdir()] == ([place.name] if make is folder else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_in_the_place_of_an_entry_is_not_opened(monkeypatch):
    place = kept()
    place.unlink()
    try:
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no devices may be made here")
    monkeypatch.setattr(os, "open", None)
    assert cache.find(KEY, RACING, 1.0) is None


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_directory_that_others_may_write_into_is_not_used(mode):
    place = kept()
    place.parent.chmod(mode)
    assert "writable by other users" in cache.objection()
    assert cache.find(KEY, RACING, 1.0) is None
    place.unlink()
    cache.keep(KEY, ENTRY)
    assert not place.exists()


def test_a_directory_of_another_user_is_not_used(monkeypatch):
    kept()
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    assert "another user" in cache.objection()
    assert cache.find(KEY, RACING, 1.0) is None


def test_a_tilde_in_the_variable_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TSOPT_CACHE_DIR", "~/races")
    assert kept().parent == tmp_path / "races"
    assert cache.find(KEY, RACING, 10.0) == ENTRY


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("place", [None, "~/races", "~no-such-user/races"])
def test_no_home_directory_is_no_cache_and_no_error(monkeypatch, place):
    if place is not None:
        monkeypatch.setenv("TSOPT_CACHE_DIR", place)
    assert cache.objection() == "the user has no home directory; set TSOPT_CACHE_DIR to another directory"
    cache.keep(KEY, ENTRY, b"files")
    assert cache.find(KEY, RACING, 10.0) is None
    assert cache.files_of_winner(KEY) is None
    cache.forget(KEY)
    assert not cache.may_know("")
    assert (cache.entries(), cache.clear()) == ([], 0)


def test_a_link_in_place_of_the_directory_is_not_used(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    cache.directory().symlink_to(tmp_path / "real")
    cache.keep(KEY, ENTRY)
    assert "is not a directory" in cache.objection()
    assert list((tmp_path / "real").iterdir()) == []


def test_a_file_in_place_of_the_directory_is_no_error():
    cache.directory().write_text("mine")
    cache.keep(KEY, ENTRY)
    assert cache.find(KEY, RACING, 1.0) is None
    assert cache.directory().read_text() == "mine"


def test_a_full_disk_leaves_no_half_entry(monkeypatch):
    place = kept()
    before = place.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.keep(KEY, ENTRY)
    assert [path.read_bytes() for path in place.parent.iterdir()] == [before]


def test_the_directory_may_go_at_any_time():
    shutil.rmtree(kept().parent)
    assert cache.find(KEY, RACING, 1.0) is None
    assert cache.entries() == []
    kept()
    assert cache.find(KEY, RACING, 1.0) == ENTRY
