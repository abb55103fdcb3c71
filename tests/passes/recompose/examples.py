"""Attention as the tests write it: queries, keys and values, masks, and what was made of them."""

from __future__ import annotations

import math
from collections import Counter

import torch

from tests.passes.helpers import find
from tsopt.compiler.graph.ops import bind

INF, LOWEST = math.inf, torch.finfo(torch.float32).min
B, H, L, D = 2, 3, 5, 4


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


BIAS, WINDOW = values(H, L, L, seed=7), CAUSAL & ~torch.ones(L, L).tril(-2).bool()


def repeated(x, times=2):
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)
