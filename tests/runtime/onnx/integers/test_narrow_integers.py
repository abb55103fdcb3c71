"""What an engine computes in fewer bits: refused by name, or checked at the call; ordinary models stay."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tests.runtime.helpers import save
from tests.runtime.onnx.integers.helpers import BOTH, FLOATS, INTS, examined, limits
from tsopt.runtime.calling.value_checks import INDEX, RANGE
from tsopt.runtime.onnx.integers.engine_differences import ONNX_RUNTIME
from tsopt.runtime.onnx.integers.narrow_integers import examine

pytestmark = pytest.mark.filterwarnings("ignore")
openvino_only = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is an extra")


class Masked(nn.Module):
    """Positions as RoBERTa counts them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(16, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids.ne(1).int()
        found: torch.Tensor = self.tokens(ids) + self.places((mask.cumsum(1) * mask).long() + 1)
        return found


# ---- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("model", "largest"),
    [(lambda x: x.sum(0, dtype=torch.int32), 2**30), (lambda x: x.sum(0, dtype=torch.int16), 2**14)],
)
def test_a_sum_that_leaves_its_dtype_is_not_left_to_an_engine(engine, model, largest):
    """They saturate where PyTorch wraps around."""
    x = torch.ones(4, dtype=torch.int32)
    found = examined(model, x, engine=engine)
    assert found.refused or all(4 * high <= 2 * largest for _, high, _ in limits(found))
    assert found.refused or found.bounds
    assert not examined(lambda x: x.sum(), x, engine=ONNX_RUNTIME).bounds


@pytest.mark.parametrize(
    ("model", "args", "why"),
    [
        (lambda x: x.double().sum().float(), (FLOATS,), "does not support float64: it computes in float32"),
        (lambda x: x + x, (INTS.byte(),), "uint8 only up to 2\\^8, and add"),
        (lambda x: -x, (INTS.to(torch.int8),), "int8 only up to 2\\^7, and neg"),
        (lambda x: x.long() + 0, (FLOATS,), "int64 only up to 2\\^31, and to"),
        (lambda x: (x % 1.0 * 2**32).long() + 0, (FLOATS,), "int64 only up to 2\\^31, and to"),
        (lambda x: (x.sigmoid() * (2**31 - 1)).long() + 0, (FLOATS,), "int64 only up to 2\\^31, and to"),
        (lambda x: x + 2**40, (INTS,), "int64"),
        (lambda x: x * x * x, (INTS,), "int64"),
        (lambda x: x % 7, (FLOATS,), "rounds the quotient before remainder"),
        (lambda x: x.to(torch.uint8), (INTS,), "uint8"),
    ],
)
def test_openvino_refuses_by_name_what_it_computes_in_fewer_bits(model, args, why):
    found = examined(model, *args)
    assert any(re.search(why, item.why) for item in found.refused), found
    assert not found.bounds


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (lambda x: x % 7, (FLOATS,)),
        (lambda x: x // 0.1, (FLOATS,)),
    ],
)
def test_onnx_runtime_refuses_floats_that_it_computes_in_fewer_bits(model, args):
    assert examined(model, *args, engine=ONNX_RUNTIME).refused


LARGE = 2**24 + 1
PAIRS = [
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.maximum, torch.minimum, torch.isin),
    lambda x, y: x.clamp(min=y),
    lambda x, y: x.clamp(0, LARGE),
    lambda x, y: torch.bucketize(x, torch.tensor([1, LARGE])),
    lambda x, y: torch.where(y > 5, x, y),
    lambda x, y: x.masked_fill(y > 5, 3),
]


@pytest.mark.parametrize("model", PAIRS)
def test_openvino_compares_and_chooses_integers_in_float32(model):
    found = examined(model, INTS, INTS.flip(0))
    assert {max(-low, high) for low, high, _ in limits(found)} <= {2**24 - 1}
    assert found.bounds
    assert not found.refused


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x == 1,
        lambda x: (x > 0) & (x != 0),
        lambda x: x.clamp(0, 9),
        lambda x: x.clamp(min=-5),
        lambda x: x.maximum(torch.tensor(7)),
        lambda x: torch.isin(x, torch.tensor([2, 3])),
        lambda x: torch.arange(3) < x,
        lambda x: x.clamp(0, 3) < 2**32,
        lambda x: x.clamp(0, 3).clamp(-(2**40), 2**31),
        lambda x: torch.where(x > 2, 1, 0),
    ],
)
def test_what_is_compared_with_a_small_number_may_be_large(model):
    """Rounding keeps their order."""
    found = examined(model, INTS.int())
    assert not found.refused
    assert not found.bounds


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clamp(2**30, 2**30 + 10),
        lambda x: x.clamp(0, 7).sub(9) // 2**32,
        lambda x: (x.clamp(0, 1) + 2**30) - 2684354560,
        lambda x: 2684354560 - (x.clamp(0, 1) + 2**30),
        lambda x: F.pad(x.clamp(0, 1), (1, 1), value=LARGE),
        lambda x: x.clamp(0, 1).masked_fill(x > 5, LARGE),
    ],
)
def test_openvino_is_not_given_literals_that_it_does_not_hold(model):
    assert examined(model, INTS).refused


