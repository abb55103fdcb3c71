"""Masks of attention that is written out: constants, computed ones, and their shapes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.helpers import check, check_declines
from tests.passes.recompose.examples import (
    BIAS,
    CAUSAL,
    INF,
    KEY,
    LOWEST,
    TRI,
    WINDOW,
    B,
    D,
    H,
    L,
    Q,
    V,
    masked,
    op_of,
    values,
)
from tsopt.passes import STANDARD
from tsopt.passes.recompose import attention, masks

# ---- constant masks ------------------------------------------------------------------------------------------------

EXACT_CAUSAL = {
    "filled with -inf": lambda s: s.masked_fill(TRI == 0, -INF),
    "filled with a low number": lambda s: s.masked_fill(TRI == 0, -1e9),
    "filled with the lowest": lambda s: s.masked_fill(~CAUSAL[None, None], LOWEST),
    "filled with a tensor": lambda s: s.masked_fill(~CAUSAL, torch.tensor(-INF)),
    "where": lambda s: torch.where(CAUSAL, s, torch.tensor(-1e10)),
    "where, number": lambda s: torch.where(CAUSAL, s, -INF),
    "where, number first": lambda s: torch.where(~CAUSAL, -INF, s),
    "where, full": lambda s: torch.where(TRI > 0, s, torch.full_like(s, -INF)),
    "where, whole numbers": lambda s: torch.where(TRI > 0, s, torch.full((L, L), -(10**10))),
    "where, full constant": lambda s: torch.where(TRI > 0, s, torch.full((L, L), -INF)),
    "added -inf": lambda s: s + torch.full((L, L), -INF).triu(1),
    "added lowest": lambda s: s + (1 - TRI) * LOWEST,
    "added first": lambda s: torch.full((1, 1, L, L), -1e10).triu(1) + s,
    "subtracted": lambda s: s - 1e10 * (1 - TRI),
    "before the scale": lambda s: (s + torch.full((L, L), -INF).triu(1)) * 2 / 2,
    "twice": lambda s: s.masked_fill(~CAUSAL, -INF) + torch.full((L, L), -INF).triu(2),
}


@pytest.mark.parametrize("form", EXACT_CAUSAL)
def test_a_causal_mask_is_a_flag(form):
    said = op_of(check(STANDARD, masked(EXACT_CAUSAL[form]), (Q, KEY, V), ["scaled_dot_product_attention"]))
    assert (said["attn_mask"], said["is_causal"]) == (None, True)


def test_a_mask_that_hides_nothing_goes():
    for change in (lambda s: s.masked_fill(TRI > 1, -INF), lambda s: s + torch.zeros(L, L)):
        said = op_of(check(STANDARD, masked(change), (Q, KEY, V)))
        assert (said["attn_mask"], said["is_causal"]) == (None, False)


@pytest.mark.parametrize(
    ("change", "kind", "numel"),
    [
        (lambda s: s.masked_fill(~WINDOW, -INF), torch.bool, L * L),
        (lambda s: torch.where(WINDOW, s, -1e9), torch.bool, L * L),
        (lambda s: s + BIAS, torch.float32, H * L * L),
        (lambda s: s - BIAS, torch.float32, H * L * L),
        (lambda s: 2 * (s / 2 + BIAS), torch.float32, H * L * L),
        (lambda s: (s + BIAS).masked_fill(~CAUSAL, -INF), torch.float32, H * L * L),
        (lambda s: s + BIAS + torch.full((L, L), -INF).triu(1), torch.float32, H * L * L),
        (lambda s: s + torch.arange(L) * 0.5, torch.float32, L),
        (lambda s: s + torch.arange(L)[:, None] * 0.5, torch.float32, L),
        (lambda s: s + BIAS.double().float(), torch.float32, H * L * L),
        (lambda s: s.masked_fill(~CAUSAL, -INF) + BIAS, torch.float32, H * L * L),
    ],
)
def test_other_constant_masks_are_one_mask(change, kind, numel):
    said = op_of(check(STANDARD, masked(change), (Q, KEY, V), ["scaled_dot_product_attention"]))
    mask = said["attn_mask"]
    assert mask.op == "get_attr"
    assert (mask.meta["val"].dtype, mask.meta["val"].numel(), mask.meta["val"].dim()) == (kind, numel, 4)
    assert not said["is_causal"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_masks_in_other_dtypes(dtype):
    low = torch.finfo(dtype).min
    inputs = tuple(t.to(dtype) for t in (Q, KEY, V))
    assert op_of(check(STANDARD, masked(lambda s: s.masked_fill(~CAUSAL, low)), inputs))["is_causal"]
    assert op_of(check(STANDARD, masked(lambda s: s + BIAS.to(s.dtype)), inputs))["attn_mask"] is not None


def test_a_mask_in_float32_on_halves_is_cast():
    def model(q, k, v):
        return ((q @ k.mT).float() / 2 + BIAS).softmax(-1).to(v.dtype) @ v

    said = op_of(check(STANDARD, model, tuple(t.bfloat16() for t in (Q, KEY, V))))
    assert said["attn_mask"].meta["val"].dtype == torch.bfloat16


EMPTY = {
    "filled": lambda s: s.masked_fill(torch.ones(L, L).tril(-1) == 0, -INF),
    "filled with a low number": lambda s: s.masked_fill(torch.ones(L, L).tril(-1) == 0, -1e9),
    "added": lambda s: s + torch.full((L, L), -INF).triu(0),
    "in one of two ways": lambda s: s.masked_fill(~CAUSAL, -INF).masked_fill(CAUSAL & (torch.arange(L) < 2), -INF),
    "filled and added": lambda s: s.masked_fill(~CAUSAL, -1e9) + torch.where(torch.arange(L) < 1, -1e9, 0.0),
    "in one head": lambda s: s.masked_fill(torch.arange(H)[:, None, None] == 1, -INF),
}


@pytest.mark.parametrize("form", EMPTY)
def test_a_row_that_is_hidden_as_a_whole_stays(form):
    """Softmax is NaN there, or uniform where scores are replaced by one number; the op answers 0."""
    found = check(STANDARD, masked(EMPTY[form]), (Q, KEY, V))
    assert ("attention", masks.EMPTY_ROW) in found.declined


@pytest.mark.parametrize(("fill", "scale"), [(-1e4, 1), (-100.0, 1), (0.0, 1), (-1e9, 1e-6), (INF, 1)])
def test_scores_that_are_replaced_by_a_number_of_use_stay(fill, scale):
    """With scores of 1e5 they are the largest of their row."""
    found = check(STANDARD, masked(lambda s: s.masked_fill(~CAUSAL, fill) * scale), (Q, KEY, V))
    assert ("attention", masks.WEAK_FILL) in found.declined


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s + torch.full((L, L), math.nan).triu(1),
        lambda s: s + torch.full((L, L), INF).triu(1),
        lambda s: s.masked_fill(~CAUSAL, INF),
        lambda s: s.masked_fill(~CAUSAL, -INF) * -1.0,
        lambda s: torch.where(CAUSAL, s, BIAS),
        lambda s: torch.where(CAUSAL, s, torch.full((L, L), -INF).tril(3)),
    ],
)
def test_masks_that_do_something_else_stay(change):
    found = check(STANDARD, masked(change), (Q, KEY, V))
    assert "attention" not in found.done


def test_a_mask_that_is_strict_before_equal_numbers_of_rows_and_columns_is_no_flag():
    """is_causal counts from the first row; a longer past is another mask."""
    rows = torch.ones(2, L).tril(3).bool()
    model = masked(lambda s: s.masked_fill(~rows, -INF))
    said = op_of(check(STANDARD, model, (Q[:, :, :2], KEY, V)))
    assert not said["is_causal"]
    assert said["attn_mask"] is not None


# ---- computed masks ------------------------------------------------------------------------------------------------

PADDING = torch.tensor([[True, True, True, False, False], [True, True, False, False, False]])
NOBODY = torch.zeros(B, L, dtype=torch.bool)
COMPUTED = {
    "filled": lambda s, m: s.masked_fill(~m[:, None, None], -1e9),
    "filled with the lowest": lambda s, m: s.masked_fill(m[:, None, None].long() == 0, LOWEST),
    "where": lambda s, m: torch.where(m[:, None, None], s, -1e30),
    "each row": lambda s, m: s.masked_fill(~(m[:, None, None] & CAUSAL), -1e9),
    "filled twice": lambda s, m: s.masked_fill(~m[:, None, None], -1e9).masked_fill(~CAUSAL, -1e9),
    "beside a bias": lambda s, m: (s + BIAS).masked_fill(~m[:, None, None], -1e9),
    "added": lambda s, m: s + (1.0 - m[:, None, None].float()) * LOWEST,
    "added to a causal mask": lambda s, m: (
        s + torch.full((L, L), -INF).triu(1) + (1 - m[:, None, None].float()) * -10000.0
    ),
    "added where": lambda s, m: s + torch.where(m[:, None, None], 0.0, -1e4),
}


@pytest.mark.parametrize("form", COMPUTED)
def test_a_computed_mask_that_is_finite_is_added(form):
    """A row that is hidden as a whole is as it was, too."""
    model = masked(COMPUTED[form])
    found = check(STANDARD, model, (Q, KEY, V, PADDING), also=[(Q, KEY, V, ~NOBODY), (Q, KEY, V, NOBODY)])
    assert op_of(found)["attn_mask"].meta["val"].dtype == torch.float32


def test_a_number_of_the_input_is_a_mask_where_it_cannot_overflow():
    def model(q, k, v, m):
        return (q @ k.mT + (1.0 - m[:, None, None].float()) * -10000.0).softmax(-1) @ v

    op_of(check(STANDARD, model, (Q, KEY, V, PADDING.long())))


@pytest.mark.parametrize(
    ("change", "mask"),
    [
        (lambda s, m: s.masked_fill(~m[:, None, None], -INF), PADDING),
        (lambda s, m: s + m, BIAS),
        (lambda s, m: s + torch.where(m[:, None, None], 0.0, -INF), PADDING),
        (lambda s, m: s + (1.0 - m[:, None, None].float()) * LOWEST, PADDING.long()),
        (lambda s, m: s + (1.0 - m[:, None, None]) * -1e4, PADDING.float()),
    ],
)
def test_a_computed_mask_that_may_be_infinite_stays(change, mask):
    found = check(STANDARD, masked(change), (Q, KEY, V, mask))
    assert ("attention", masks.COMPUTED_MASK) in found.declined


def test_a_computed_mask_in_float16_stays():
    model = masked(lambda s, m: s.masked_fill(~m[:, None, None], -65504.0))
    found = check(STANDARD, model, (Q.half(), KEY.half(), V.half(), PADDING))
    assert ("attention", masks.HALF_MASK) in found.declined


@pytest.mark.parametrize(
    "change",
    [
        lambda s, m: s.masked_fill(~CAUSAL, -1e10).masked_fill(~m[:, None, None], -1e9),
        lambda s, m: s.masked_fill(~m[:, None, None], -1e9) + BIAS,
        lambda s, m: (s + torch.full((L, L), -INF).triu(1)).masked_fill(~m[:, None, None], -1e9),
        lambda s, m: (s + torch.full((L, L), -1e9).triu(1)).masked_fill(~m[:, None, None], -1e9),
    ],
)
def test_a_computed_mask_that_meets_another_stays(change):
    """In a row that all of them hide, it is the order of the numbers that decides."""
    found = check(STANDARD, masked(change), (Q, KEY, V, PADDING))
    assert ("attention", masks.MIXED_MASKS) in found.declined


def test_two_masks_that_overflow_together_stay():
    model = masked(lambda s, m: s + torch.full((L, L), LOWEST).triu(0) + (1 - m[:, None, None].float()) * LOWEST)
    found = check(STANDARD, model, (Q, KEY, V, PADDING))
    assert ("attention", masks.EMPTY_ROW) in found.declined


@pytest.mark.parametrize("fill", [-1e9, -INF])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_that_are_set_to_zero_are_empty_rows_of_the_op(fill, bias):
    """What the op answers for an empty row is what is written here."""

    def model(q, k, v, m):
        hidden = ~m[:, None, None]
        scores = q @ k.mT / 2 + BIAS if bias else q @ k.mT / 2
        return scores.masked_fill(hidden, fill).softmax(-1).masked_fill(hidden, 0.0) @ v

    found = check(STANDARD, model, (Q, KEY, V, PADDING), also=[(Q, KEY, V, NOBODY), (Q, KEY, V, ~NOBODY)])
    assert op_of(found)["attn_mask"].meta["val"].dtype == (torch.float32 if bias else torch.bool)


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v, m: (q @ k.mT).softmax(-1).masked_fill(~m[:, None, None], 0.0) @ v,
        lambda q, k, v, m: (q @ k.mT).masked_fill(~CAUSAL, -INF).softmax(-1).masked_fill(~m[:, None, None], 0.0) @ v,
    ],
)
def test_weights_that_are_set_to_zero_elsewhere_stay(model):
    found = check(STANDARD, model, (Q, KEY, V, PADDING))
    assert ("attention", masks.MIXED_MASKS) in found.declined


# ---- the shape of masks --------------------------------------------------------------------------------------------


def test_a_mask_over_merged_heads():
    """Scores of [batch * heads, L, L], a mask of [heads, L, L]: as older models write it."""

    def model(q, k, v):
        q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
        scores = (torch.bmm(q, k.transpose(1, 2)) / 2).view(B, H, L, L) + BIAS
        return torch.bmm(scores.softmax(-1).view(B * H, L, L), v)

    assert op_of(check(STANDARD, model, (Q, KEY, V)))["attn_mask"].meta["val"].shape == (1, H, L, L)


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_over_windows_and_heads(batch):
    """Scores of [batch * windows, heads, L, L], and between two reshapes a mask for each window."""
    windows, shift = 3, values(3, L, L, seed=9)

    def model(q, k, v):
        scores = (q @ k.mT + BIAS).view(batch, windows, H, L, L) + shift[None, :, None]
        return scores.view(batch * windows, H, L, L).softmax(-1) @ v

    inputs = tuple(values(batch * windows, H, L, D, seed=i) for i in range(3))
    op_of(check(STANDARD, model, inputs))


def test_a_mask_that_is_not_whole_over_batch_or_heads_stays():
    """It would have to be stored once for each head."""
    shift = values(3, L, L, seed=9)

    def model(q, k, v):
        scores = (q @ k.mT).view(2, 3, H, L, L) + shift[None, :, None]
        return scores.view(6, H, L, L).softmax(-1) @ v

    found = check(STANDARD, model, tuple(values(6, H, L, D, seed=i) for i in range(3)))
    assert ("attention", attention.MASK_SHAPE) in found.declined


def test_reshapes_that_do_not_nest_stay():
    def model(q, k, v):
        scores = (q @ k.mT).view(3, 2, L, L) + values_32
        return (scores.view(2, 3, L, L) + BIAS).softmax(-1) @ v

    values_32 = values(3, 2, L, L)
    found = check(STANDARD, model, (Q, KEY, V))
    assert ("attention", attention.MASK_SHAPE) in found.declined


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_a_bias_that_comes_with_the_product(beta):
    slopes = values(B * H, 1, L)

    def model(q, k, v):
        scores = torch.baddbmm(slopes, q, k.transpose(1, 2), beta=beta, alpha=0.5)
        return torch.bmm(scores.masked_fill(~CAUSAL, -INF).softmax(-1), v)

    said = op_of(check(STANDARD, model, tuple(values(B * H, L, D, seed=i) for i in range(3))))
    assert said["scale"] is None
    assert said["is_causal"] == (beta == 0)


@pytest.mark.parametrize("number", [0.0, 1.5])
def test_a_number_that_comes_with_the_product(number):
    def model(q, k, v):
        return torch.bmm(torch.baddbmm(torch.full((1, 1, 1), number), q, k.transpose(1, 2)).softmax(-1), v)

    said = op_of(check(STANDARD, model, (Q[0], KEY[0], V[0])))
    assert (said["attn_mask"] is None) == (number == 0)


@pytest.mark.parametrize("factors", [{"beta": True}, {"beta": 1 + 0j}, {"alpha": True}, {"alpha": 1 + 0j}], ids=str)
def test_a_bias_times_what_is_no_number_of_a_formula_stays(factors):
    def model(q, k, v):
        return torch.bmm(torch.baddbmm(BIAS, q, k.transpose(1, 2), **factors).softmax(-1), v)

    check_declines(attention.attention, model, (Q[0], KEY[0], V[0]))
