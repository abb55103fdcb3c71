"""Products with constant matrices as linear layers, and einsum as matmul."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import RulePass, aten, check, check_declines, check_fires, find, specials
from tsopt.compiler.rewriting.pipeline import weight_bytes
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT, USED_ELSEWHERE
from tsopt.passes import STANDARD
from tsopt.passes.constants import ABSORBS
from tsopt.passes.fold import FoldConstants
from tsopt.passes.recompose import linear

K, N = 3, 4
LINEAR = (RulePass("linear", linear.RULES),)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, W, B = values(2, 7, K), values(K, N, seed=1), values(N, seed=2)
T = W.t()
FULL, COLUMN, ONE, EXTRA = values(2, 7, N), values(7, 1), values(1), values(3, 1, 1, N)
WIDE, SEVEN, COUNTS = values(N, 7 * K), values(N, 7), torch.arange(K * N).view(K, N)
FIRST, COUNTED, FIVE = W[:, 0].clone(), COUNTS.view(N, K), values(1, 1, 1, 1, N)


class Layer(nn.Module):
    def __init__(self, form, dtype=torch.float32):
        super().__init__()
        self.form, self.w, self.b = form, nn.Parameter(W.to(dtype)), nn.Parameter(B.to(dtype))
        self.t = nn.Parameter(W.t().contiguous().to(dtype))

    def forward(self, x):
        return self.form(self, x)


FORMS = {
    "product": lambda m, x: x @ m.w,
    "transposed weight": lambda m, x: x @ m.t.t(),
    "with bias": lambda m, x: x @ m.w + m.b,
    "bias first": lambda m, x: m.b + torch.matmul(x, m.w),
    "transposed weight and bias": lambda m, x: x @ m.t.transpose(0, 1) + m.b,
    "bias with leading ones": lambda m, x: x @ m.w + m.b.view(1, 1, N),
    "Conv1D": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w).view(2, 7, N),
    "flat": lambda m, x: F.linear(x.reshape(-1, K), m.t, m.b).reshape(2, 7, N),
    "flat product": lambda m, x: (torch.mm(x.reshape(-1, K), m.w) + m.b).view(2, 7, N),
    "einsum": lambda m, x: torch.einsum("bld,dk->blk", x, m.w) + m.b,
    "einsum, transposed weight": lambda m, x: torch.einsum("bld,kd->blk", x, m.t),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_linear_layer(form):
    found = check(STANDARD, Layer(FORMS[form]), X, ["linear"])
    assert weight_bytes(found.after) <= weight_bytes(found.before), "a copy of a weight is stored"


@pytest.mark.parametrize("form", ["product", "Conv1D", "bias with leading ones"])
def test_the_parameters_are_the_memory_of_the_model(form):
    model = Layer(FORMS[form])
    found = check((FoldConstants(), *LINEAR), model, X, ["linear"])
    memory = {weight.data_ptr() for weight in found.after.weights.values()}
    assert memory <= {model.w.data_ptr(), model.b.data_ptr()}


def test_a_tied_weight_is_one_memory():
    """Used both ways round, as embedding and output of a language model are."""
    model = Layer(lambda m, x: F.linear(x @ m.t.t(), m.w))
    found = check(STANDARD, model, X, ["linear", "linear"])
    assert weight_bytes(found.after) == model.w.nbytes + model.t.nbytes
    twice = Layer(lambda m, x: F.linear(F.gelu(x @ m.w), m.w))
    found = check(STANDARD, twice, X, ["linear", "gelu", "linear"])
    assert weight_bytes(found.after) == twice.w.nbytes


@pytest.mark.sliced(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rule", "form", "shape"),
    [
        (linear.matmul_linear, "product", (2, 7, K)),
        (linear.matmul_linear, "product", (K,)),
        (linear.matmul_linear, "product", (0, K)),
        (linear.addmm_linear, lambda m, x: torch.addmm(m.b, x, m.w), (7, K)),
        (linear.addmm_linear, lambda m, x: torch.addmm(m.b, x, m.w), (1, K)),
        (linear.linear_bias, lambda m, x: F.linear(x, m.t) + m.b, (2, 7, K)),
        (linear.linear_bias, lambda m, x: m.b + F.linear(x, m.t), (K,)),
        (linear.reshape_linear, lambda m, x: F.linear(x.view(-1, K), m.t).view(2, 7, N), (2, 7, K)),
        (linear.reshape_linear, lambda m, x: F.linear(x.reshape(2, 7, K), m.t, m.b).reshape(14, N), (14, K)),
        (linear.linear_of_copy, lambda m, x: aten.linear.default(aten.clone.default(x), m.t), (2, K)),
    ],
)
def test_as_captured_in_every_dtype(rule, form, shape, dtype):
    model = Layer(FORMS[form] if isinstance(form, str) else form, dtype)
    hard = specials(*shape).clamp(-100, 100).to(dtype)
    check_fires(rule, model, values(*shape).to(dtype), ops=["linear"], also=[hard])


def test_a_mm_is_a_matmul():
    check_fires(linear.matmul_linear, Layer(lambda m, x: torch.mm(x, m.w)), X[0], ops=["linear"])


# ---- near misses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda x: x @ x.transpose(1, 2), X),
        (lambda x: x @ torch.ones(2, K, N), X),
        (lambda x: x @ torch.ones(K), X),
        (lambda x: torch.ones(2, 7) @ x, X),
        (lambda x: x @ COUNTS, torch.arange(6).view(2, K)),
        (lambda x: x @ torch.ones(K, N, dtype=torch.complex64), X.to(torch.complex64)),
    ],
)
def test_products_with_anything_else_stay(model, x):
    found = check((*STANDARD[:4], RulePass("linear", (linear.matmul_linear,))), model, x)
    assert "matmul_linear" not in {*found.done, *(name for name, _ in found.declined)}


def test_a_transposed_matrix_of_whole_numbers_stays():
    check_declines(linear.matmul_linear, lambda x: x @ COUNTED.t(), torch.arange(6).view(2, K))


@pytest.mark.parametrize(
    "form",
    [
        lambda m, x: torch.addmm(m.b, x, m.w, beta=2),
        lambda m, x: torch.addmm(m.b, x, m.w, alpha=0.5),
        lambda m, x: torch.addmm(x[:, :1], x, m.w),
        lambda m, x: torch.addmm(m.b[:1], x, m.w),
        lambda m, x: torch.addmm(m.b, x, x[:K].relu() @ m.w),
    ],
)
def test_other_sums_of_products_stay(form):
    found = check(LINEAR, Layer(form), X[0])
    assert "addmm_linear" not in found.done


@pytest.mark.parametrize(
    "model",
    [
        lambda x: F.linear(x, T) + FULL,
        lambda x: F.linear(x, T) + COLUMN,
        lambda x: F.linear(x, T) + ONE,
        lambda x: F.linear(x, T) + x[..., :1],
        lambda x: F.linear(x, T, B) + B,
        lambda x: torch.add(F.linear(x, T), B, alpha=2),
        lambda x: F.linear(x, FIRST) + COLUMN[:, 0],
        lambda x: F.linear(x, T) + EXTRA,
        lambda x: F.linear(x, T) + FIVE,
        lambda x: F.linear(x[:, :K], FIRST) + FIRST,
        lambda x: F.linear(x, T) + B.double(),
        lambda x: (y := F.linear(x, T)) + y,
    ],
)
def test_other_terms_stay(model):
    check_declines(linear.linear_bias, model, X)


@pytest.mark.parametrize(("dtype", "term"), [(torch.float32, 1.5 * 2**23), (torch.float16, 1536.0)], ids=str)
def test_a_term_that_rounds_on_purpose_stays(dtype, term):
    """As a bias, it may round each product that the layer adds up."""
    k, weight = torch.full((N,), term, dtype=dtype), T.to(dtype)
    check_declines(linear.linear_bias, lambda x: (F.linear(x, weight) + k) - k, X.to(dtype), ABSORBS)


def test_a_product_that_is_returned_too_keeps_its_term():
    def model(x):
        y = F.linear(x, T)
        return y + B, y

    check_declines(linear.linear_bias, model, X, USED_ELSEWHERE)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: F.linear(x.view(-1, K), T).view(7, 2, N),
        lambda x: F.linear(x.view(2, 7 * K), WIDE).view(2, 2, 2),
        lambda x: F.linear(x.view(14, K), T).view(2, 7 * N),
        lambda x: F.linear(x.view(14, K), FIRST).view(2, 7),
    ],
)
def test_other_reshapes_stay(model):
    assert not check_declines(linear.reshape_linear, model, X).declined


def test_a_flat_product_that_is_returned_too_stays():
    def model(x):
        y = F.linear(x.view(-1, K), T)
        return y.view(2, 7, N).relu(), y

    check_declines(linear.reshape_linear, model, X, USED_ELSEWHERE)


def test_a_copy_that_brings_a_value_in_order_stays():
    """The layer would copy it itself, and add its bias in a pass of its own."""
    check_declines(
        linear.linear_of_copy,
        lambda x: F.linear(aten.clone.default(x.transpose(0, 1).relu(), memory_format=torch.contiguous_format), T, B),
        X,
    )


def test_a_copy_into_another_layout_goes():
    def model(x):
        y = aten.clone.default(x.relu().transpose(1, 2), memory_format=torch.contiguous_format)
        return F.linear(y.transpose(1, 2), T, B)

    check_fires(linear.linear_of_copy, model, X, ops=["relu", "linear"])


def test_a_copy_that_moves_stays():
    def model(x):
        y = aten.clone.default(x.transpose(1, 2), memory_format=torch.contiguous_format)
        return F.linear(y.transpose(0, 1), SEVEN)

    check_declines(linear.linear_of_copy, model, X)


# ---- einsum -----------------------------------------------------------------------------------------------

Q, R = values(2, 5, 3, 4), values(2, 6, 3, 4, seed=1)


@pytest.mark.parametrize(
    ("text", "a", "b"),
    [
        ("bqhd,bkhd->bhqk", Q, R),
        ("bqhd, bkhd -> bhqk", Q, R),
        ("bqhd,bkhd->bhkq", Q, R),
        ("abij,abjk->abik", Q, values(2, 5, 4, 2)),
        ("bhij,bjhd->bihd", values(2, 3, 5, 6), R),
        ("ij,jk->ik", Q[0, 0], values(4, 2)),
        ("ij,kj->ki", Q[0, 0], values(2, 4)),
        ("abci,ik->abck", Q, values(4, 2)),
        ("i,ik->k", Q[0, 0, 0], values(4, 2)),
        ("abij,abjk->abik", Q[:0], values(2, 5, 4, 2)[:0]),
        ("abij,abjk->abik", Q, values(1, 5, 4, 2)),
    ],
)
def test_a_product_over_one_axis_is_a_matmul(text, a, b):
    found = check(linear.einsum_matmul, lambda a, b: torch.einsum(text, a, b), (a, b))
    assert "einsum" not in found.ops or ("einsum_matmul", OTHER_LAYOUT) in found.declined
    assert "matmul" in found.ops


@pytest.mark.parametrize(
    ("text", "tensors"),
    [
        ("ij->ji", (Q[0, 0],)),
        ("ij,jk,kl->il", (Q[0, 0], values(4, 2), values(2, 3))),
        ("ij,jk", (Q[0, 0], values(4, 2))),
        ("j,j", (Q[0, 0, 0], values(4))),
        ("j,ji", (Q[0, 0, 0], values(4, 2))),
        ("...ij,jk->...ik", (Q, values(4, 2))),
        ("ii,ij->ij", (values(3, 3), values(3, 2))),
        ("ij,ij->ij", (Q[0, 0], Q[0, 1])),
        ("ij,ij->i", (Q[0, 0], Q[0, 1])),
        ("ij,ij->", (Q[0, 0], Q[0, 1])),
        ("ij,kl->ik", (Q[0, 0], R[0, 0])),
        ("aij,jk->ik", (Q[0], values(4, 2))),
        ("ij,k->ik", (Q[0, 0], values(2))),
        ("iij,jk->ik", (values(3, 3, 4), values(4, 2))),
        ("ij,jkl->ikl", (Q[0, 0], values(4, 2, 3))),
        ("abij,bjk->abik", (Q, values(5, 4, 2))),
        ("abij,bjk->abik", (values(3, 3, 2, 4), values(3, 4, 2))),
        ("ij,jk->ik", (Q[0, 0], values(1, 2))),
        ("i,j->ij", (values(3), values(2))),
    ],
)
def test_other_sums_stay(text, tensors):
    assert not check_declines(linear.einsum_matmul, lambda *tensors: torch.einsum(text, *tensors), tensors).declined


def test_an_einsum_keeps_its_layout():
    found = check(linear.einsum_matmul, lambda a, b: torch.einsum("bhij,bjhd->bihd", a, b), (values(2, 3, 5, 6), R))
    assert find(found.after, "matmul") is not None
    assert not found.after.outputs[0].meta["val"].is_contiguous()


def test_every_rule_has_an_equation():
    assert all("->" in item.doc for item in linear.RULES)
