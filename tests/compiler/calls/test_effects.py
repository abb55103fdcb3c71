"""What a call does to the objects that it is given: found, compared, done again by whatever runs the program."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.snapshot import told
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.capture.capture import capture
from tsopt.errors import AccuracyError, BundleError, CaptureError, GraphBreakError

X = torch.linspace(-2, 2, 6).reshape(2, 3)


class State:
    """Plain attributes, none at first."""


@dataclass
class Cell:
    h: torch.Tensor
    steps: int = 0


class Items(OrderedDict):
    """A dict with attributes."""


class Connection(State):
    """Says itself how it is pickled: it may be more than its attributes."""

    def __init__(self) -> None:
        self.calls, self.deep = 0, {"items": []}

    def __reduce__(self):
        return Connection, ()


class Several(list):
    pass


class Slots:
    __slots__ = ("v",)


def linear_net(function):
    torch.manual_seed(0)
    return Net(function, linear=nn.Linear(3, 3))


def appends(self, x, seen):
    seen.append(self.linear(x))
    return x.relu()


def replaces(self, x, cache):
    cache["h"] = cache["h"] + self.linear(x)
    cache["new"] = x * 2
    cache.pop("old", None)
    return cache["new"]


def sets_attributes(self, x, state):
    state.h = self.linear(x) + getattr(state, "h", 0)
    state.calls = getattr(state, "calls", 0) + 1
    return x.relu()


def deletes_one(self, x, state):
    del state.old
    return self.linear(x)


def returns_what_it_changes(self, x, cell):
    cell.h, cell.steps = cell.h + self.linear(x), cell.steps + 1
    return cell


def returns_nothing(self, x, seen):
    seen.append(self.linear(x))


def swaps(self, x, pair):
    pair[0], pair[1] = pair[1], pair[0]
    return x + pair[0]


def shares_what_is_new(self, x, cache):
    cache["inner"] = Cell(self.linear(x))
    return cache["inner"]


def grows_deep(self, x, state):
    state.layers[1]["keys"] = torch.cat([state.layers[1]["keys"], x])
    state.layers.append({"keys": self.linear(x)})
    return state.layers[1]["keys"].sum(0)


def keeps_the_input(self, x, seen):
    seen.append(x)
    return self.linear(x)


def changes_items(self, x, items):
    items["a"] = items["a"] + 1
    items.count = 2
    return self.linear(x)


CASES = {
    "append": (appends, lambda: [X + 1]),
    "append to an empty one": (appends, list),
    "replace": (replaces, lambda: {"old": X, "h": X + 1}),
    "no attribute yet": (sets_attributes, State),
    "attributes": (sets_attributes, lambda: SimpleNamespace(h=X, calls=3)),
    "delete": (deletes_one, lambda: SimpleNamespace(old=X, kept=2)),
    "returned as well": (returns_what_it_changes, lambda: Cell(X)),
    "nothing returned": (returns_nothing, list),
    "swap": (swaps, lambda: [X, X + 1]),
    "new and shared": (shares_what_is_new, dict),
    "deep": (grows_deep, lambda: SimpleNamespace(layers=[{"keys": X}, {"keys": X + 1}])),
    "the input itself": (keeps_the_input, list),
    "a dict with attributes": (changes_items, lambda: Items(a=X)),
}


def plain(value):
    """What it holds, as nested lists that can be compared."""
    if isinstance(value, (Connection, Several, Slots, nn.Module, deque, set, bytearray)):
        return told(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    held = list(value.items()) if isinstance(value, dict) else []
    held += list(vars(value).items()) if hasattr(value, "__dict__") else []
    return [type(value).__name__, [[key, plain(item)] for key, item in held]] if held else value


@pytest.fixture(params=CASES)
def case(request):
    function, make = CASES[request.param]
    return linear_net(function), make


@pytest.mark.sliced(8)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "torchscript"])
def test_objects_are_changed_as_by_the_model(case, backend):
    model, make = case
    run = tsopt.compile(capture(model, (X, make())), backend)
    mine, theirs = make(), make()
    with torch.no_grad():
        found, wanted = run(X, mine), model(X, theirs)
    pairs = zip(*(flatten(value)[0] for value in ((found, mine), (wanted, theirs))), strict=True)
    for value, reference in pairs:
        torch.testing.assert_close(value, reference)
    assert flatten((found, mine))[1] == flatten((wanted, theirs))[1]
    assert (found is mine) == (wanted is theirs)


def test_the_example_is_left_as_it_was(case):
    model, make = case
    given = make()
    before = plain(given)
    program = capture(model, (X, given))
    tsopt.verify(model, tsopt.compile(program, "eager"), (X, given), program=program)
    assert plain(given) == before


def test_what_is_not_changed_keeps_its_objects():
    given = CASES["deep"][1]()
    layers, first, keys = given.layers, given.layers[0], given.layers[0]["keys"]
    tsopt.compile(capture(linear_net(grows_deep), (X, CASES["deep"][1]())), "eager")(X, given)
    assert given.layers is layers
    assert given.layers[0] is first
    assert first["keys"] is keys
    assert len(layers) == 3


def test_what_is_new_and_returned_is_one_object():
    given: dict[str, Cell] = {}
    found = tsopt.compile(capture(linear_net(shares_what_is_new), (X, {})), "eager")(X, given)
    assert given["inner"] is found


def test_the_program_says_what_it_changes():
    program = capture(linear_net(grows_deep), tsopt.example(X, state=CASES["deep"][1]()))
    assert [str(effect) for effect in program.signature.effects] == ["state.layers", "state.layers.1"]
    new = [item.name for item in program.signature.outputs][1:]
    assert sorted(new) == ["state.layers.1.keys.new", "state.layers.2.keys.new"]
    assert str(capture(linear_net(appends), (X, [X])).signature.effects[0]) == "args.1"


def test_signatures_with_effects_are_written_and_read(case):
    model, make = case
    signature = capture(model, (X, make())).signature
    again = signature_json.from_json(signature_json.to_json(signature))
    assert again.effects == signature.effects


@pytest.mark.parametrize(
    "change",
    [
        {"path": [["item", 0], ["item", 0]]},
        {"path": [["item", 0]]},
        {"path": []},
        {"path": [["item", 0], ["item", 7]]},
        {"path": [["item", 0], ["attr", "__class__"]]},
        {"kind": "list"},
        {"kind": "tuple"},
        {"keys": [["attr", "__class__"], ["attr", "steps"]]},
        {"keys": [["attr", "h"]]},
        {"keys": 3},
        {"parts": {"kind": "leaf", "index": 0}},
        {"parts": {"kind": "tuple", "children": [{"kind": "leaf", "index": 9}, {"kind": "const", "value": 1}]}},
        {"parts": {"kind": "tuple", "children": [{"kind": "shared", "index": 5}, {"kind": "const", "value": 1}]}},
        {
            "parts": {
                "kind": "tuple",
                "children": [{"kind": "given", "keys": [["attr", "__dict__"]]}, {"kind": "const", "value": 1}],
            }
        },
    ],
)
def test_damaged_effects_are_refused(change):
    data = signature_json.to_json(capture(linear_net(returns_what_it_changes), (X, Cell(X))).signature)
    signature_json.from_json(data)
    data["effects"][0] |= change
    with pytest.raises(BundleError, match="damaged"):
        signature_json.from_json(data)


def test_a_bundle_changes_objects_of_classes_that_it_cannot_import(tmp_path):
    model = linear_net(sets_attributes)
    fast = tsopt.optimize(model, (X, State()), backends=("eager",), seconds=0.1, isolate=False, cache=False)
    loaded, state = tsopt.load(fast.save(tmp_path / "net.tsopt")), State()
    loaded(X, state)
    assert state.calls == 1
    torch.testing.assert_close(state.h, model.linear(X).detach())


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Connection, lambda item, x: setattr(item, "calls", 1)),
        (Connection, lambda item, x: item.deep["items"].append(x)),
        (Several, lambda item, x: item.append(x)),
        (Slots, lambda item, x: setattr(item, "v", x)),
        (lambda: nn.Linear(2, 2), lambda item, x: setattr(item, "last", x)),
        (deque, lambda item, x: item.append(x)),
        (set, lambda item, x: item.add(3)),
        (lambda: (deque(), 1), lambda item, x: item[0].append(x)),
        (lambda: defaultdict(int), lambda item, x: item.update(a=1)),
        (bytearray, lambda item, x: item.append(7)),
    ],
    ids=[
        "attribute",
        "deep",
        "list of its own",
        "slots",
        "module",
        "deque",
        "set",
        "inside of a tuple",
        "defaultdict",
        "bytearray",
    ],
)
def test_an_object_that_cannot_be_copied_must_not_be_changed(make, change):
    def model(self, x, item):
        change(item, x)
        return self.linear(x)

    given = make()
    before = plain(given)
    with pytest.raises(
        CaptureError, match=r"(?s)modifies a \w+ in its arguments.*input args\.1.*fix: keep mutable state"
    ):
        capture(linear_net(model), (X, given))
    assert plain(given) == before


def test_an_object_that_cannot_be_copied_may_be_read():
    given = Connection()
    run = tsopt.compile(
        capture(linear_net(lambda self, x, item: self.linear(x) * (item.calls + 2)), (X, given)), "eager"
    )
    assert run(X, given).shape == X.shape


def test_it_is_put_back_when_the_call_fails():
    given = Connection()

    def fails(item):
        item.calls = 5
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        outcome_of(fails, (given,), {})
    assert given.calls == 0


def test_numbers_that_hang_on_values_are_not_kept():
    def model(self, x, state):
        state.total = x.sum().item()
        return self.linear(x)

    with pytest.raises(GraphBreakError, match=r"(?s)stores a Python number that depends on the input.*input args\.1"):
        capture(linear_net(model), (X, State()))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, seen: x.relu(),
        lambda x, seen: (seen.append(x * 0), x.relu())[1],
        lambda x, seen: (seen.extend([x, x]), x.relu())[1],
        lambda x, seen: (seen.insert(0, x), x.relu())[1],
    ],
    ids=["not at all", "another value", "too many", "at another place"],
)
def test_a_candidate_that_changes_objects_otherwise_is_wrong(wrong):
    model = linear_net(appends)
    with pytest.raises(AccuracyError):
        tsopt.verify(model, wrong, (X, [X + 1]))


def test_a_candidate_that_returns_a_copy_of_what_it_was_given_is_wrong():
    def wrong(x, cell):
        model(x, cell)
        return replace(cell)

    model = linear_net(returns_what_it_changes)
    with torch.no_grad(), pytest.raises(AccuracyError, match="output structure"):
        tsopt.verify(model, wrong, (X, Cell(X)))


class Decoder(nn.Module):
    """Attention over a cache that grows by a step in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, cache):
        cache["k"] = torch.cat([cache["k"], self.k(x)], 1)
        cache["v"] = torch.cat([cache["v"], self.v(x)], 1)
        return nn.functional.scaled_dot_product_attention(self.q(x), cache["k"], cache["v"])


def a_step(length):
    return torch.randn(1, 1, 8), {"k": torch.randn(1, length, 8), "v": torch.randn(1, length, 8)}


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_one_program_serves_a_cache_that_grows(backend):
    torch.manual_seed(0)
    model = Decoder().eval()
    options = {"seconds": 0.1, "isolate": False, "cache": False, "on_new_signature": "error"}
    fast = tsopt.optimize(model, [a_step(4), a_step(9)], backends=(backend,), **options)
    assert fast.report.rows[-1].status == "ok", fast.report
    run = fast.verified(backend)
    mine, theirs = (a_step(3)[1] for _ in range(2))
    theirs.update(mine)
    for _ in range(5):
        x = torch.randn(1, 1, 8)
        with torch.no_grad():
            torch.testing.assert_close(run(x, mine), model(x, theirs))
    torch.testing.assert_close(mine["v"], theirs["v"])
    assert mine["v"].shape == (1, 8, 8)
