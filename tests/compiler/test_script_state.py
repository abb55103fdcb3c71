"""What TorchScript keeps from call to call is found, refused, and put back."""

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.protect import is_untouched, protected
from tsopt.compiler.script_state import attributes_written
from tsopt.errors import CaptureError, GraphBreakError

X = torch.ones(2, 3)
FAST = {"backends": ("eager", "torchscript"), "seconds": 0.02, "isolate": False, "cache": False}
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and says so


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


class Keeps(nn.Module):
    seen: list[torch.Tensor]

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return x * len(self.seen)


class KeepsDeepInside(nn.Module):
    cache: dict[str, list[torch.Tensor]]

    def __init__(self):
        super().__init__()
        self.cache = {"a": []}

    def forward(self, x):
        found = [self.cache["a"]]
        if x.shape[0] > 1:
            for _ in range(2):
                found[0].append(x)
        return x * len(self.cache["a"])


class Replaces(nn.Module):
    last: torch.Tensor | None

    def __init__(self):
        super().__init__()
        self.last = None
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        last = self.last
        self.last = x
        self.mean = self.mean * 0.5 + x.mean(0) * 0.5
        return x + self.mean if last is None else x - last


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class Reads(nn.Module):
    """Changes only what the call has made, or a copy."""

    sizes: list[int]

    def __init__(self):
        super().__init__()
        self.sizes = [2, 3]
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        sizes = list(self.sizes)
        sizes.append(1)
        found = [x]
        while len(found) < self.sizes[0]:
            found = found + [x]  # noqa: RUF005 - which TorchScript cannot read
            found.append(x)
        self.total.add_(1)
        more = self.sizes + [1]  # noqa: RUF005
        more.pop()
        return torch.cat(found).sum() * len(sizes) * len(more) + self.total


WRITES = [
    (Counts, ["count"]),
    (Keeps, ["seen"]),
    (KeepsDeepInside, ["cache"]),
    (Replaces, ["last", "mean"]),
    (lambda: Around(Counts()), ["inner.count"]),
]
NAMES = ["number", "list", "deep inside", "tensors", "of a part"]


@pytest.mark.parametrize(("make", "names"), WRITES, ids=NAMES)
def test_a_script_that_changes_its_attributes_runs_as_it_is(make, names):
    script, twin = torch.jit.script(make().eval()), torch.jit.script(make().eval())
    assert list(map(str, attributes_written(script))) == names
    with pytest.raises(GraphBreakError, match=f"changes the attribute {names[0]} in the call") as caught:
        tsopt.capture(script, X)
    assert names[0] == "last" or "test_script_state.py:" in caught.value.where
    with pytest.raises(CaptureError, match="own optimizations cannot be applied"):
        tsopt.optimize(script, X, **FAST, frontend="parts")
    fast = tsopt.optimize(script, X, **FAST)
    assert f"changes the attribute {names[0]}" in fast.report.why
    for number in (1.0, 2.0):  # each call goes on from the one before, of whichever
        assert torch.equal(fast(X * number), twin(X * number))
    assert torch.equal(script(X), twin(X))


@pytest.mark.parametrize(("make", "names"), WRITES, ids=NAMES)
def test_what_calls_change_is_put_back(make, names):
    model = nn.Sequential(torch.jit.script(make().eval()), nn.ReLU())
    twin = nn.Sequential(torch.jit.script(make().eval()), nn.ReLU())
    with protected(model):
        model(X)
        model(X * 2)
    assert torch.equal(model(X), twin(X))
    assert not is_untouched(model, lambda: model(X))
    assert is_untouched(model, lambda: None)


def test_what_only_a_call_has_made_may_change():
    script = torch.jit.script(Reads().eval())
    assert attributes_written(script) == ()
    fast = tsopt.compile(tsopt.capture(script, X), "eager")
    expected = torch.jit.script(Reads().eval())(X)
    assert torch.equal(fast(X), expected)


def test_a_module_is_not_run_as_a_script_that_counts_apart():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return x * self.count if float(x.sum()) > 0 else x

    with pytest.raises(CaptureError, match="own optimizations cannot be applied"):
        tsopt.optimize(Decides().eval(), X, frontend="torchscript", **FAST)
