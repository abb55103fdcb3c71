"""What a call does to the objects that it is given: found, compared, done again by whatever runs the program."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.capture import capture
from tsopt.compiler.contents import told
from tsopt.compiler.effects import outcome_of
from tsopt.compiler.signature import Signature
from tsopt.compiler.structure import flatten
from tsopt.errors import AccuracyError, ArtifactError, CaptureError, NotOneGraph

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
    again = Signature.from_json(signature.to_json())
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
    data = capture(linear_net(returns_what_it_changes), (X, Cell(X))).signature.to_json()
    Signature.from_json(data)
    data["effects"][0] |= change
    with pytest.raises(ArtifactError, match="damaged"):
        Signature.from_json(data)


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
        CaptureError, match=r"(?s)changes a \w+ that it is given.*input args\.1.*fix: keep what changes"
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

    with pytest.raises(NotOneGraph, match=r"(?s)keeps a Python number that depends on the input.*input args\.1"):
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
    with torch.no_grad(), pytest.raises(AccuracyError, match="output of the form"):
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

    with pytest.raises(NotOneGraph, match=r"makes a \w+ in the call"):
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
    with pytest.raises(NotOneGraph, match="the model holds the list that it is given"):
        capture(model, (X, model.memory))
    memory = []
    with pytest.raises(NotOneGraph, match="the model holds the list that it is given"):
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
        items[2] = {"mode": b"xy", "cls": int, "none": None}
        return x + 1

    fast = tsopt.optimize(linear_net(model), (X, {(0, 1): []}), backends=("eager",), seconds=0.1)
    given = {(0, 1): []}
    tsopt.load(fast.save(tmp_path / "net.tsopt"))(X, given)
    assert len(given[0, 1]) == 1
    assert given[2] == {"mode": b"xy", "cls": None, "none": None}, "a class is not imported"


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
    with pytest.raises(ArtifactError, match="which no file can hold"):
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
    data = capture(linear_net(appends), (X, [])).signature.to_json()
    steps = [["item", 0], ["item", 1], ["attr", "__class__"]]
    data[where] = {"kind": "given", "keys": steps}
    with pytest.raises(ArtifactError):
        Signature.from_json(data)


@pytest.mark.parametrize("data", [[], None, 3])
def test_what_is_no_signature_is_refused(data):
    with pytest.raises(ArtifactError):
        Signature.from_json(data)


def test_an_object_is_changed_once():
    data = capture(linear_net(appends), (X, [])).signature.to_json()
    data["effects"] *= 2
    with pytest.raises(ArtifactError):
        Signature.from_json(data)
