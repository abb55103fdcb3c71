"""What a tracer puts in place of shared functions is seen by its own thread only."""

from __future__ import annotations

import builtins
import math
import queue
import threading

import pytest
import torch
from torch import fx, nn
from torch.fx import _symbolic_trace

from tests.forks import FORKS, in_a_fork
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.capture.thread_patches import TRACING, _Here, apart
from tsopt.compiler.turns import Turn


def elsewhere(function):
    """What a function returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def fx_traces():
    """Whether torch.fx says that it traces: by a flag of the process, from torch 2.14 on by one of the thread."""
    found = getattr(
        _symbolic_trace, "_get_is_fx_tracing", lambda: getattr(_symbolic_trace, "_is_fx_tracing_flag", None)
    )
    return bool(found())


def seen():
    return (
        *(getattr(nn.Module, name).__code__.co_filename.rpartition("/")[2] for name in ("__call__", "__getattr__")),
        bool(torch.compiler.is_compiling()),
        bool(torch.compiler.is_exporting()),
        fx_traces(),
        type(math.pow(2, 3)),
        max(1, 2),
    )


class Looks(nn.Module):
    """Calls a module of its own, and lets another thread call one, while it is traced."""

    def __init__(self):
        super().__init__()
        self.layer, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.first  # shared: torch.export hands out proxies of modules
        self.other = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()),)

    def forward(self, x):
        def call():
            flags = (torch.compiler.is_compiling(), torch.compiler.is_exporting(), fx_traces())
            held = Looks.held
            return type(held.first), type(held[1](torch.ones(1, 4))), *map(bool, flags), type(math.pow(2, 3))

        Looks.seen.append(elsewhere(call))  # of the class: torch.export puts attributes back
        return self.again(self.first(self.layer(x)))


class Held(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.first = self[0]


Looks.held = Held()


@pytest.mark.parametrize("how", ["export", "fx"])
def test_another_thread_calls_modules_as_ever(how):
    model, Looks.seen = Looks().eval(), []
    with apart():
        if how == "export":
            torch.export.export(model, (torch.ones(2, 4),), strict=False)
        else:
            fx.symbolic_trace(model)
    assert set(Looks.seen) == {(nn.Linear, torch.Tensor, False, False, False, float)}


def test_the_thread_that_traces_sees_what_the_tracer_has_put_there():
    flags = []

    class Asks(nn.Module):
        def forward(self, x):
            flags.append((bool(torch.compiler.is_compiling()), type(math.pow(x.shape[0], 2))))
            return x + 1

    with apart():
        torch.export.export(Asks(), (torch.ones(2, 4),), strict=False)
    assert flags[0] == (True, int)


def test_everything_is_back_behind_it_and_modules_are_told_of():
    before, told = seen(), []
    model = nn.Sequential(nn.Linear(4, 4))
    with apart(told.append):
        torch.export.export(model, (torch.ones(2, 4),), strict=False)
    assert seen() == before
    assert model[0] in told
    with pytest.raises(ValueError, match="stop"), apart():
        raise ValueError("stop")
    assert seen() == before


def is_free():
    with Turn().taken(), TRACING.taken() as mine:  # one that has another does not wait
        return mine


def test_one_thread_traces_at_a_time():
    with apart():
        assert elsewhere(is_free) is False
    assert elsewhere(is_free) is True


def test_a_flag_of_this_thread_adds_up_like_any_other():
    flag = _Here(True, False)
    assert [flag | False, False | flag, flag & True, flag ^ True, flag == True] == [True, True, True, False, True]  # noqa: E712
    assert (repr(flag), hash(flag)) == ("True", hash(True))
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append((bool(flag), flag | False, repr(flag))))
    thread.start()
    thread.join()
    assert elsewhere == [(False, False, "False")]


class Waits(nn.Module):
    """Forks, in another thread, while it is traced."""

    def forward(self, x):
        if torch.compiler.is_exporting():
            Waits.found.put(elsewhere(lambda: in_a_fork(Waits.check)))
        return x + 1


@FORKS
def test_a_fork_while_another_thread_traces_calls_what_it_would_call_without_it():
    before = seen()

    def is_as_before():
        assert (builtins.max, builtins.min, math.pow, nn.Module.__call__, nn.Module.__getattr__) == functions
        assert seen() == before
        return capture(nn.Linear(4, 4).eval(), torch.ones(2, 4)).signature is not None and seen() == before

    functions = (builtins.max, builtins.min, math.pow, nn.Module.__call__, nn.Module.__getattr__)
    Waits.found, Waits.check = queue.SimpleQueue(), is_as_before
    capture(Waits().eval(), torch.ones(2, 4))
    assert Waits.found.get_nowait()
    assert seen() == before
