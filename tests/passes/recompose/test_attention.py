"""Attention that is written out as one op."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.passes.helpers import RulePass, call, check, check_declines, check_fires, find, specials
from tests.passes.recompose.examples import (
    INF,
    KEY,
    B,
    D,
    H,
    L,
    Q,
    V,
    masked,
    op_of,
    plain,
    values,
)
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import STANDARD, DeadCode
from tsopt.passes.recompose import attention

ATTENTION = (RulePass("attention", attention.RULES),)


# ---- the formula ---------------------------------------------------------------------------------------------------

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


def test_a_scale_near_the_default_one_is_said_in_float64():
    inputs = tuple(t.double() for t in (Q, KEY, V))
    model = lambda q, k, v: (q @ k.mT * 0.5000001).softmax(-1) @ v  # noqa: E731
    assert op_of(check_fires(attention.attention, model, inputs))["scale"] == 0.5000001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: (q @ k.mT / 2).bfloat16().to(v.dtype).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT / 2).softmax(-1).half().to(v.dtype) @ v,
        lambda q, k, v: (q.half() @ k.half().mT / 2).to(v.dtype).softmax(-1) @ v,
    ],
    ids=["scores", "weights", "queries"],
)
def test_casts_that_lose_digits_of_the_values_stay(model, dtype):
    found = check((DeadCode(), *ATTENTION), model, tuple(t.to(dtype) for t in (Q, KEY, V)))
    assert "attention" not in found.done


def test_a_softmax_in_float32_between_values_of_float64_stays():
    model = lambda q, k, v: F.softmax(q @ k.mT / 2, -1, dtype=torch.float32).double() @ v  # noqa: E731
    found = check((DeadCode(), *ATTENTION), model, tuple(t.double() for t in (Q, KEY, V)))
    assert "attention" not in found.done


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


def test_a_fill_without_a_number_stays():
    nothing = torch.zeros(0)
    model = masked(lambda s: torch.where(s > 0, s, nothing))
    check_declines(attention.attention, model, tuple(torch.zeros(B, 0, D) for _ in range(3)))


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


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 0, 3, 2)], ids=str)
def test_values_from_the_left_of_another_product_stay(axes):
    """Where batch and heads are as many, nothing but the order of the axes tells."""

    def model(q, k, v):
        return v @ torch.softmax(q @ k.mT, -1).permute(axes)

    check_declines(attention.attention_transposed, model, (values(2, 2, L, D), values(2, 2, L, D), values(2, 2, D, L)))


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


def test_several_scales_for_each_head_are_all_taken_by_the_query():
    scale, gate = values(H, 1, 1).exp(), values(B, H, 1, 1, seed=1)

    def model(q, k, v):
        return ((q @ k.mT) * scale * 0.5 * gate).softmax(-1) @ v

    op_of(check(ATTENTION, model, (Q, KEY, V)))
    op_of(check(STANDARD, model, (Q, KEY, V)))


def test_a_scale_for_each_column_stays():
    """Also where there are as many columns as a query is wide."""
    inputs = tuple(values(B, H, D, D, seed=seed) for seed in range(3))
    check_declines(attention.attention, masked(lambda s: s * torch.arange(1.0, D + 1)), inputs)


# ---- near misses ---------------------------------------------------------------------------------------------------

KEYS, TWO = values(7, D, seed=3), torch.tensor([2.0])


def _far(x):
    """A chain of sums would be searched both ways at each of its steps, so that there is an end to it."""
    for _ in range(20):
        x = x * 1.01
    return x


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
    "over the scores": lambda q, k, v: (TWO / (q @ k.mT)).softmax(-1) @ v,
    "scores times scores": lambda q, k, v: ((q @ k.mT) * (k @ q.mT)).softmax(-1) @ v,
    "scores in whole numbers": lambda q, k, v: (q @ k.mT).long().float().softmax(-1) @ v,
    "keys with a bias": lambda q, k, v: F.linear(q[0, 0], KEYS, torch.arange(7.0)).softmax(-1) @ KEYS,
    "one query for each batch": lambda q, k, v: (q[0, 0, 0] @ k[0].mT).softmax(-1) @ v[0, 0],
    "a number for each row": lambda q, k, v: (q[0] @ k[0, 0, 0]).softmax(-1) @ v[0, 0],
    "a number for each row, linear": lambda q, k, v: F.linear(q[0], KEYS[0]).softmax(-1) @ v[0, 0],
    "far from the softmax": lambda q, k, v: _far(q @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    found = check((DeadCode(), *ATTENTION), NEAR[name], (Q, KEY, V))  # the first takes the checks that export puts in
    assert not {"attention", "attention_transposed"} & found.done


def test_scores_of_integers_are_no_near_miss():
    def model(q, k, v):
        return (q.long() @ k.long().mT).float().softmax(-1) @ v

    found = check((DeadCode(), *ATTENTION), model, (Q, KEY, V))
    assert "attention" not in found.done
    assert found.declined == set()


def test_values_of_another_width_stay():
    """No kernel takes them; the op would be slower than the formula."""
    check_declines(attention.attention, plain, (Q, KEY, values(B, H, L, 6)), attention.OTHER_WIDTH)


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: (q @ k.mT).softmax(-1).to(v.dtype) @ v,
        lambda q, k, v: (q.to(v.dtype).float() @ k.transpose(-1, -2)).softmax(-1).to(v.dtype) @ v,
        lambda q, k, v: (q @ k.to(v.dtype).float().transpose(-1, -2)).softmax(-1).to(v.dtype) @ v,
        lambda q, k, v: (q @ k.mT).softmax(-1).long() @ v.long(),
    ],
    ids=["both", "keys", "queries", "whole numbers"],
)
def test_queries_or_keys_of_another_dtype_stay(model):
    check_declines(attention.attention, model, (Q, KEY, V.bfloat16()), attention.MIXED_DTYPES)


@pytest.mark.parametrize("shape", [(L, D), (1, L, D), (B, 1, L, D)], ids=str)
def test_values_with_more_batches_than_the_weights_stay(shape):
    q, k = values(*shape), values(*shape)
    check_declines(attention.attention, plain, (q, k, values(B, H, L, D)), attention.MORE_VALUES)


def test_a_vector_of_values_stays():
    """As long as the queries are wide."""
    inputs = (values(D, D), values(D, D), values(D))
    check_declines(attention.attention, plain, inputs)
    found = check_declines(
        attention.attention_transposed, lambda q, k, v: v @ (q @ k.mT).softmax(-1).permute(1, 0), inputs
    )
    assert found.declined == set()


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


def test_a_query_that_is_a_product_of_values_is_the_query():
    found = check_fires(attention.attention, lambda q, k, v: ((q * v) @ k.mT).softmax(-1) @ v, (Q, KEY, V))
    assert found.ops.count("mul.Tensor") == 1


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


def test_every_rule_has_an_equation_and_another_name():
    assert len({item.name for item in attention.RULES}) == len(attention.RULES)
    assert all("->" in item.doc for item in attention.RULES)
