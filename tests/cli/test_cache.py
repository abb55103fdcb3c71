"""`tsopt cache`, and the option that does without it."""

from __future__ import annotations

import pytest

from tests.runtime.helpers import ENTRY, KEY
from tsopt.runtime.racing import cache, cache_files


@pytest.fixture
def open_to_others():
    """A cache with one race, in a directory that anybody may write into."""
    cache.keep(KEY, ENTRY)
    cache.directory().chmod(0o777)


def test_show_says_where_and_how_many(tsopt):
    assert tsopt("cache", "show").out.startswith(f"{cache.directory()}: 0 races")
    cache.keep(KEY, ENTRY)
    found = tsopt("cache", "show", "--json").json
    assert (found["directory"], found["entries"], found["objection"]) == (str(cache.directory()), 1, "")
    assert found["bytes"] > 100


@pytest.mark.usefixtures("open_to_others")
def test_show_says_why_it_is_not_used(tsopt):
    ran = tsopt("cache", "show")
    assert ran.code == 0
    assert "is writable by other users" in ran.out


def test_clear_forgets_all(tsopt):
    cache.keep(KEY, ENTRY)
    ran = tsopt("cache", "clear")
    assert (ran.code, ran.out) == (0, f"removed 1 race from {cache.directory()}\n")
    assert cache.entries() == []
    assert tsopt("cache", "clear", "--json").json == {"removed": 0, "steps": 0}


def test_steps_of_quantization_are_counted(tsopt):
    cache_files.write(KEY, b"step", cache_files.STEP)
    assert "0 races and 1 step of quantization, 0.0 kB" in tsopt("cache", "show").out
    assert tsopt("cache", "show", "--json").json["steps"] == 1
    assert tsopt("cache", "clear").out == f"removed 0 races and 1 step of quantization from {cache.directory()}\n"
    assert tsopt("cache", "clear", "--json").json["steps"] == 0


@pytest.mark.usefixtures("open_to_others")
def test_clear_leaves_a_directory_alone_that_is_not_the_users_own(tsopt):
    ran = tsopt("cache", "clear")
    assert ran.code == 2
    assert "the cache was not cleared" in ran.err
    assert len(list(cache.directory().iterdir())) == 1


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory_both_say_that_there_is_no_cache(tsopt):
    ran = tsopt("cache", "show")
    assert (ran.code, ran.out) == (
        0,
        "the cache is not used: the user has no home directory; set TSOPT_CACHE_DIR to another directory\n",
    )
    assert tsopt("cache", "show", "--json").json["directory"] is None
    ran = tsopt("cache", "clear")
    assert ran.code == 2
    assert "set TSOPT_CACHE_DIR" in ran.err


@pytest.mark.parametrize(("arguments", "wanted"), [([], True), (["--cache"], True), (["--no-cache"], False)])
@pytest.mark.usefixtures("quick")
def test_export_can_do_without(tsopt, write, monkeypatch, tmp_path, arguments, wanted):
    from tsopt import api

    write()
    asked = []
    real = api.optimize
    monkeypatch.setattr(api, "optimize", lambda *a, **k: asked.append(k["cache"]) or real(*a, **k))
    assert tsopt("export", "m.py", "-o", str(tmp_path / "out"), *arguments).code == 0
    assert asked == [wanted]
