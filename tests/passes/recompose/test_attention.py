"""Attention that is written out as one op, its masks, and the blocks that people write."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import RulePass, aten, call, capture, check, check_declines, check_fires, find, specials
from tsopt.compiler.ops import bind
from tsopt.compiler.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, Site
from tsopt.passes import NORMALIZE, SIMPLIFY, STANDARD
from tsopt.passes.fold import FoldConstants
from tsopt.passes.recompose import attention, masks
from tsopt.passes.recompose.bounds import bounds

INF, LOWEST = math.inf, torch.finfo(torch.float32).min
B, H, L, D = 2, 3, 5, 4
ATTENTION = (RulePass("attention", attention.RULES),)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, KEY, V = (values(B, H, L, D, seed=seed) for seed in range(3))
TRI = torch.ones(L, L).tril()
CAUSAL = TRI.bool()


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v


def masked(change):
    """Attention with scores that are changed."""
    return lambda q, k, v, *rest: torch.softmax(change(q @ k.transpose(-2, -1) * D**-0.5, *rest), -1) @ v


def op_of(found):
    """The arguments of the one op."""
    assert Counter(found.ops)["scaled_dot_product_attention"] == 1, found.after.text
    assert not {"softmax.int", "matmul", "bmm"} & set(found.ops), found.after.text
    return bind(find(found.after, "scaled_dot_product_attention"))


# ---- the formula ------------------------------------------------------------------------------------------

FORMS = {
    "quotient": plain,
    "scale": lambda q, k, v: torch.softmax(q @ k.mT * 0.5, -1) @ v,
    "scale first": lambda q, k, v: torch.softmax(0.5 * torch.matmul(q, k.permute(0, 1, 3, 2)), -1).matmul(v),
    "on the query": lambda q, k, v: ((q / math.sqrt(D)) @ k.transpose(2, 3)).softmax(3) @ v,
    "on the key": lambda q, k, v: (q @ (k * 0.5).transpose(-2, -1)).softmax(-1) @ v,
    "on the transposed key": lambda q, k, v: (q @ (k.transpose(-2, -1) * 0.5)).softmax(-1) @ v,
    "on both": lambda q, k, v: ((q * D**-0.25) @ (k * D**-0.25).transpose(-1, -2)).softmax(-1) @ v,
    "in float32": lambda q, k, v: F.softmax(q @ k.mT / 2, -1, dtype=torch.float32).to(q.dtype) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / 2).softmax(-1), v
    ),
    "softmax by hand": lambda q, k, v: _by_hand(q @ k.mT / 2) @ v,
}


def _by_hand(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_op(form):
    found = check(STANDARD, FORMS[form], (Q, KEY, V), ["scaled_dot_product_attention"])
    said = op_of(found)
    assert (said["attn_mask"], said["is_causal"], said["scale"]) == (None, False, None)


@pytest.mark.parametrize(("scale", "said"), [(1.0, 1.0), (0.3, 0.3), (0.5, None)])
def test_another_scale_is_said(scale, said):
    found = check_fires(attention.attention, lambda q, k, v: (q @ k.mT * scale).softmax(-1) @ v, (Q, KEY, V))
    assert op_of(found)["scale"] == said


def test_without_a_scale_it_is_one():
    found = check_fires(attention.attention, lambda q, k, v: (q @ k.mT).softmax(-1) @ v, (Q, KEY, V))
    assert op_of(found)["scale"] == 1.0


@pytest.mark.parametrize("scale", [0.0, -0.5, INF, math.nan])
def test_a_scale_that_is_no_positive_number_stays(scale):
    check_declines(attention.attention, lambda q, k, v: (q @ k.mT * scale).softmax(-1) @ v, (Q, KEY, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_in_every_dtype(dtype):
    inputs = tuple(t.to(dtype) for t in (Q, KEY, V))
    check_fires(attention.attention, plain, inputs, also=[tuple(4 * t for t in inputs)])


def test_large_and_small_values():
    hard = specials(B, H, L, D).clamp(-50, 50).nan_to_num(1.0)
    check_fires(attention.attention, plain, (Q, KEY, V), also=[(hard, KEY, V), (Q, hard * 1e-3, V), (Q, KEY, hard)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: F.softmax(q @ k.mT / 2, -1, dtype=torch.float32).to(v.dtype) @ v,
        lambda q, k, v: (q.float() @ k.float().mT / 2).softmax(-1).to(v.dtype) @ v,
        lambda q, k, v: ((q @ k.mT).float() / 2).softmax(-1).to(v.dtype) @ v,
    ],
)
def test_halves_whose_scores_are_float32(model, dtype):
    found = check(STANDARD, model, tuple(t.to(dtype) for t in (Q, KEY, V)), ["scaled_dot_product_attention"])
    assert find(found.after, "scaled_dot_product_attention").meta["val"].dtype == dtype


@pytest.mark.parametrize(
    "shapes",
    [
        [(L, D), (7, D), (7, D)],
        [(6, L, D), (6, 7, D), (6, 7, D)],
        [(1, 1, 1, D), (1, 1, 7, D), (1, 1, 7, D)],
        [(B, H, L, D), (B, H, 1, D), (B, H, 1, D)],
        [(B, H, L, 1), (B, H, 7, 1), (B, H, 7, 1)],
        [(2, 3, 2, L, D), (2, 3, 2, 7, D), (2, 3, 2, 7, D)],
        [(B, H, L, D), (B, 1, 7, D), (B, 1, 7, D)],
        [(B, H, L, D), (7, D), (1, 1, 7, D)],
        [(L, D), (6, 7, D), (6, 7, D)],
    ],
    ids=str,
)
def test_any_number_of_leading_axes(shapes):
    """The op is given four axes: it is only there that PyTorch and the ONNX exporter have their kernel."""
    inputs = tuple(values(*shape, seed=i) for i, shape in enumerate(shapes))
    said = op_of(check_fires(attention.attention, plain, inputs))
    assert all(said[name].meta["val"].dim() == 4 for name in ("query", "key", "value"))


@pytest.mark.parametrize("shapes", [[(B, 0, D)] * 3, [(0, L, D)] * 3, [(L, D), (0, D), (0, D)], [(L, 0)] * 3], ids=str)
def test_nothing_to_attend_to_stays(shapes):
    check_declines(attention.attention, plain, tuple(torch.zeros(shape) for shape in shapes))


def test_rows_that_are_not_dense_are_copied():
    """The kernel wants the last axis dense; the copy is small beside the scores."""

    def image(x):
        q, k, v = (x.reshape(B, 4, 9), (x * 0.5).reshape(B, 4, 9), (x + 1).reshape(B, 4, 9))
        return torch.bmm((torch.bmm(q.permute(0, 2, 1), k) / 2).softmax(2), v.permute(0, 2, 1))

    found = check(STANDARD, image, values(B, 4, 3, 3))
    said = op_of(found)
    assert all(said[name].meta["val"].stride(-1) == 1 for name in ("query", "key", "value"))


def test_values_from_the_left():
    """v^T @ p^T, as in the attention of image decoders."""

    def model(q, k, v):
        return torch.bmm(v, torch.softmax(torch.bmm(q.permute(0, 2, 1), k) / 2, 2).permute(0, 2, 1))

    inputs = tuple(values(B, 4, 9, seed=i) for i in range(3))
    said = op_of(check_fires(attention.attention_transposed, model, inputs))
    assert said["scale"] is None


def test_values_from_the_left_of_another_product_stay():
    def model(q, k, v):
        return v @ torch.softmax(q @ k.mT, -1)

    check_declines(attention.attention_transposed, model, (Q, KEY, values(B, H, D, L)))


def test_keys_that_are_a_constant_matrix():
    keys = values(7, D)
    found = check(STANDARD, lambda q, v: (q @ keys.t() / 2).softmax(-1) @ v, (values(B, L, D), values(B, 7, D)))
    assert op_of(found)["scale"] is None


def test_a_scale_for_each_head_is_taken_by_the_query():
    scale = values(H, 1, 1).exp()

    def model(q, k, v):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale
        return scores.softmax(-1) @ v

    op_of(check(STANDARD, model, (Q, KEY, V)))


def test_a_scale_for_each_column_stays():
    """Also where there are as many columns as a query is wide."""
    inputs = tuple(values(B, H, D, D, seed=seed) for seed in range(3))
    check_declines(attention.attention, masked(lambda s: s * torch.arange(1.0, D + 1)), inputs)


# ---- near misses ------------------------------------------------------------------------------------------

NEAR = {
    "another axis": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "no softmax": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "softmax of no product": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "scaled weights": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v,
    "a number added": lambda q, k, v: (q @ k.mT + 1.0).softmax(-1) @ v,
    "a cap": lambda q, k, v: (30 * torch.tanh(q @ k.mT / 30)).softmax(-1) @ v,
    "rows merged": lambda q, k, v: (q @ k.mT).reshape(B, H * L, L).softmax(-1).reshape(B, H, L, L) @ v,
    "softmax in float64": lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float64).float() @ v,
    "sum with alpha": lambda q, k, v: torch.add(q @ k.mT, q @ k.mT, alpha=2).softmax(-1) @ v,
    "more values than weights": lambda q, k, v: (q[0, 0] @ k[0, 0].mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    found = check(ATTENTION, NEAR[name], (Q, KEY, V))
    assert not {"attention", "attention_transposed"} & found.done


def test_values_of_another_width_stay():
    """No kernel takes them; the op would be slower than the formula."""
    check_declines(attention.attention, plain, (Q, KEY, values(B, H, L, 6)), attention.OTHER_WIDTH)


def test_queries_of_another_dtype_stay():
    def model(q, k, v):
        return plain(q, k, v.float()) if v.dtype == q.dtype else torch.softmax(q @ k.mT, -1).to(v.dtype) @ v

    check_declines(attention.attention, model, (Q, KEY, V.bfloat16()), attention.MIXED_DTYPES)


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: ((p := (q @ k.mT).softmax(-1)) @ v, p),
        lambda q, k, v: ((s := q @ k.mT).softmax(-1) @ v, s),
        lambda q, k, v: ((s := (q @ k.mT) * 2).softmax(-1) @ v, s + 1),
    ],
)
def test_weights_or_scores_that_are_returned_too_stay(model):
    check_declines(attention.attention, model, (Q, KEY, V), USED_ELSEWHERE)


def test_a_scaled_query_that_is_used_again_is_the_query():
    def model(q, k, v):
        q = q * 0.5
        return (q @ k.mT).softmax(-1) @ v, q + 1

    found = check_fires(attention.attention, model, (Q, KEY, V))
    assert op_of(found)["scale"] == 1.0


def test_nan_in_a_score_is_hidden_by_the_kernel_of_pytorch():
    """Known and accepted: NaN is no ordinary input, and the kernel answers 0 for a row of NaN scores."""
    program = check_fires(attention.attention, plain, (Q, KEY, V)).after
    hard = Q.clone()
    hard[0, 0, 0, 0] = math.nan
    assert not plain(hard, KEY, V)[0, 0, 1:].isnan().any()
    assert torch.allclose(call(program, hard, KEY, V)[0, 0, 1:], plain(hard, KEY, V)[0, 0, 1:], atol=1e-5)


# ---- constant masks ---------------------------------------------------------------------------------------

BIAS, WINDOW = values(H, L, L, seed=7), CAUSAL & ~torch.ones(L, L).tril(-2).bool()
EXACT_CAUSAL = {
    "filled with -inf": lambda s: s.masked_fill(TRI == 0, -INF),
    "filled with a low number": lambda s: s.masked_fill(TRI == 0, -1e9),
    "filled with the lowest": lambda s: s.masked_fill(~CAUSAL[None, None], LOWEST),
    "filled with a tensor": lambda s: s.masked_fill(~CAUSAL, torch.tensor(-INF)),
    "where": lambda s: torch.where(CAUSAL, s, torch.tensor(-1e10)),
    "where, number": lambda s: torch.where(CAUSAL, s, -INF),
    "where, number first": lambda s: torch.where(~CAUSAL, -INF, s),
    "where, full": lambda s: torch.where(TRI > 0, s, torch.full_like(s, -INF)),
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


@pytest.mark.parametrize(("fill", "scale"), [(-1e4, 1), (-100.0, 1), (0.0, 1), (-1e9, 1e-6)])
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


# ---- computed masks ---------------------------------------------------------------------------------------

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


# ---- the shape of masks -----------------------------------------------------------------------------------


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


# ---- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda b, i, x: b.float(), (0, 1)),
        (lambda b, i, x: (1 - b.float()) * -1e4, (-1e4, 0)),
        (lambda b, i, x: b.float() / -2 + 3, (2.5, 3)),
        (lambda b, i, x: -(b.float() - 2), (1, 2)),
        (lambda b, i, x: i.to(torch.int8).float(), (-128, 127)),
        (lambda b, i, x: torch.where(b, 2.0, -3.0), (-3, 2)),
        (lambda b, i, x: b.float().masked_fill(b, -7.0), (-7, 1)),
        (lambda b, i, x: torch.sigmoid(x) * 16, (0, 16)),
        (lambda b, i, x: torch.tanh(x)[:, None].expand(2, 4, 2).transpose(0, 1), (-1, 1)),
        (lambda b, i, x: (b.float() - 3).triu(), (-3, 0)),
        (lambda b, i, x: F.embedding(i, torch.tensor([[1.0], [5.0], [-2.0]])), (-2, 5)),
        (lambda b, i, x: x + 0, None),
        (lambda b, i, x: torch.where(b, x, x), None),
        (lambda b, i, x: torch.where(b, 0.0, -INF), None),
        (lambda b, i, x: b.float() * x, None),
        (lambda b, i, x: torch.add(b.float(), b.float(), alpha=2), None),
        (lambda b, i, x: 1 / b.float(), None),
        (lambda b, i, x: b.float() / b.float(), None),
        (lambda b, i, x: i.float() * LOWEST, None),
        (lambda b, i, x: i.half() + 0, None),
        (lambda b, i, x: (b.float() * LOWEST + LOWEST) * 1, None),
        (lambda b, i, x: torch.complex(b.float(), b.float()), None),
        (lambda b, i, x: b.float() + torch.full((2, 2), math.nan), None),
    ],
)
def test_bounds_hold_for_every_input(model, wanted):
    inputs = (torch.tensor([[True, False]] * 2), torch.tensor([[0, 1]] * 2), torch.randn(2, 2))
    program = check((NORMALIZE, FoldConstants()), model, inputs).after
    found = bounds(Site(program, program.outputs[0]), program.outputs[0])
    assert found == wanted


def test_bounds_of_a_long_chain_are_given_up():
    """Python's stack has an end, which a chain of a thousand sums would reach."""

    def model(b):
        y = b.float()
        for _ in range(330):
            y = y * 0.5 + 0.25
        return y

    inputs = torch.tensor([True, False])
    program = capture(model, inputs)
    assert bounds(Site(program, program.outputs[0]), program.outputs[0]) is None


