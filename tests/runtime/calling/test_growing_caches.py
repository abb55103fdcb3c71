"""Caches that grow with each call: one program serves all of their sizes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import OPTIONS, outcomes


class Decoder(nn.Module):
    """Attends to all steps so far, which it keeps in the dict that it is given."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        cache["k"], cache["v"] = k, v
        return self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


def test_a_cache_that_grows_is_captured_twice_at_most(wins):
    model = Decoder().eval()
    fast = tsopt.hybridize(model, audit=0, **OPTIONS | {"share_weights": False})
    with torch.no_grad():
        for prompt in (5, 3):
            mine, theirs = {}, {}
            for step in range(40):
                x = torch.randn(1, prompt if step == 0 else 1, 8)
                torch.testing.assert_close(fast(x, mine), model(x, theirs))
                torch.testing.assert_close(mine["k"], theirs["k"])
    compiled = type(fast)._tsopt_compiled.fast
    assert len(outcomes(compiled)) == 1


class Window(Decoder):
    """Keeps the last 7 steps, and counts all of them in Python, as sliding-window caches do."""

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache.seen:
            k, v = torch.cat([cache.k, k], 1), torch.cat([cache.v, v], 1)
        cache.all = torch.cat([cache.all, x], 1)
        first = cache.seen - 7 if cache.seen >= 8 else 0
        cache.k, cache.v, cache.seen = k[:, -7:], v[:, -7:], cache.seen + x.shape[1]
        place = torch.arange(first, first + k.shape[1])
        return self.out(torch.softmax(q @ k.transpose(1, 2) + place / 100, -1) @ v) + cache.all.mean(1, keepdim=True)


def window_cache():
    return SimpleNamespace(k=None, v=None, seen=0, all=torch.zeros(1, 1, 8))


@pytest.mark.slow
def test_a_cache_that_counts_its_steps_is_captured_once_for_each_of_its_conditions(wins):
    model = Window().eval()
    fast = tsopt.hybridize(model, audit=0, **OPTIONS | {"share_weights": False})
    with torch.no_grad():
        for steps in (40, 40, 60):
            mine, theirs = window_cache(), window_cache()
            for step in range(steps):
                x = torch.randn(1, 3 if step == 0 else 1, 8)
                torch.testing.assert_close(fast(x, mine), model(x, theirs))
                torch.testing.assert_close(mine.k, theirs.k)
                assert mine.seen == theirs.seen
    found = outcomes(type(fast)._tsopt_compiled.fast)
    assert [outcome for outcome in found if "1.." in outcome]
    assert len([outcome for outcome in found if ".." in outcome]) == 2


def test_loops_that_take_turns_and_caches_that_are_copied_or_cropped_are_right(wins):
    model = Window().eval()
    fast = tsopt.hybridize(model, audit=0, **OPTIONS | {"share_weights": False})
    pairs = [(window_cache(), window_cache()) for _ in range(2)]
    with torch.no_grad():
        for step in range(30):
            for number, (mine, theirs) in enumerate(pairs):
                x = torch.randn(1, 2 + number if step == 0 else 1, 8)
                torch.testing.assert_close(fast(x, mine), model(x, theirs))
                assert mine.seen == theirs.seen
            if step == 20:
                pairs = [tuple(copy.deepcopy(pair)) for pair in pairs]
            if step == 25:
                for cache in pairs[0]:
                    cache.k, cache.v, cache.seen = cache.k[:, :4], cache.v[:, :4], 4


def test_a_size_that_was_fixed_becomes_dynamic_with_the_others(wins):
    model = Decoder().eval()
    fast = tsopt.hybridize(model, audit=0, **OPTIONS | {"share_weights": False})
    with torch.no_grad():
        for rows in (1, 2, 3, 4):
            mine, theirs = {}, {}
            for step in range(12):
                x = torch.randn(rows, 3 if step == 0 else 1, 8)
                torch.testing.assert_close(fast(x, mine), model(x, theirs))
    found = outcomes(type(fast)._tsopt_compiled.fast)
    steps = [outcome for outcome in found if "cache_1" in outcome]
    assert len(steps) == 2
    assert "batch" not in steps[0]
    assert "batch" in steps[1]