def test_positions_of_a_sequence_without_an_end_are_compared():
    """A causal mask, and buckets of distances; no call has 2^30 positions, squared."""

    def model(x):
        at = torch.arange(x.shape[1])
        distance = at[None] - at[:, None]
        return distance <= 0, torch.where(distance > 4, distance.clamp(max=9), distance), x.cumsum(1) * 0

    assert not examined(model, torch.ones(2, 5), dynamic={"x": {1: "n"}}).refused


@pytest.mark.parametrize("dynamic", [{1: "n"}, {0: "b", 1: "n"}])
def test_comparisons_are_examined_at_the_largest_sizes_that_exist(dynamic):
    """Two rows of 2^30 positions are too many elements; shorter ones, and one row, are not."""

    def model(x):
        at = torch.arange(x.shape[1])
        return at.expand(x.shape) < at + 1

    (refused,) = examined(model, torch.ones(2, 5), dynamic={"x": dynamic}).refused
    assert "compares integers in lt correctly only up to 2^24" in refused.why


@openvino_only
def test_a_call_beyond_what_openvino_compares_is_served_by_eager():
    model = lambda x, y: (x == y, torch.maximum(x, y))  # noqa: E731
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, (INTS, INTS + 1))), "openvino")
    large = torch.arange(LARGE - 1, LARGE + 3)[:3]
    for args in ((INTS, INTS + 1), (large, large + 1)):
        assert all(map(torch.equal, made(*args), model(*args)))


def test_a_weight_beyond_int32_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("since", torch.tensor([2**40, 1]))

        def forward(self, x):
            return x < self.since

    found, *_ = examined(Model(), torch.tensor([1, 2])).refused
    assert "since" in found.where


@openvino_only
def test_the_refusal_is_what_compile_says():
    with pytest.raises(tsopt.BackendError, match="does not support float64: it computes in float32"):
        tsopt.compile(tsopt.capture(lambda x: x * 2, FLOATS.double()), "openvino")


# ---- what is taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [lambda x: x % 4, lambda x: x // 2, lambda x: torch.div(x, 0.5, rounding_mode="floor"), lambda x: x / 3],
)
@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_a_quotient_that_is_not_rounded_or_not_cut_is_taken(model, engine):
    assert not examined(model, FLOATS, engine=engine).refused


@pytest.mark.parametrize(
    ("model", "low", "high"),
    [
        (lambda x: x > 5, -(2**31), 2**31 - 1),
        (lambda x: x + 1, -(2**31) + 1, 2**31 - 1),
        (lambda x: x // 3, -(2**24) + 1, 2**24 - 1),
        (lambda x: x * x, -(2**15) + 1, 2**15 - 1),
    ],
)
def test_inputs_are_checked_for_the_widest_range_that_a_program_is_right_for(model, low, high):
    found = examined(model, INTS)
    if high == 2**31 - 1 and low > -(2**31):  # one more than int32 holds
        low, high = -(2**24) + 1, 2**24 - 1
    assert limits(found) == [(low, high, RANGE)]
    assert "PyTorch serves all others" in found.notes[0]


ENDS = {
    torch.int8: (-128, 127, 7, 100, 126, 3),
    torch.uint8: (0, 255, 7, 100, 254, 3),
    torch.int32: (-(2**31), 2**31 - 1, 7, 100, 2**24 + 1, 0),
}


def ends(dtype):
    return torch.tensor(ENDS[dtype], dtype=dtype).reshape(2, 3)


@openvino_only
@pytest.mark.parametrize(
    ("model", "dtype", "why"),
    [
        (lambda x: x @ x.t(), torch.int8, "matmul may exceed that"),
        (lambda x: x.diff(dim=-1), torch.uint8, "may exceed that"),
        (lambda x: torch.addcmul(x, x, x), torch.uint8, "addcmul may exceed that"),
        (lambda x: x >> 1, torch.int8, "computes rshift of integers correctly only from 0 to 2\\^24"),
        (lambda x: x.trunc(), torch.int8, "computes trunc of integers correctly only"),
        (lambda x: torch.isclose(x, x.flip(0)), torch.uint8, "computes isclose of integers correctly only"),
    ],
)
def test_openvino_refuses_ops_that_go_wrong_at_the_ends_of_a_dtype(model, dtype, why):
    with pytest.raises(tsopt.BackendError, match=why):
        tsopt.compile(tsopt.capture(model, ends(dtype) % 3), "openvino")


@pytest.mark.sliced(2)
@openvino_only
@pytest.mark.parametrize("model", [torch.Tensor.bool, torch.logical_not, lambda x: torch.logical_and(x, x), torch.all])
def test_openvino_is_not_asked_whether_the_lowest_int32_is_true(model):
    executable = tsopt.compile(tsopt.capture(model, ends(torch.int32) % 3), "openvino")
    for call in (ends(torch.int32), ends(torch.int32) % 3, torch.full((2, 3), -(2**31), dtype=torch.int32)):
        assert torch.equal(executable(call), model(call))


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    "model",
    [
        torch.sign,
        lambda x: x.amax(-1),
        lambda x: x.min(0)[0],
    ],
)
def test_onnx_runtime_compares_int64_by_signed_halves(model):
    """It says that 0 is larger than 2**31."""
    x = torch.tensor([[2**31, 3, -(2**31) - 1, 2**32 - 1], [7, -7, 2**31 + 5, 2**53 + 2**31]])
    executable = tsopt.compile(tsopt.capture(model, x % 5), "onnxruntime")
    assert limits(examined(model, x % 5, engine=ONNX_RUNTIME))
    for call in (x, x.flip(1), x % 5):
        assert torch.equal(executable(call), model(call))


