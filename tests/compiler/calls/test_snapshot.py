"""What objects hold, however deep: found, told, compared, put back."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from enum import Enum
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tsopt.compiler.calls.snapshot import Snapshot, elements_of, held_by, holders, is_python, iterator_in, told


class Slots:
    __slots__ = ("v",)


class Several(list):
    pass


class Mode(Enum):
    FAST = 1


def slots(value):
    made = Slots()
    made.v = value
    return made


DEEP = {
    "dict": (lambda: {"a": {"b": 1}}, lambda item: item["a"].update(b=2)),
    "list": (lambda: [[1]], lambda item: item[0].append(2)),
    "set": (lambda: ({1},), lambda item: item[0].add(2)),
    "deque": (lambda: deque([1]), lambda item: item.appendleft(2)),
    "bytes": (lambda: {"a": bytearray(b"a")}, lambda item: item["a"].extend(b"b")),
    "attribute": (lambda: SimpleNamespace(a=SimpleNamespace(b=1)), lambda item: setattr(item.a, "b", 2)),
    "new attribute": (lambda: SimpleNamespace(), lambda item: setattr(item, "b", 2)),
    "slot": (lambda: slots([1]), lambda item: item.v.append(2)),
    "unset slot": (Slots, lambda item: setattr(item, "v", 2)),
    "list of its own": (lambda: Several([1]), lambda item: item.append(2)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda item: item.move_to_end("a")),
    "module": (lambda: nn.Sequential(nn.Linear(2, 2)), lambda item: setattr(item[0], "extra", 2)),
    "removed": (lambda: {"a": 1}, lambda item: item.clear()),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_change_is_seen_told_and_taken_back(name):
    make, change = DEEP[name]
    item = make()
    kept, before = Snapshot(item), told(item)
    assert not kept.changed()
    assert told(item) == before
    change(item)
    assert kept.changed()
    assert told(item) != before
    kept.restore()
    assert not kept.changed()
    assert told(item) == before


@pytest.mark.parametrize(
    "value", [1, "a", None, Mode.FAST, int, len, torch.float32, torch.device("cpu"), (1, "a"), range(3)]
)
def test_what_cannot_change_holds_nothing(value):
    assert list(holders(value)) == []
    assert not Snapshot(value)


def test_equal_contents_are_told_alike():
    assert told({"a": [1, {2}]}) == told({"a": [1, {2}]})
    assert told([1]) != told([True])


def test_tensors_are_told_by_what_was_written_to_them():
    item = [torch.zeros(2)]
    before = told(item)
    item[0].add_(1)
    written = told(item)
    assert written != before
    item[0].data = torch.zeros(2)
    assert told(item) != written


def test_tensors_that_count_no_writes_are_told():
    with torch.inference_mode():
        item = [torch.zeros(2)]
    assert told(item) == told(item) != told([torch.zeros(2)])


def test_what_contains_itself_comes_to_an_end():
    item: list[object] = []
    item.append(item)
    assert len(list(holders(item))) == 1
    assert told(item) == told(item)


def test_what_a_model_holds():
    inner = [1]
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].memory = {"deep": inner}

    def recursive(x, given=inner):
        return recursive(x - 1) if x else net

    class Bound:
        def __init__(self):
            self.inner = inner

        def call(self, x):
            return x

    for model in (net, recursive, partial(lambda a: a, inner), Bound().call, lambda x: recursive(x)):
        assert id(inner) in held_by(model)
    assert id([1]) not in held_by(net)


class Answers(dict):
    """A dict whose items are its attributes, and which raises KeyError for others."""

    __getattr__ = dict.__getitem__


class Unset:
    __slots__ = ("v",)

    def __getattr__(self, name):
        raise KeyError(name)


def test_what_a_class_does_with_unknown_attributes_does_not_count():
    assert told(Answers(a=1)) == "Answers('a': 1)"
    assert told(Unset()) == "Unset()"
    assert not Snapshot(Answers(a=1)).changed()


@pytest.mark.parametrize(
    "value",
    [
        iter([1]),
        (i for i in "a"),
        [iter([1])],
        {"a": (zip(),)},
        {iter([1])},
        SimpleNamespace(v=iter([1])),
        slots(map(int, ())),
    ],
)
def test_iterators_are_found(value):
    assert hasattr(iterator_in(1, value), "__next__")


def test_what_can_be_read_again_is_no_iterator(tmp_path):
    logs = (tmp_path / "log").open("w")
    with logs:
        assert iterator_in([1], {"a": range(3)}, torch.ones(2), deque([1]), SimpleNamespace(log=logs)) is None
        assert iterator_in([logs]) is logs


@pytest.mark.parametrize("cls", [Slots, Answers, SimpleNamespace, OrderedDict, nn.Linear])
def test_classes_whose_instances_are_their_attributes(cls):
    assert is_python(cls)


@pytest.mark.parametrize("cls", [partial, deque, type(i for i in ""), type(iter([])), ValueError, Several])
def test_classes_whose_instances_are_more_than_their_attributes(cls):
    assert not is_python(cls)


class Closed:
    """Refuses to be read and written by the methods of its own class."""

    def refuse(self, *_):
        raise NotImplementedError

    __len__ = __iter__ = __getitem__ = clear = extend = update = append = refuse


class ClosedList(Closed, list):
    pass


class ClosedSet(Closed, set):
    pass


class ClosedDeque(Closed, deque):
    pass


@pytest.mark.parametrize(
    ("cls", "kind", "change"),
    [(ClosedList, list, list.append), (ClosedSet, set, set.add), (ClosedDeque, deque, deque.append)],
)
def test_containers_are_read_and_put_back_past_their_class(cls, kind, change):
    held = cls()
    change(held, 1)
    before = Snapshot([held])
    change(held, 2)
    assert before.changed()
    before.restore()
    assert list(kind.__iter__(held)) == [1]
    assert not before.changed()


def test_a_proxy_is_read_as_it_wants_to_be():
    owner = deque([1, 2])
    assert elements_of(weakref.proxy(owner)) == [1, 2]