# ---- calls of the op --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (CAUSAL, True),
        (torch.full((L, L), -INF).triu(1)[None, None], True),
        ((1 - TRI).expand(B, 1, L, L) * LOWEST, True),
        (torch.ones(L, L, dtype=torch.bool), False),
        (torch.zeros(B, 1, 1, L), False),
    ],
)
def test_a_mask_of_the_op_that_a_flag_can_say_goes(mask, causal):
    model = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    said = op_of(check_fires(attention.plain_mask, model, (Q, KEY, V)))
    assert (said["attn_mask"], said["is_causal"]) == (None, causal)


@pytest.mark.parametrize(
    "mask",
    [
        WINDOW,
        CAUSAL.flip(0),
        torch.ones(L, L).tril(-1).bool(),
        torch.full((L, L), -100.0).triu(1),
        torch.full((L, L), -INF).triu(1) + 0.5,
        torch.full((L, L), math.nan),
        torch.stack([CAUSAL, ~CAUSAL | CAUSAL])[:, None],
        torch.tensor([[True] * 4 + [False]]),
    ],
)
def test_other_masks_of_the_op_stay(mask):
    model = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    check_declines(attention.plain_mask, model, (Q, KEY, V))


def test_a_square_mask_of_fewer_rows_than_columns_stays():
    mask = torch.ones(3, L).tril().bool()
    check_declines(
        attention.plain_mask, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), (Q[:, :, :3], KEY, V)
    )


