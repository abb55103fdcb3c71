"""The garbage collector during imports."""

from __future__ import annotations

import gc

import pytest

from tsopt.importing import without_collector


def test_it_does_not_run_meanwhile():
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error():
    with pytest.raises(ImportError), without_collector():
        raise ImportError
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
