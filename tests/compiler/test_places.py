"""Values that no dictionary holds."""

from __future__ import annotations

import pytest

from tsopt.compiler.places import ABSENT, OfClass


class Base:
    @classmethod
    def make(cls):
        return cls()


class Sub(Base):
    pass


def test_an_attribute_of_a_class_as_it_is_defined(monkeypatch):
    place = OfClass(Sub, "make")
    first = place["make"]
    assert first is vars(Base)["make"]
    monkeypatch.setattr(Sub, "make", classmethod(lambda cls: None), raising=False)
    assert place["make"] is vars(Sub)["make"] is not first
    place["make"] = first
    assert vars(Sub)["make"] is first
    assert (list(place), len(place)) == (["make"], 1)
    with pytest.raises(NotImplementedError):
        del place["make"]


def test_an_attribute_that_is_gone():
    assert OfClass(Sub, "gone")["gone"] is ABSENT
