"""Values that no dictionary holds."""

from __future__ import annotations

import contextvars
import threading

from tsopt.compiler.places import ABSENT, InContext, InThread, OfClass


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


def test_an_attribute_that_is_gone():
    assert OfClass(Sub, "gone")["gone"] is ABSENT


def test_a_context_variable_has_the_value_of_the_current_context():
    variable = contextvars.ContextVar("gain")
    place = InContext(variable)
    assert place["gain"] is ABSENT
    place["gain"] = ABSENT
    assert place["gain"] is ABSENT
    variable.set(2.0)
    assert place["gain"] == 2.0
    contextvars.copy_context().run(variable.set, 3.0)
    assert place["gain"] == 2.0
    assert contextvars.Context().run(place.get, "gain") is ABSENT
    place["gain"] = 1.0
    assert variable.get() == 1.0


def test_a_default_is_what_code_reads():
    assert InContext(contextvars.ContextVar("gain", default=2.0))["gain"] == 2.0


def test_what_a_thread_has_for_itself(in_a_thread):
    held, found = threading.local(), []
    held.scale, held.unread = 1.0, 0
    place = InThread(held, {"scale", "shift"})
    (name,) = place
    before = place[name]
    held.unread += 1
    assert place[name] is before == {"scale": 1.0}, "the very same"
    in_a_thread(lambda: found.append(place[name]))
    assert found == [{}]
    held.scale, held.shift = 2.0, 1.0
    assert place[name] == {"scale": 2.0, "shift": 1.0}
    place[name] = before
    assert vars(held) == {"scale": 1.0, "unread": 1}
    assert place[name] is before, "put back, it has not changed"
