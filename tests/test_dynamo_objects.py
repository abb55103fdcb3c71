"""Objects of one class behind torch.compile: each has its own weights and state."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import tsopt
from tests.by_dynamo import OPTIONS, compiled
from tsopt.runtime.calling.graph_parts import Graph
from tsopt.runtime.calling.partitioned import PART

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Leaky(nn.Module):
    """Writes its state in each call; a buffer, or a plain attribute."""

    def __init__(self, is_buffer=True):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        if is_buffer:
            self.register_buffer("h", torch.zeros(1, 4))
        else:
            self.h = torch.zeros(1, 4)

    def forward(self, x):
        self.h.mul_(0.5).add_(self.fc(x))
        return torch.tanh(self.h * 2)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("is_buffer", [True, False])
def test_state_that_is_replaced_is_that_which_calls_read_and_write(made, is_buffer):
    model, twin, x = Leaky(is_buffer).eval(), Leaky(is_buffer).eval(), torch.ones(1, 4)
    fast, forms = compiled(model), set()
    with torch.no_grad():
        for _ in range(6):
            for _ in range(2):
                torch.testing.assert_close(fast(x), twin(x))
                torch.testing.assert_close(model.h, twin.h)
            forms.add(made[0].fast)
            model.h, twin.h = torch.zeros_like(model.h), torch.zeros_like(twin.h)
    assert len(made) == len(forms) == 1
    assert None not in forms


class Cache(nn.Module):
    """Nothing but state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 5, 4))

    def forward(self, keys, i: int):
        self.keys[:, i : i + 1].copy_(keys)
        return self.keys * 2


@pytest.mark.usefixtures("always_faster")
def test_each_object_of_a_class_has_its_own_state(made):
    caches, twins = [Cache().eval() for _ in range(3)], [Cache().eval() for _ in range(3)]
    fast = [compiled(cache) for cache in caches]
    with torch.no_grad():
        for _ in range(2):
            for number, (mine, cache, twin) in enumerate(zip(fast, caches, twins, strict=True)):
                keys = torch.full((2, 1, 4), number + 1.0)
                torch.testing.assert_close(mine(keys, 1), twin(keys, 1))
                torch.testing.assert_close(cache.keys, twin.keys)
    assert [len(graph.every_fast) for graph in made] == [1]


class Replaces(nn.Module):
    """Creates its state in each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(1, 4))

    def forward(self, x):
        self.h = torch.tanh(self.fc(x) + self.h)
        return self.h * 2


@pytest.mark.usefixtures("always_faster")
def test_state_that_is_made_anew_in_each_call_is_an_input(made):
    model, twin, x = Replaces().eval(), Replaces().eval(), torch.ones(1, 4)
    fast, forms = compiled(model), []
    with torch.no_grad():
        for _ in range(8):
            torch.testing.assert_close(fast(x), twin(x))
            forms.append(made[0].fast)
    assert len(set(forms[2:])) == 1
    assert forms[-1] is not None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.norm.running_mean.normal_()

    def forward(self, x):
        return x + self.b(torch.relu(self.norm(self.a(x))))


@pytest.mark.usefixtures("always_faster")
def test_each_object_of_a_class_is_optimized_with_its_own_weights(made, recwarn):
    blocks = [Block().eval() for _ in range(6)]
    fast, x, forms = [compiled(block) for block in blocks], torch.randn(3, 4), []
    with torch.no_grad():
        for _ in range(2):
            forms.append([])
            for mine, block in zip(fast, blocks, strict=True):
                torch.testing.assert_close(mine(x), block(x))
                forms[-1].append(made[0].fast)
        assert {len(form.program.signature.user_inputs) for form in made[0].every_fast} == {1}
        blocks[3].norm.running_var.mul_(3)
        for mine, block in zip(fast, blocks, strict=True):
            torch.testing.assert_close(mine(x), block(x))
    assert len(made) == 1
    assert forms[0] == forms[1]
    assert len({*forms[0]}) == len(blocks)
    assert not [item for item in recwarn if "tsopt" in str(item.message)]


def test_a_model_that_is_gone_is_not_kept_by_its_graph(made, always_faster):
    model, x = Block().eval(), torch.randn(3, 4)
    with torch.no_grad():
        compiled(model)(x)
    there = [weakref.ref(tensor) for tensor in (*model.parameters(), made[0].fast)]
    del model
    gc.collect()
    assert [item() for item in there] == [None] * len(there)


class Sided(nn.Module):
    """Branches by a value, in which a number of the object's is a constant."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x * self.k, lambda x: x - self.k, (x,))


@pytest.mark.usefixtures("always_faster")
def test_graphs_that_differ_in_a_branch_alone_are_not_taken_for_each_other():
    known = {}

    def backend(graph, _):
        graph.eval()  # the branches as well, or it runs as it is
        return Graph(graph, lambda part, inputs: tsopt.optimize(part, inputs, **PART | OPTIONS), known)

    model, x = Sided(2).eval(), torch.ones(3)
    with torch.no_grad():
        fast = torch.compile(model, backend=backend)
        for model.k in (2, 5, 2):
            for sign in (1, -1):
                torch.testing.assert_close(fast(x * sign), model(x * sign))
    assert len(known) == 2


@pytest.fixture
def swapping():
    """Conversions and loading swap the content of parameters with that of others, which no weak reference may watch."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping", "always_faster")
def test_parameters_can_be_swapped_with_others(made):
    model, x = Block().eval(), torch.randn(3, 4)
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
        there = weakref.ref(made[0].fast)
        model.load_state_dict({name: value + 1 for name, value in Block().state_dict().items()})
        torch.testing.assert_close(fast(x), model(x))
        gc.collect()
        assert there() is None
        model.double()
        torch.testing.assert_close(fast(x.double()), model(x.double()))
