"""TorchScript as a program: what sizes and constants decide is followed, what values decide is refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.capture import scripted_builtins
from tsopt.compiler.capture.capture import capture
from tsopt.errors import GraphBreakError

X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and says so


class Rich(nn.Module):
    """Lists, dicts, loops, branches on sizes, options, an assert, a buffer, numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.last = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(3))
        self.factor = 2

    def forward(self, x, y: torch.Tensor | None = None, n: int = 2, name: str = "a"):
        found: list[torch.Tensor] = []
        for layer in self.layers:
            found.append(torch.relu(layer(x)))  # noqa: PERF401
        for i in range(n):
            x = x * self.factor + i
        if y is not None:
            x = x + y
        i = 0
        while i < x.size(0):
            i += 2
        if x.shape[0] > 2 and x.dim() == 2:
            x = x.view(x.size(0), -1) * (i / 2) + float(i // 3) + i % 3
        held = {"x": x}
        held["twice"] = x * 2
        assert x.shape[1] == 3, "three columns"
        h = self.drop(self.last(held["x"] + held["twice"]))
        first, second = torch.chunk(h, 2, 0)
        return {"cat": torch.cat(found, 1), "sum": h.sum(dtype=torch.float64), name: second + self.shift + first.sum()}


# ---- lists and dicts ----------------------------------------------------------------------------------------


def sorts(x: torch.Tensor):
    sizes = [1, 0]
    sizes.sort()
    back = [0, 1]
    back.sort(reverse=True)
    return x.permute(sizes) - x.permute(back)


def removes(x: torch.Tensor):
    dims = [0, 1, 0]
    dims.remove(0)
    return x.sum(dims[:1])


def adds_to_a_list(x: torch.Tensor):
    found = [x]
    same = found
    same += [x * 2]
    return found[-1]


def repeats_a_list(x: torch.Tensor):
    found = [x, x * 2]
    same = found
    same *= 2
    return torch.cat(found)


def deletes(x: torch.Tensor):
    found = {"a": x, "b": x * 2}
    del found["a"]
    rest = [x * 3, x * 4]
    del rest[0]
    return list(found.values())[0] + rest[0]  # noqa: RUF015


def takes_items(x: torch.Tensor):
    found = {"a": x, "b": x * 2}
    found.update({"c": x * 3})
    _, first = found.popitem()
    return first + found.setdefault("b", x) + found.setdefault("d", x * 5) + found["d"] * len(found)


def extends(x: torch.Tensor):
    found = [x]
    found.extend([x * 2, x * 3])
    return found[-1]


def sorts_tensors(x: torch.Tensor):
    return torch.sort(x)[0] + x.add_(0) * torch.mul(x, 2).mul_(1)


@pytest.mark.parametrize(
    "function", [sorts, removes, adds_to_a_list, repeats_a_list, deletes, takes_items, extends, sorts_tensors]
)
def test_what_changes_a_list_or_a_dict_changes_that_one(function):
    script = torch.jit.script(function)
    torch.testing.assert_close(tsopt.compile(capture(script, X), "eager")(X.clone()), script(X.clone()))


def test_what_would_change_a_copy_is_refused():
    @torch.jit.script
    def removes_a_tensor(x: torch.Tensor):
        found = [x, x * 2]
        found.remove(x)
        return found[0]

    with pytest.raises(GraphBreakError, match="aten::remove changes a list or a dict"):
        capture(removes_a_tensor, torch.ones(()))


def test_lists_of_the_caller_stay_as_they_are():
    @torch.jit.script
    def appends(xs: list[torch.Tensor], more: dict[str, torch.Tensor]):
        xs.append(xs[0] * 2)
        more["b"] = xs[1]
        return xs[-1] + more["b"]

    fast = tsopt.compile(capture(appends, ([X], {"a": X})), "eager")
    xs, more = [X], {"a": X}
    torch.testing.assert_close(fast(xs, more), appends([X], {"a": X}))
    assert (len(xs), list(more)) == (1, ["a"])


# ---- what is compared with the script -------------------------------------------------------------------------


@pytest.mark.parametrize("frontend", ["auto", "torchscript"])
def test_what_is_read_wrongly_is_refused(monkeypatch, frontend):
    @torch.jit.script
    def halves(x: torch.Tensor):
        return x * (len(x) // 2)

    assert capture(halves, X, frontend=frontend).node_count == 1
    monkeypatch.setitem(scripted_builtins.PYTHON, "floordiv", lambda a, b: a)
    with pytest.raises(GraphBreakError, match="TorchScript does not reproduce the model"):
        capture(halves, X, frontend=frontend)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.drop(x) * self.count


def test_a_script_that_writes_a_buffer_is_compared_on_a_copy():
    script = torch.jit.script(Stateful().eval())
    fast = tsopt.compile(capture(script, X), "eager")
    assert float(script.count) == 0
    assert torch.equal(fast(X), X)
    assert torch.equal(script(X), X * 2)


def test_a_script_in_training_mode_is_compared_in_eval_mode():
    script = torch.jit.script(Stateful())
    program = capture(script, X, eval_mode=True)
    assert script.training
    assert torch.equal(tsopt.compile(program, "eager")(X), X)


def doubled(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_hooks_of_the_module_are_not_lost():
    model = nn.Linear(3, 3).eval()
    model.register_forward_hook(doubled)
    script = torch.jit.script(model)
    with pytest.raises(GraphBreakError, match="the TorchScript module has forward hooks"):
        capture(script, X)
    fast = tsopt.optimize(script, X, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    assert torch.equal(fast(X), script(X))
    # Those of its parts are in the graph.
    inside = torch.jit.script(nn.Sequential(model).eval())
    torch.testing.assert_close(tsopt.compile(capture(inside, X), "eager")(X), script(X))


Out = NamedTuple("Out", [("a", torch.Tensor), ("b", torch.Tensor)])  # noqa: UP014 - as TorchScript can read it


class Named(nn.Module):
    def forward(self, x) -> Out:
        return Out(x + 1, x * 2)


class NamedInside(nn.Module):
    def forward(self, x) -> dict[str, tuple[torch.Tensor, list[Out]]]:
        return {"x": (x, [Out(x + 1, x * 2)])}


@pytest.mark.parametrize("model", [Named(), NamedInside()], ids=["named", "inside"])
def test_a_named_tuple_is_refused_by_name(model):
    script = torch.jit.script(model.eval())
    with pytest.raises(GraphBreakError, match="the TorchScript code returns a NamedTuple, Out"):
        capture(script, X)
    fast = tsopt.optimize(script, X, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    assert "returns a NamedTuple, Out" in fast.report.frontend
    assert fast.report.rows[1].status == "ok"  # as TorchScript, whose calls return classes of one name
    if isinstance(model, Named):
        assert torch.equal(fast(X).b, X * 2)
