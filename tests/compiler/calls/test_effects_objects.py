"""Objects of a call by kind and by identity: which are one, which are new in each call, which are refused."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.calls.test_effects import Connection, Items, State, X, appends, linear_net
from tsopt.compiler.calls import signature_json
from tsopt.compiler.capture.capture import capture
from tsopt.errors import BundleError, GraphBreakError

# ---- one object in two places ----------------------------------------------------------------------------------------


def reads_what_it_writes(self, x, read, write):
    write.append(x + 1)
    return self.linear(x) * (len(read) + 2)


def test_one_object_in_two_places_of_a_call_is_one():
    model = linear_net(reads_what_it_writes)
    apart, together = [], []
    program = tsopt.capture(model, (X, apart, []))
    with pytest.raises(tsopt.SignatureError):
        tsopt.compile(program, "eager")(X, together, together)
    run = tsopt.compile(tsopt.capture(model, (X, together, together)), "eager")
    assert together == []
    with torch.no_grad():
        torch.testing.assert_close(run(X, together, together), model.linear(X) * 3)
    assert len(together) == 1


def test_a_call_with_other_aliasing_is_another_form():
    model = linear_net(reads_what_it_writes)
    fast = tsopt.optimize(model, (X, [], []), backends=("eager",), seconds=0.1)
    both: list[torch.Tensor] = []
    with torch.no_grad():
        torch.testing.assert_close(fast(X, both, both), model.linear(X) * 3)


def keeps_one_list_twice(self, x, cache):
    if not cache:
        cache["a"] = cache["b"] = [x + 1]
        return self.linear(x)
    cache["a"].append(x + 2)
    return self.linear(x) * len(cache["b"])


def test_a_new_list_in_two_places_is_one():
    given: dict[str, list[torch.Tensor]] = {}
    tsopt.compile(capture(linear_net(keeps_one_list_twice), (X, {})), "eager")(X, given)
    assert given["a"] is given["b"]


def boxes(self, x, state):
    state.inner = SimpleNamespace(inner=state.inner)
    return self.linear(x)


def test_what_is_put_into_a_new_object_stays_what_it_was():
    run = tsopt.compile(capture(linear_net(boxes), (X, SimpleNamespace(inner=[X]))), "eager")
    kept = [X + 1]
    for given in (SimpleNamespace(inner=kept), SimpleNamespace(inner=kept)):
        run(X, given)
        assert given.inner.inner is kept


@pytest.mark.parametrize(
    "make", [set, lambda: deque([1]), bytearray, Connection], ids=["set", "deque", "bytes", "object"]
)
def test_what_is_made_in_the_call_must_not_be_one_for_all_calls(make):
    def model(self, x, cache):
        cache["new"] = make()
        return self.linear(x)

    with pytest.raises(GraphBreakError, match=r"creates a \w+ during the call"):
        capture(linear_net(model), (X, {}))


def test_plain_objects_without_tensors_are_new_in_each_call():
    def model(self, x, cache):
        cache["new"] = State()
        return self.linear(x), cache["new"]

    run = tsopt.compile(capture(linear_net(model), (X, {})), "eager")
    first, second = {}, {}
    assert run(X, first)[1] is first["new"]
    run(X, second)
    assert first["new"] is not second["new"]


def test_what_the_model_holds_comes_back_as_it_is():
    model = linear_net(lambda self, x: (self.linear(x), self.settings))
    model.settings = SimpleNamespace(width=3)
    assert tsopt.compile(capture(model, X), "eager")(X)[1] is model.settings


def test_an_object_that_the_model_holds_must_not_be_given():
    model = linear_net(lambda self, x, memory: self.linear(x) + len(self.memory))
    model.memory = []
    with pytest.raises(GraphBreakError, match="the list passed to the model is also stored on the model"):
        capture(model, (X, model.memory))
    memory = []
    with pytest.raises(GraphBreakError, match="the list passed to the model is also stored on the model"):
        capture(lambda x, given: x * len(memory), (X, memory))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {1}, lambda item: item.add(2)),
        (lambda: deque([1]), lambda item: item.append(2)),
        (Connection, lambda item: item.deep["items"].append(1)),
        (lambda: nn.Linear(2, 2), lambda item: nn.init.zeros_(item.weight)),
    ],
    ids=["set", "deque", "deep", "module"],
)
def test_a_constant_that_has_changed_is_another_call(make, change):
    given = make()
    run = tsopt.compile(capture(linear_net(lambda self, x, item: self.linear(x)), (X, given)), "eager")
    run(X, given)
    change(given)
    with pytest.raises(tsopt.SignatureError):
        run(X, given)


# ---- kinds of objects ------------------------------------------------------------------------------------------------


class Hidden:
    """A property over an attribute of the same name."""

    def __init__(self):
        self.__dict__["v"] = X

    @property
    def v(self):
        return self.__dict__["v"] * 100


def test_properties_are_passed_by():
    def model(self, x, item):
        item.__dict__["v"] = item.v + self.linear(x)
        return x + 1

    net = linear_net(model)
    mine, theirs = Hidden(), Hidden()
    tsopt.compile(capture(net, (X, Hidden())), "eager")(X, mine)
    net(X, theirs)
    torch.testing.assert_close(vars(mine)["v"], vars(theirs)["v"])


@pytest.mark.parametrize("cls", [Items, type("Plain", (dict,), {}), OrderedDict, dict])
def test_the_order_of_items_is_that_of_the_model(cls):
    def model(self, x, items):
        items["a"] = items.pop("a") + 1
        del items["b"]
        return self.linear(x)

    given = cls(a=X, b=X, c=X)
    tsopt.compile(capture(linear_net(model), (X, cls(a=X, b=X, c=X))), "eager")(X, given)
    assert list(given) == ["c", "a"]


def test_keys_of_any_kind_are_stored(tmp_path):
    def model(self, x, items):
        items[0, 1].append(self.linear(x))
        items[2] = {"mode": b"xy", "none": None}
        return x + 1

    fast = tsopt.optimize(linear_net(model), (X, {(0, 1): []}), backends=("eager",), seconds=0.1)
    given = {(0, 1): []}
    tsopt.load(fast.save(tmp_path / "net.tsopt"))(X, given)
    assert len(given[0, 1]) == 1
    assert given[2] == {"mode": b"xy", "none": None}


def test_a_class_that_is_put_into_an_object_is_not_stored(tmp_path):
    def model(self, x, items):
        items.append(int)
        return self.linear(x)

    fast = tsopt.optimize(linear_net(model), (X, []), backends=("eager",), seconds=0.1)
    with pytest.raises(BundleError, match="returns the class builtins:int, which a bundle cannot store"):
        fast.save(tmp_path / "net.tsopt")


class Mode(enum.Enum):
    FAST = 1


@pytest.mark.parametrize("value", [Mode.FAST, range(3), 1j], ids=["enum", "range", "complex"])
def test_what_no_file_can_hold_is_refused_when_it_is_saved(tmp_path, value):
    def model(self, x, items):
        items["kept"] = value
        return self.linear(x)

    fast = tsopt.optimize(linear_net(model), (X, {}), backends=("eager",), seconds=0.1)
    given = {}
    fast(X, given)
    assert given["kept"] is value
    with pytest.raises(BundleError, match="which cannot be saved to a file"):
        fast.save(tmp_path / "net.tsopt")
    assert list(tmp_path.iterdir()) == []


def test_an_example_that_was_used_can_be_saved(tmp_path):
    given: list[torch.Tensor] = []
    fast = tsopt.optimize(linear_net(appends), (X, given), backends=("eager",), seconds=0.1)
    fast(X, given)
    run, again = tsopt.load(fast.save(tmp_path / "net.tsopt")), []
    run(X, again)
    assert len(again) == 1


@pytest.mark.parametrize("where", ["result", "outer"])
def test_a_path_that_leads_out_of_the_call_is_refused(where):
    data = signature_json.to_json(capture(linear_net(appends), (X, [])).signature)
    steps = [["item", 0], ["item", 1], ["attr", "__class__"]]
    data[where] = {"kind": "given", "keys": steps}
    with pytest.raises(BundleError):
        signature_json.from_json(data)


@pytest.mark.parametrize("data", [[], None, 3])
def test_what_is_no_signature_is_refused(data):
    with pytest.raises(BundleError):
        signature_json.from_json(data)


def test_an_object_is_changed_once():
    data = signature_json.to_json(capture(linear_net(appends), (X, [])).signature)
    data["effects"] *= 2
    with pytest.raises(BundleError):
        signature_json.from_json(data)
