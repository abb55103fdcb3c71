"""What the code of a model reads, found without running it."""

from __future__ import annotations

import functools
import math
import sys
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.model_reads import reads_of

SCALE, UNUSED = 2.0, 1.0


def helper(x):
    return inner(x) * math.pi


def inner(x):
    return x * SCALE


class Net(nn.Module):
    kind = "net"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @property
    def way(self):
        return self.by_property

    @staticmethod
    def fixed(x):
        return x * STATIC

    def forward(self, x):
        return [helper(part) for part in self.fixed(self.layer(x)) if self.way and self.kind]

    def unread(self):
        return self.hidden


STATIC = 1.0


def places(model):
    return {name for _, name in reads_of(model).places}


def test_names_are_those_of_the_code_that_forward_reaches():
    found = reads_of(Net())
    assert {"by_property", "layer", "kind", "training"} <= found.names
    assert "hidden" not in found.names


def test_globals_are_followed_through_functions_comprehensions_and_python_modules():
    assert {"SCALE", "STATIC", "helper", "inner", "pi"} <= places(Net())
    assert "UNUSED" not in places(Net())


def test_attributes_of_users_classes_and_forward_of_torchs():
    classes = reads_of(Net()).classes
    assert {(Net, "kind"), (Net, "way"), (Net, "forward"), (nn.Linear, "forward")} <= set(classes)


def test_closures_partials_methods_and_containers_lead_to_modules():
    layers = [nn.Linear(2, 2) for _ in range(6)]

    def closure(x):
        return layers[0](x)

    held = types.SimpleNamespace(layer=layers[1])

    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [layers[0]], {"a": layers[1]}

        def forward(self, x):
            return self.hidden[0][0](x)

    assert layers[0] in reads_of(closure).modules
    assert layers[2] in reads_of(functools.partial(lambda layer, x: layer(x), layers[2])).modules
    assert layers[3] in reads_of(layers[3].forward).modules
    assert layers[1] in reads_of(lambda x: held.layer(x)).modules
    assert {*layers[:2]} <= {*reads_of(Hides()).modules}


def test_what_overrides_a_method_may_call_it_and_so_may_who_holds_the_module():
    class Sub(Net):
        def forward(self, x):
            return super().forward(x)

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Sub()

        def forward(self, x):
            return self.net.unread(x)

    found = reads_of(Holds())
    assert {(Sub, "forward"), (Net, "forward"), (Sub, "unread")} <= set(found.classes)
    assert "hidden" in found.names


class Made:
    def __init__(self):
        self.made = SCALE

    def __neg__(self):
        return inner(1.0)


def test_the_constructor_is_read_only_where_the_class_is_named():
    made = Made()
    assert "inner" in places(lambda x: x * -made)
    assert (Made, "__init__") not in reads_of(lambda x: x * -made).classes
    assert (Made, "__init__") in reads_of(lambda x: x * -Made()).classes


class Registering(type):
    def __call__(cls, *args):
        return super().__call__(*args)


class Registered(metaclass=Registering):
    def __post_init__(self):
        helper(self)


def test_what_makes_objects_is_not_read_where_one_is_held():
    held = Registered()
    found = reads_of(lambda x: x * held.scale)
    assert not {(Registered, "__post_init__"), (Registering, "__call__")} & set(found.classes)
    assert (Registered, "__post_init__") in reads_of(lambda x: Registered() * x).classes


def test_the_constructor_of_a_module_that_is_asked_for_is_not_read():
    found = reads_of(lambda x: x if isinstance(x, Net) else x + 1)
    assert (Net, "__init__") not in found.classes