def test_a_computed_mask_of_the_op_stays():
    check_declines(attention.plain_mask, F.scaled_dot_product_attention, (Q, KEY, V, BIAS.expand(B, H, L, L)))


def repeated(x, times=2):
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)


WIDE = values(B, 2 * H, L, D)


@pytest.mark.parametrize(
    "repeat", [repeated, lambda x: x.repeat_interleave(2, 1), lambda x: x.repeat_interleave(2, -3)]
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": BIAS.repeat(2, 1, 1), "scale": 0.3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_heads_are_groups(repeat, options, dtype):
    options = {name: o.to(dtype) if isinstance(o, torch.Tensor) else o for name, o in options.items()}

    def model(q, k, v):
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), **options)

    found = check_fires(attention.grouped_heads, model, tuple(t.to(dtype) for t in (WIDE, KEY, V)))
    said = op_of(found)
    assert said["enable_gqa"]
    assert said["key"].meta["val"].shape == (B, H, L, D)


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), torch.cat([v, v], 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v[:, :1], 6)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], k.repeat_interleave(1, 1), v.repeat_interleave(1, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)),
        lambda q, k, v: F.scaled_dot_product_attention(
            q[0], k[0].repeat_interleave(2, 0), v[0].repeat_interleave(2, 0)
        ),
    ],
)
def test_other_repeats_stay(model):
    check_declines(attention.grouped_heads, model, (WIDE, KEY, V))


