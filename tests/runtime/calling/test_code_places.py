"""Values that a model's code reads from a context or a thread, watched for changes."""

from __future__ import annotations

import contextvars
import threading

from tsopt.runtime.calling.model_changes import Watch

GAIN = contextvars.ContextVar("gain", default=1.0)


LOCAL = threading.local()


def by_context(x):
    return x * GAIN.get()


def by_thread(x):
    return x * getattr(LOCAL, "scale", 1.0)


def in_another_thread(see):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(see()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_context_has_values_of_its_own():
    watch, reset = Watch(by_context), GAIN.set(1.0)

    def see():
        GAIN.set(2.0)
        return watch.changed()

    assert not watch.changed()
    assert contextvars.copy_context().run(see)
    assert in_another_thread(see)
    assert not watch.changed()
    GAIN.reset(reset)


def test_a_thread_has_values_of_its_own(monkeypatch):
    monkeypatch.setattr(LOCAL, "scale", 2.0, raising=False)
    watch = Watch(by_thread)

    def see():
        seen = watch.changed()
        LOCAL.scale = 2.0
        return seen, watch.changed()

    assert not watch.changed()
    assert in_another_thread(see) == (True, False)
    assert not watch.changed()
    LOCAL.unread = 1
    assert not watch.changed()
    LOCAL.scale = 3.0
    assert watch.changed()


def test_what_a_thread_had_not_may_come():
    watch = Watch(by_thread)
    assert not watch.changed()

    def see():
        LOCAL.scale = 2.0
        return watch.changed()

    assert in_another_thread(see)
