"""Calibration data in other containers than the example's."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.calls.calibration import read_calibration
from tsopt.compiler.calls.example import as_example
from tsopt.errors import UsageError


class Pair(NamedTuple):
    image: Any
    bias: Any


@dataclasses.dataclass
class Record:
    image: Any
    bias: Any
    scale: Any = None


BOTH = {"image": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2, 3)}
BY_KEY = Net(lambda self, b: b["image"] - b["bias"])
BY_NAME = Net(lambda self, b: b.image - b.bias)


class Flat(nn.Module):
    def forward(self, image, bias):
        return image - bias


EXAMPLES = {
    "dict": (BY_KEY, (BOTH,)),
    "keyword": (BY_KEY, {"b": BOTH}),
    "userdict": (BY_KEY, (UserDict(BOTH),)),
    "namedtuple": (BY_NAME, (Pair(**BOTH),)),
    "dataclass": (BY_NAME, (Record(**BOTH),)),
    "arguments": (Flat(), tuple(BOTH.values())),
    "keywords": (Flat(), BOTH),
}
ITEMS = {
    "dict": BOTH,
    "another order": dict(reversed(BOTH.items())),
    "more": BOTH | {"label": 3},
    "userdict": UserDict(BOTH),
    "namedtuple": Pair(**BOTH),
    "dataclass": Record(**BOTH),
    "numpy": {key: value.numpy() for key, value in BOTH.items()},
    "numpy in a userdict": UserDict({key: value.numpy() for key, value in BOTH.items()}),
    "numpy in a dataclass": Record(*(value.numpy() for value in BOTH.values())),
}


@pytest.fixture(scope="module")
def captured():
    return {name: tsopt.capture(model.eval(), example) for name, (model, example) in EXAMPLES.items()}


@pytest.mark.parametrize("wrapped", [lambda item: item, lambda item: (item, 7), lambda item: (item,)])
@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_any_container_holds_the_arguments_of_any_example(captured, example, item, wrapped):
    model, given = EXAMPLES[example]
    found = read_calibration([wrapped(item)] * 2, captured[example].signature, as_example(given))
    for call in found.calls:
        captured[example].signature.bind(call.args, call.kwargs)
        assert torch.equal(model(*call.args, **call.kwargs), BOTH["image"] - BOTH["bias"])
    assert ("label ignored" in found.read) == ("label" in item if isinstance(item, dict) else False)
    assert ("targets ignored" in found.read) == (isinstance(wrapped(0), tuple) and len(wrapped(0)) == 2)


@pytest.mark.parametrize("example", EXAMPLES)
def test_rows_in_containers_are_batched_and_batches_cut(captured, example):
    model, given = EXAMPLES[example]

    def read(items):
        found = read_calibration(items, captured[example].signature, as_example(given))
        return torch.cat([model(*call.args, **call.kwargs) for call in found.calls])

    wanted = BOTH["image"] - BOTH["bias"]
    assert torch.equal(read([{key: value[i] for key, value in BOTH.items()} for i in range(2)]), wanted)
    twice = {key: torch.cat([value, value]) for key, value in BOTH.items()}
    assert torch.equal(read([(twice, 7)]), torch.cat([wanted, wanted]))


def test_containers_within_containers():
    model = Net(lambda self, many, scale: many[0]["image"] * scale - many[1]["image"])
    given = ([BOTH, dict(BOTH)], torch.ones(1))
    program = tsopt.capture(model, given)
    other = {"bias": BOTH["bias"], "image": 2 * BOTH["image"], "id": "a"}
    for many in ((BOTH, other), [UserDict(BOTH), UserDict(other)], (Pair(**BOTH), other)):
        for item in ((many, torch.ones(1)), ((many, torch.ones(1)), 7)):
            (call,) = read_calibration([item], program.signature, as_example(given)).calls
            assert torch.equal(model(*call.args, **call.kwargs), -BOTH["image"])


def test_one_container_in_two_places():
    model = Net(lambda self, a, b: a["image"] + b["image"])
    program, given = tsopt.capture(model, (BOTH, BOTH)), as_example((BOTH, BOTH))
    other = {key: value + 1 for key, value in BOTH.items()}
    for one in (BOTH, Pair(**BOTH), UserDict(BOTH)):
        (call,) = read_calibration([(one, one)], program.signature, given).calls
        assert torch.equal(model(*call.args), 2 * BOTH["image"])
        with pytest.raises(UsageError, match="does not fit the model"):
            read_calibration([(one, other)], program.signature, given)


@pytest.mark.parametrize(
    "item",
    [
        {"image": BOTH["image"]},
        {"image": BOTH["image"], "bias": "none"},
        SimpleNamespace(**BOTH),
        [BOTH, BOTH, BOTH],
        Record(BOTH["image"], None),
    ],
    ids=["too few", "text", "namespace", "three", "none"],
)
def test_what_lacks_a_tensor_of_the_example_is_refused(captured, item):
    for example in ("dict", "dataclass", "keywords"):
        with pytest.raises(UsageError, match="calibration input 0 does not fit the model"):
            read_calibration([item], captured[example].signature, as_example(EXAMPLES[example][1]))


def test_another_constant_than_the_examples_is_refused():
    model = Net(lambda self, b: b["image"] * (2 if b["twice"] else 1))
    program = tsopt.capture(model, ({**BOTH, "twice": True},))
    for twice, fits in ((True, True), (False, False), (None, False)):
        data = [{"twice": twice, **BOTH}]
        example = as_example(({**BOTH, "twice": True},))
        if fits:
            assert read_calibration(data, program.signature, example).calls
        else:
            with pytest.raises(UsageError, match="does not fit the model"):
                read_calibration(data, program.signature, example)


class Adding(nn.Module):
    """It counts whether its arguments are one tensor: it writes to one of them."""

    def forward(self, image, bias):
        return image.add_(1) - bias


@pytest.mark.parametrize(("model", "apart"), [(Flat(), True), (Adding(), False)])
def test_one_tensor_in_two_places_is_one_where_that_counts(model, apart):
    x = torch.ones(2, 3)
    program = tsopt.capture(model, (x, x))
    (call,) = read_calibration([(x.clone(),) * 2], program.signature, as_example((x, x))).calls
    assert (call.args[0] is not call.args[1]) is apart