# ---- copies -----------------------------------------------------------------------------------------------


def clone(x):
    return aten.clone.default(x, memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (lambda x: clone(x + 1).transpose(1, 2).reshape(B, L, H * D), ["add.Tensor", "permute", "reshape"]),
        (lambda x: clone(x + 1).transpose(1, 2).contiguous() * 2, ["add.Tensor", "permute", "clone", "mul.Tensor"]),
        (lambda x: clone(clone(x.transpose(1, 2))) * 2, ["permute", "clone", "mul.Tensor"]),
        (lambda x: clone(clone(x.transpose(1, 2)).transpose(1, 2)) * 2, ["permute", "permute", "mul.Tensor"]),
        (lambda x: aten.view.default(clone(x.transpose(1, 2)), [B, L, -1]) * 2, ["permute", "reshape", "mul.Tensor"]),
    ],
)
def test_a_copy_before_a_copy_goes(model, ops):
    found = check((NORMALIZE, RulePass("copies", (attention.copy_before_copy,))), model, Q)
    assert [op.replace("contiguous", "clone") for op in found.ops] == ops
    assert found.after.numerics == 0


@pytest.mark.parametrize(
    "model",
    [
        lambda x: clone(x.transpose(1, 2)).transpose(1, 2) * 2,
        lambda x: clone(x.transpose(1, 2)).view(2, 5, 2, 6) * 2,
        lambda x: ((y := clone(x.transpose(1, 2))).reshape(B, L, H * D), y + 1),
    ],
)
def test_a_copy_that_is_needed_stays(model):
    found = check((NORMALIZE, RulePass("copies", (attention.copy_before_copy,))), model, Q)
    assert any(op in found.ops for op in ("clone", "contiguous", "reshape"))
    assert not found.declined & {("copy_before_copy", OTHER_LAYOUT)}


