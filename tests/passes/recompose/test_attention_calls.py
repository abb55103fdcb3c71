"""Calls of the attention op, and the copies around them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.passes.helpers import RulePass, aten, check, check_declines, check_fires
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
    op_of,
    repeated,
    values,
)
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT
from tsopt.passes import CANONICALIZE
from tsopt.passes.recompose import attention

ATTENTION = (RulePass("attention", attention.RULES),)


# ---- calls of the op -----------------------------------------------------------------------------------------------


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


def test_a_mask_of_nothing_stays():
    mask = torch.ones(0, L, dtype=torch.bool)
    model = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    check_declines(attention.plain_mask, model, (Q[:, :, :0], KEY, V))


def test_a_computed_mask_of_the_op_stays():
    check_declines(attention.plain_mask, F.scaled_dot_product_attention, (Q, KEY, V, BIAS.expand(B, H, L, L)))


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


def _as_rows(x):
    """Each head's rows again below, where `repeated` has each head again."""
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, 2, n, d).reshape(b, h, 2 * n, d)


def _from_one_head(x):
    b, h, n, d = x.shape
    return x[:, :1, None].expand(b, h, 2, n, d).reshape(b, 2 * h, n, d)


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), torch.cat([v, v], 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q, torch.cat([k, k], 1), repeated(v)),
        lambda q, k, v: F.scaled_dot_product_attention(q, _from_one_head(k), _from_one_head(v)),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v[:, :1], 6)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], k.repeat_interleave(1, 1), v.repeat_interleave(1, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)),
        lambda q, k, v: F.scaled_dot_product_attention(
            q[0], k[0].repeat_interleave(2, 0), v[0].repeat_interleave(2, 0)
        ),
        lambda q, k, v: F.scaled_dot_product_attention(
            q[0], k[0].repeat_interleave(2, -3), v[0].repeat_interleave(2, -3)
        ),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], repeated(k, 1), repeated(v, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], _as_rows(k), _as_rows(v), is_causal=True),
    ],
)
def test_other_repeats_stay(model):
    assert check_declines(attention.grouped_heads, model, (WIDE, KEY, V)).declined == set()


# ---- copies --------------------------------------------------------------------------------------------------------


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
    found = check((CANONICALIZE, RulePass("copies", (attention.copy_before_copy,))), model, Q)
    assert [op.replace("contiguous", "clone") for op in found.ops] == ops
    assert found.after.numerics == 0


@pytest.mark.parametrize(
    "model",
    [
        lambda x: clone(x.transpose(1, 2)).transpose(1, 2) * 2,
        lambda x: clone(x.transpose(1, 2)).reshape(B, L, H, 2, D // 2) * 2,
        lambda x: ((y := clone(x.transpose(1, 2)).transpose(1, 2)).reshape(B, -1) * 2, y + 1),
        lambda x: ((y := clone(x.transpose(1, 2))).transpose(1, 2).reshape(B, -1) * 2, y + 1),
    ],
)
def test_a_copy_that_is_needed_stays(model):
    found = check((CANONICALIZE, RulePass("copies", (attention.copy_before_copy,))), model, Q)
    assert "copy_before_copy" not in found.done
    assert not found.declined & {("copy_before_copy", OTHER_LAYOUT)}


def test_a_copy_that_keeps_an_output_apart_stays():
    found = check(attention.copy_before_copy, lambda x: clone(clone(x).reshape(B, -1)), Q)
    assert ("copy_before_copy", NEW_ALIAS) in found.declined or "clone" in found.ops
