"""Whole loops of a decoder: beams that are reordered, weights that change on the way, loops in several threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.racing.helpers import fast_timings

OPTIONS = {"backends": ("onnxruntime", "eager"), "seconds": 0.05, "isolate": False, "cache": False}


class Decoder(nn.Module):
    """Attends to all tokens so far, which it keeps in the dict that it is given."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, tokens, cache):
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        cache["k"], cache["v"] = k, v
        return self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


@pytest.fixture
def decoder():
    torch.manual_seed(3)
    return Decoder().eval()


@pytest.fixture
def hybrid(decoder, monkeypatch):
    """Compiled, whatever was measured."""
    fast_timings(monkeypatch, wins="ONNX Runtime")
    monkeypatch.setattr("tsopt.runtime.racing.preparation.HOPELESS", 1e9)
    return tsopt.hybridize(decoder, audit=0, **OPTIONS)


@pytest.fixture
def eager(decoder):
    """The same weights, in a model of its own."""
    model = Decoder().eval()
    model.load_state_dict(decoder.state_dict())
    return model


def compiled_calls(hybrid):
    report = tsopt.report(hybrid)
    return report.calls - sum(report.in_eager.values())


@torch.no_grad()
def beam_search(model, prompt, beams=3, steps=12):
    """Sequences and their scores; the cache is reordered after each step, in place, as the beams are."""
    cache = {}
    tokens = prompt.repeat(beams, 1)
    scores = torch.tensor([0.0] + [-1e9] * (beams - 1))
    given = tokens
    for _ in range(steps):
        likely = torch.log_softmax(model(given, cache)[:, -1], -1) + scores[:, None]
        scores, places = likely.reshape(-1).topk(beams)
        of, token = places // 20, places % 20
        tokens, given = torch.cat([tokens[of], token[:, None]], 1), token[:, None]
        for key in cache:
            cache[key] = cache[key].index_select(0, of)
    return tokens, scores


def test_beams_are_those_of_the_model(hybrid, eager):
    for length in (3, 5):
        prompt = torch.arange(length)[None]
        mine, theirs = beam_search(hybrid, prompt), beam_search(eager, prompt)
        assert torch.equal(mine[0], theirs[0])
        torch.testing.assert_close(mine[1], theirs[1])
    assert compiled_calls(hybrid) > 12


@pytest.mark.sliced(1)
@pytest.mark.parametrize("how", ["in place", "loaded", "replaced"])
def test_weights_that_change_between_two_steps_count_from_the_next_one(hybrid, eager, how):
    mine, theirs = {}, {}
    with torch.no_grad():
        for step in range(12):
            if step == 7:
                for model in (hybrid, eager):
                    if how == "in place":
                        model.out.weight.mul_(2)
                    elif how == "loaded":
                        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
                    else:
                        model.out.weight = nn.Parameter(model.out.weight * 3)
            token = torch.tensor([[step]])
            torch.testing.assert_close(hybrid(token, mine), eager(token, theirs))


def test_loops_in_several_threads_are_right(hybrid, eager):
    """All of them begin before anything is compiled."""
    start, wrong = threading.Barrier(4), []

    def loop(number):
        mine, theirs = {}, {}
        start.wait()
        try:
            with torch.no_grad():
                for step in range(25):
                    token = torch.tensor([[(number + step) % 20]])
                    torch.testing.assert_close(hybrid(token, mine), eager(token, theirs))
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong
    assert compiled_calls(hybrid) > 0