@pytest.mark.sliced(5)
@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.maximum(x, x * 0),
        lambda x: torch.max(x, x.flip(0)),
        lambda x: torch.minimum(x, x.flip(0)),
        lambda x: x.clamp(0, 6),
        lambda x: x.clamp(-5, 2**40),
        lambda x: x.clamp(2**40, -5),
        lambda x: x.clamp_min(2**31),
        lambda x: x.clamp_max(-(2**33)),
        lambda x: torch.clamp_min(x, x.flip(1)),
        lambda x: torch.clamp_max(x, x.flip(1)),
        lambda x: x.clamp(min=x.flip(0), max=x.flip(1)),
    ],
)
def test_minima_maxima_and_bounds_are_exact_in_onnx_runtime_without_a_check(model):
    x = torch.tensor([[2**31, 3, -(2**31) - 1, 2**32 - 1], [7, -7, 2**31 + 5, 2**53 + 2**31]])
    x = torch.cat([x, torch.tensor([[-(2**63), 2**63 - 1, 0, -1]])])
    program = tsopt.transform(tsopt.capture(model, x % 5))
    executable = tsopt.compile(program, "onnxruntime")
    assert not examine(program, ONNX_RUNTIME).bounds
    for call in (x, x.flip(1), x % 5):
        assert torch.equal(executable(call), model(call))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
def test_differences_that_wrap_around_are_not_taken_for_close(dtype):
    """PyTorch takes them in floats: 0 and the lowest number of a dtype are not close."""
    x = torch.tensor([0, torch.iinfo(dtype).min, 3], dtype=dtype)
    assert not torch.isclose(x[:1], x[1:2])
    (found,) = examined(lambda x: torch.isclose(x, x.flip(0)), x, engine=ONNX_RUNTIME).refused
    assert found.why == "ONNX Runtime computes isclose of integers correctly only for 0 and 1"


def test_values_that_only_look_something_up_are_not_narrowed():
    found = examined(lambda i, x: x[i.reshape(-1).int()], INTS, torch.ones(4, 3))
    assert not found.refused
    assert not found.bounds


def test_positions_counted_from_a_mask_are_taken_and_the_tokens_checked_as_indices():
    assert limits(examined(Masked(), torch.ones(2, 4).long())) == [(0, 49, INDEX)]


@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_a_model_of_floats_has_nothing_to_check(engine):
    found = examined(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), FLOATS, engine=engine)
    assert (found.refused, found.bounds, found.notes) == ((), (), ())


def test_branches_that_compute_with_int64_are_refused_where_they_are_narrowed():
    def model(x):
        return torch.cond(x.sum() > 0, lambda x: (x.long() * 3).float(), lambda x: x + 1, (x,))

    assert examined(model, FLOATS).refused
    assert not examined(model, FLOATS, engine=ONNX_RUNTIME).refused


# ---- calls --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
def test_what_openvino_would_cut_is_run_by_torch_and_refused_by_a_bundle(tmp_path):
    def model(x):
        return x // 86_400_000

    small, large = torch.tensor([5, 90_000_000]), torch.tensor([1_732_233_600_000, 5])
    made = tsopt.compile(tsopt.capture(model, small), "openvino")
    assert torch.equal(made(large), model(large))
    assert made(torch.tensor([5, 16_000_000])).tolist() == [0, 0]
    loaded = tsopt.load(save(made, tmp_path / "m.tsopt", model, small))
    with pytest.raises(tsopt.BackendError, match="this backend differs from PyTorch"):
        loaded(large)