def test_a_copy_that_keeps_an_output_apart_stays():
    found = check(attention.copy_before_copy, lambda x: clone(clone(x).reshape(B, -1)), Q)
    assert ("copy_before_copy", NEW_ALIAS) in found.declined or "clone" in found.ops


# ---- blocks, as people write them -------------------------------------------------------------------------


class HandLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.g, self.b, self.eps = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width)), eps

    def forward(self, x):
        m = x.mean(-1, keepdim=True)
        return self.g * (x - m) / torch.sqrt(((x - m) ** 2).mean(-1, keepdim=True) + self.eps) + self.b


class HandRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def hand_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinGPT(nn.Module):
    """A decoder block: one projection, a causal buffer, dropouts, a GELU by hand."""

    def __init__(self, width=16, heads=4, length=8):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln_1, self.ln_2 = HandLayerNorm(width), HandLayerNorm(width)
        self.fc, self.proj, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.heads = heads

    def attend(self, x):
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.drop(self.proj(hand_gelu(self.fc(self.ln_2(x)))))


class Vit(nn.Module):
    """Patches by a convolution, a class token, packed q, k, v, a GELU with erf."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.patch, self.heads = nn.Conv2d(3, width, 4, 4), heads
        self.token, self.pos = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        self.norm1, self.norm2 = HandLayerNorm(width, 1e-6), HandLayerNorm(width, 1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.pos
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = ((q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.out((att @ v).transpose(1, 2).reshape(b, n, c))
        h = self.fc1(self.norm2(x))
        return (x + self.fc2(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))))[:, 0]


class Einops(nn.Module):
    """Attention by einsum, patches that stay permuted."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.patch, self.heads, self.norm = nn.Conv2d(3, width, 4, 4), heads, HandLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        q, k, v = (part.view(b, n, self.heads, -1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        att = (torch.einsum("bihd,bjhd->bhij", q, k) * (c // self.heads) ** -0.5).softmax(-1)
        return x + self.out(F.gelu(torch.einsum("bhij,bjhd->bihd", att, v).reshape(b, n, c)))


