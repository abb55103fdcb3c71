"""Models that decide by the remainder of a size: what was traced serves every size that has such a remainder."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tsopt.compiler.sizes.samples import sample_sizes
from tsopt.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"seconds": 0.02, "isolate": False, "cache": False}


def rows(n):
    return torch.randn(n, 4)


class Windows(nn.Module):
    """Looks at windows of eight tokens, after padding that the result does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        length = x.shape[1]
        if length % 8:
            x = F.pad(x, (0, 0, 0, 8 - length % 8))
        windows = x.reshape(x.shape[0], -1, 8, 6)
        return (self.layer(windows) + windows.mean(2, keepdim=True)).reshape(x.shape[0], -1, 6)[:, :length]


def tokens(length):
    return torch.randn(1, length, 6)


def captured(model, *examples):
    signature = tsopt.capture(model, [*examples]).signature
    (dim,) = signature.dims
    return (dim.low, dim.high, dim.step), [str(condition) for condition in signature.conditions]


def padded(x):
    return F.pad(x, (0, 0, 0, 8 - x.shape[0] % 8)) if x.shape[0] % 8 else x


def halved(x):
    half = x[::2]
    return half * 2 if half.shape[0] % 4 else half


@pytest.mark.parametrize(
    ("model", "sizes", "dim", "conditions"),
    [
        (padded, (77, 100), (1, None, 1), ["batch % 8 != 0"]),
        (padded, (80, 88), (1, None, 8), []),
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, (9, 7), (1, None, 1), ["batch % 2 != 0"]),
        (lambda x: x * 2 if x.shape[0] % 8 == 5 else x, (77, 85), (2, None, 1), ["batch % 8 == 5"]),
        (
            lambda x: x * 2 if (8 - x.shape[0] % 8) % 8 > 2 else x,
            (77, 12),
            (1, None, 1),
            ["(8 + -1 * (batch % 8)) % 8 > 2"],
        ),
        (halved, (9, 27), (3, None, 1), ["(1 + batch) // 2 != 1", "(1 + batch) // 2 % 4 != 0"]),
    ],
)
def test_a_program_is_for_all_sizes_with_such_a_remainder(model, sizes, dim, conditions):
    assert captured(model, *map(rows, sizes)) == (dim, conditions)


def test_sizes_of_another_remainder_are_refused():
    run = tsopt.compile(tsopt.capture(padded, [rows(77), rows(100)]), "eager")
    for n in (1, 7, 9, 500):
        x = rows(n)
        assert torch.equal(run(x), padded(x))
    with pytest.raises(tsopt.SignatureError, match="do not satisfy batch % 8 != 0"):
        run(rows(16))
    with pytest.raises(CaptureError, match="in another one batch % 8 != 0 does not hold"):
        tsopt.capture(padded, [rows(77), rows(16)])


@pytest.mark.parametrize("size", [1, 3])
def test_one_is_a_size_with_a_remainder_too(size):
    def model(x):
        return x * 2 if x.shape[0] % 8 >= 5 else x

    with pytest.raises(CaptureError, match=rf"in another one batch (is {size}, expected 2\.\.|% 8 >= 5 does not hold)"):
        tsopt.capture(model, [rows(size), rows(77)])


def test_one_example_does_not_make_a_program_for_one_remainder():
    with pytest.raises(CaptureError, match="specializes on a size"):
        tsopt.capture(lambda x: x * 2 if x.shape[0] % 8 == 5 else x, rows(77), dynamic={"x": {0: "n"}})


def test_passes_are_tried_at_sizes_with_such_a_remainder():
    program = tsopt.capture(Windows().eval(), [tokens(77), tokens(100)])
    samples = sample_sizes(program)
    assert len(samples) > 2
    assert all(program.signature.unmet(sizes) is None for sizes in samples)


def test_a_padded_model_is_optimized_for_all_lengths_that_are_padded():
    model = Windows().eval()
    fast = tsopt.optimize(model, [tokens(77), tokens(100)], backends=("eager",), **QUICK)
    assert fast.report.sizes == "x_1: 8..200, checked at 9, 111, 199; only where x_1 % 8 != 0"
    assert fast.report.rows[1].status in ("ok", "no gain"), fast.report.rows[1].reason
    run = tsopt.compile(fast.program, "onnxruntime")
    for length in (9, 50, 199):
        x = tokens(length)
        torch.testing.assert_close(run(x), model(x).detach())


def test_the_error_tells_calls_that_are_like_the_traced_one_from_others_in_another_process_too():
    with pytest.raises(CaptureError) as caught:
        tsopt.capture(padded, [rows(77), rows(16)])
    admits = pickle.loads(pickle.dumps(caught.value)).admits
    assert [size for size in range(5, 20) if admits({(0, 0): size, (0, 1): 4})] == [5, 6, 7, *range(9, 16), 17, 18, 19]
