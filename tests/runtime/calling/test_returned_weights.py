"""Weights that a model returns: its own where the compiled form shares them, copies where it owns them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt

BACKENDS = ("eager", "torchscript", "onnxruntime", "openvino")
QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Quantizer(nn.Module):
    """A parameter, a buffer that calls do not write, and attributes that are neither, all of them returned."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.register_buffer("codes", torch.randn(6, 4, generator=generator))
        self.scale, self.kept = torch.ones(4), [torch.ones(3)]

    def forward(self, x):
        values = (x @ self.weight + self.codes[:1]) * self.scale
        of_weight, of_codes = (self.weight.t(), self.weight.detach()), (self.codes[1:], self.codes[:3].flatten())
        return values, self.weight, self.codes, self.scale, *of_weight, *of_codes, self.kept[0]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(32.0).reshape(8, 4))

    def forward(self, x):
        rows = self.table[: x.shape[0]]
        return x + rows, rows


def shared(model, backend, **options):
    return tsopt.compile(tsopt.transform(tsopt.capture(model, X, **options)), backend, share_weights=True)


def check_own(found, model):
    """What was returned is the model's."""
    values, weight, codes, scale, turned, detached, rest, flat, kept = found
    same = (weight is model.weight, codes is model.codes, scale is model.scale, kept is model.kept[0])
    assert same == (True, True, True, True)
    assert turned.data_ptr() == model.weight.data_ptr()
    assert turned.stride() == (1, 4)
    assert turned.requires_grad, "as a view of a parameter does"
    assert not detached.requires_grad
    assert detached.data_ptr() == model.weight.data_ptr()
    assert (rest.data_ptr(), flat.data_ptr()) == (model.codes[1].data_ptr(), model.codes.data_ptr())
    assert not values.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_weights_are_shared_they_are_the_models(backend):
    model = Quantizer().eval()
    executable = shared(model, backend)
    with torch.no_grad():
        check_own(executable(X), model)
        executable(X)[6].fill_(7)
    assert (model.codes[1:] == 7).all()
    assert (executable(X)[7][4:] == 7).all(), "the views of one buffer share it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_otherwise_they_are_copies(backend):
    model, wanted = Quantizer().eval(), Quantizer().eval()
    executable = tsopt.compile(tsopt.transform(tsopt.capture(model, X)), backend)
    for _ in range(2):
        found = executable(X)
        for value, reference in zip(found, wanted(X), strict=True):
            torch.testing.assert_close(value, reference.detach())
        with torch.no_grad():
            for value in found:
                value.fill_(7)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict())


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_of_many_sizes_a_part_is_the_models_as_well(backend):
    model = Positions().eval()
    executable = shared(model, backend, dynamic={"x": {0: "rows"}})
    for rows in (2, 5, 8):
        values, table = executable(torch.ones(rows, 4))
        torch.testing.assert_close(values, model.table[:rows] + 1)
        assert (table.data_ptr(), table.shape) == (model.table.data_ptr(), (rows, 4))


def test_one_that_has_another_size_by_now_is_not_returned_in_part():
    model = Positions().eval()
    wanted = model.table[:2].clone()
    executable = shared(model, "onnxruntime")
    model.table.data = torch.zeros(1, 4)
    for _ in range(2):
        rows = executable(X)[1]
        torch.testing.assert_close(rows, wanted)
        rows.fill_(7)


@pytest.mark.parametrize("share", [False, True])
def test_an_optimized_model_returns_its_own_or_the_models(share, always_faster):
    model = Quantizer().eval()
    fast = tsopt.optimize(model, X, **QUICK, share_weights=share)
    assert fast.report.winner == "TorchScript"
    with torch.no_grad():
        found = fast(X)
    if share:
        check_own(found, model)
    assert (found[1] is model.weight) is share
    assert (found[6].data_ptr() == model.codes[1].data_ptr()) is share


def test_a_hybrid_returns_the_models_and_sees_what_is_written_to_them(always_faster):
    model, wanted = Quantizer().eval(), Quantizer().eval()
    net = tsopt.hybridize(model, **QUICK)
    for _ in range(3):
        with torch.no_grad():
            found, reference = net(X), wanted(X)
            check_own(found, model)
            torch.testing.assert_close(found, reference)
            found[6].add_(1)
            reference[6].add_(1)


def test_in_a_bundle_they_are_copies(tmp_path):
    model = Quantizer().eval()
    fast = tsopt.optimize(model, X, **QUICK, share_weights=True)
    fast.executable = shared(model, "torchscript")
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"), trust=True)
    wanted = Quantizer().eval()(X)
    for _ in range(2):
        found = loaded(X)
        torch.testing.assert_close([*found], [reference.detach() for reference in wanted])
        with torch.no_grad():
            for value in found:
                value.fill_(7)


class Twice(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.layer, self.parts = nn.Linear(4, 4), parts

    def forward(self, x):
        return self.layer(x), *(part(self.layer.weight) for part in self.parts)


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        (lambda weight: weight, lambda weight: weight.t()),
        (lambda weight: weight[0], lambda weight: weight),
        (lambda weight: weight[:3], lambda weight: weight[1:]),
    ],
    ids=["whole and turned", "row and whole", "overlapping"],
)
def test_copies_of_one_weight_share_memory_as_the_results_of_eager_do(parts, bundled, tmp_path):
    model = Twice(*parts).eval()
    executable = tsopt.compile(tsopt.capture(model, X), "torchscript")
    if bundled:
        fast = tsopt.optimize(model, X, **QUICK)
        fast.executable = executable
        executable = tsopt.load(fast.save(tmp_path / "m.tsopt"), trust=True)
    before = model.layer.weight.detach().clone()
    for _ in range(2):
        _, first, second = executable(X)
        wanted = [part(before).clone() for part in parts]
        torch.testing.assert_close([first, second], wanted)
        held = before.clone()
        with torch.no_grad():
            parts[0](held).fill_(7)
            first.fill_(7)
        torch.testing.assert_close(second, parts[1](held))
    torch.testing.assert_close(model.layer.weight.detach(), before)