class Swin(nn.Module):
    """Shifted windows, a table of relative positions, a mask of -100 for each window."""

    def __init__(self, width=12, heads=3, window=2, size=4):
        super().__init__()
        self.window, self.heads, self.shift = window, heads, window // 2
        self.norm, self.qkv, self.proj = HandLayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", offset[..., 0] * (2 * window - 1) + offset[..., 1])
        image, count = torch.zeros(1, size, size, 1), 0
        for rows in (slice(0, -window), slice(-window, -self.shift), slice(-self.shift, None)):
            for columns in (slice(0, -window), slice(-window, -self.shift), slice(-self.shift, None)):
                image[:, rows, columns], count = count, count + 1
        parts = self.split(image).view(-1, window * window)
        other = parts.unsqueeze(1) - parts.unsqueeze(2)
        self.register_buffer("mask", other.masked_fill(other != 0, -100.0))

    def split(self, x):
        b, h, w, c = x.shape
        n = self.window
        return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)

    def forward(self, x):
        b, _, _, c = x.shape
        x = self.split(torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)))
        n, windows = x.shape[1], self.mask.shape[0]
        qkv = self.qkv(x).reshape(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        att = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        att = att + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        att = att.view(b, windows, self.heads, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
        att = att.view(-1, self.heads, n, n).softmax(dim=-1)
        return F.gelu(self.proj((att @ v).transpose(1, 2).reshape(-1, n, c)))


class Llama(nn.Module):
    """Rotary positions, fewer key heads, scores in float32, a mask of the lowest number, SwiGLU by hand."""

    def __init__(self, width=32, heads=4, groups=2, length=6):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.width, bias=False) for _ in range(2))
        self.norm1, self.norm2 = HandRMSNorm(width), HandRMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, self.width, 2) / self.width))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-b, a], -1) * self.sin.to(x.dtype)

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (repeated(part, self.heads // self.groups) for part in (k, v))
        mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        att = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.width) + mask
        att = F.softmax(att, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o(torch.matmul(att, v).transpose(1, 2).contiguous().reshape(b, t, c))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        h = self.norm2(x)
        gate = self.gate(h)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(h))


class Alibi(nn.Module):
    """Merged heads and bmm, slopes instead of positions."""

    def __init__(self, width=16, heads=4, length=6):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = HandLayerNorm(width)
        slopes = torch.tensor([2.0**-i for i in range(1, heads + 1)])
        position = torch.arange(length)
        self.register_buffer("alibi", slopes[:, None, None] * (position[None] - position[:, None]).float())

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.reshape(b, t, self.heads, -1).transpose(1, 2).reshape(b * self.heads, t, -1)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        att = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(c // self.heads)).view(b, self.heads, t, t) + self.alibi
        att = att.masked_fill(torch.triu(torch.ones(t, t, dtype=torch.bool), 1), float("-inf")).softmax(-1)
        y = torch.bmm(att.view(b * self.heads, t, t), v).view(b, self.heads, t, -1)
        return hand_gelu(self.out(y.transpose(1, 2).reshape(b, t, c)))


class Annotated(nn.Module):
    """The encoder of many tutorials: four projections, a mask that is an input."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.heads, self.norm = heads, HandLayerNorm(width)

    def forward(self, x, mask):
        b, h = x.size(0), self.norm(x)
        q, k, v = (layer(h).view(b, -1, self.heads, 4).transpose(1, 2) for layer in self.layers[:3])
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        p = scores.masked_fill(mask[:, None, None] == 0, -1e9).softmax(dim=-1)
        y = torch.matmul(p, v).transpose(1, 2).contiguous().view(b, -1, 16)
        return x + F.gelu(self.layers[3](y))


TOKENS = values(2, 6, 16)
BLOCKS = {
    "minGPT": (MinGPT, TOKENS, {"layer_norm": 2, "gelu": 1, "linear": 4}, ["is_causal"]),
    "ViT": (Vit, values(2, 3, 8, 8), {"layer_norm": 2, "gelu": 1, "linear": 4, "conv2d": 1}, []),
    "einsum": (Einops, values(2, 3, 8, 8), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "Swin, one image": (Swin, values(1, 4, 4, 12), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "Swin, two images": (Swin, values(2, 4, 4, 12), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "LLaMA": (Llama, values(2, 6, 32), {"rms_norm": 2, "silu": 1, "linear": 7}, ["is_causal", "enable_gqa"]),
    "ALiBi": (Alibi, TOKENS, {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "annotated": (
        Annotated,
        (TOKENS, torch.tensor([[1, 1, 1, 1, 0, 0], [0] * 6])),
        {"layer_norm": 1, "gelu": 1, "linear": 4},
        [],
    ),
}  # fmt: skip
GONE = {
    "softmax.int",
    "matmul",
    "bmm",
    "einsum",
    "mean.dim",
    "erf",
    "tanh",
    "sigmoid",
    "rsqrt",
    "sqrt",
    "clone",
    "contiguous",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_ends_with_one_op_each(name):
    torch.manual_seed(0)
    block, example, wanted, flags = BLOCKS[name]
    found = check(
        (*STANDARD[:4], SIMPLIFY, *STANDARD[5:]), block().eval(), example
    )  # layers of one input are merged later
    said = op_of(found)
    assert [flag for flag in ("is_causal", "enable_gqa") if said[flag]] == flags
    assert not GONE & set(found.ops), found.ops
    counts = Counter(found.ops)
    assert {op: counts[op] for op in wanted} == wanted


def test_a_block_in_bfloat16():
    torch.manual_seed(0)
    found = check(STANDARD, Llama().eval().bfloat16(), values(2, 6, 32).bfloat16())
    assert Counter(found.ops)["rms_norm"] == 2
    assert "to.dtype" not in found.ops


def test_every_rule_has_an_equation_and_another_name():
    assert len({item.name for item in attention.RULES}) == len(attention.RULES)
    assert all("->" in item.doc for item in attention.RULES)