def test_a_module_of_python_without_a_name_or_a_place_is_read(monkeypatch):
    class Odd(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError(f"asked {name}")

    odd = Odd("odd")
    del odd.__dict__["__name__"]
    odd.flag = 1.0
    monkeypatch.setitem(sys.modules, "odd_package", package := types.ModuleType("odd_package"))
    package.__path__ = None
    cls = type("Held", (), {"__module__": "odd_package", "flag": 2.0})
    held = cls()
    assert (vars(odd), "flag") in reads_of(lambda x: x * odd.flag * held.flag).places


def test_operators_of_installed_packages_are_not_read(monkeypatch):
    package = types.ModuleType("installed_package")
    package.__file__ = "/usr/lib/python3/site-packages/installed_package/__init__.py"
    monkeypatch.setitem(sys.modules, "installed_package", package)

    class Installed:
        __module__ = "installed_package"

        def __neg__(self):
            return 1.0

        def scaled(self, x):
            return helper(x)

    held = Installed()
    assert (Installed, "__neg__") not in reads_of(lambda x: x * -held).classes
    assert (Installed, "scaled") in reads_of(lambda x: held.scaled(x)).classes


def test_hooks_are_read_as_well():
    net, gain = Net(), torch.ones(2)

    def hook(module, args, output):
        return output * gain

    net.layer.register_forward_hook(hook)
    assert gain is next(cell.cell_contents for cell in reads_of(net).cells if cell.cell_contents is gain)


class Irrep(tuple):
    """A tuple that says nothing of its length, as e3nn has them."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError

    def __getitem__(self, place):
        raise NotImplementedError


class Equivariant(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = [Irrep((0, helper)), {Irrep((1, 2)): Irrep((torch.full((2,), 3.0),))}]

    def forward(self, x):
        _, told = self.kinds
        (scale,) = told.values()
        return tuple.__getitem__(scale, 0) * x


def test_containers_whose_class_refuses_to_be_read_are_read(always_faster):
    model, x = Equivariant().eval(), torch.ones(2)
    assert inner in reads_of(model).functions
    fast, net = tsopt.optimize(model, x, cache=False, isolate=False), tsopt.hybridize(model, cache=False, isolate=False)
    for _ in range(2):
        assert fast(x).tolist() == net(x).tolist() == [3.0, 3.0]


def refusing(kind, *more):
    """A class of containers that can be read only past it."""

    def refuses(self, *_):
        raise NotImplementedError

    return type("Refuses", (kind,), dict.fromkeys(("__len__", "__getitem__", *more), refuses))


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = (
            refusing(list, "__iter__")([2.0]),
            refusing(dict, "values")({"by": 3.0}),
            refusing(set, "__iter__")({5.0}),
        )

    def forward(self, x):
        numbers, table, kinds = self.held
        return x * list.__getitem__(numbers, 0) * dict.__getitem__(table, "by") * set.__len__(kinds)


@pytest.mark.parametrize("owner", [{1, 2}, deque([1, 2]), OrderedDict(a=1, b=2)])
def test_a_model_may_hold_a_proxy_of_a_container(always_faster, owner):
    class Proxied(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.box = weakref.proxy(owner), [weakref.proxy(owner)]

        def forward(self, x):
            return x * len(self.seen) + len(self.box[0])

    net = tsopt.hybridize(Proxied().eval(), cache=False, isolate=False, seconds=0.02, backends=("eager",))
    for _ in range(3):
        assert net(torch.ones(2)).tolist() == [4.0, 4.0]


def test_what_such_containers_hold_is_watched(always_faster):
    model, x = Refused().eval(), torch.ones(2)
    net = tsopt.hybridize(model, cache=False, isolate=False, seconds=0.02, backends=("eager",))
    for _ in range(2):
        assert net(x).tolist() == [6.0, 6.0]
    numbers, table, kinds = model.held
    list.append(numbers, 1.0)
    list.__setitem__(numbers, 0, 4.0)
    assert net(x).tolist() == [12.0, 12.0]
    dict.__setitem__(table, "by", 5.0)
    assert net(x).tolist() == [20.0, 20.0]
    set.add(kinds, 1.0)
    assert net(x).tolist() == [40.0, 40.0]


def test_cycles_and_large_objects_come_to_an_end():
    net = Net()
    net.loop = [net]
    net.loop.append(net.loop)
    net.words = dict.fromkeys(range(100_000))
    assert len(reads_of(net).modules) == 2


def test_an_object_that_answers_to_any_name_comes_to_an_end():
    class Mock:
        def __getattr__(self, name):
            return type(self)()

        def __call__(self):
            return self

    held = Mock()
    assert reads_of(lambda x: held.scale(x)).functions
