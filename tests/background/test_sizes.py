"""`hybridize(background=True)` for calls of many sizes: one program for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, reports


def rows_of(rows):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def test_calls_that_differ_in_their_sizes_get_one_program_for_all(monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(rows_of(4))  # a job for this size
    tsopt.wait(net)
    net(rows_of(9))  # and one for both, and those between
    tsopt.wait(net)
    assert [report.sizes for report in reports(net)] == ["", "batch: 1..18, checked at 1, 2, 7, 18"]
    wanted = {rows: Net().eval().layers(rows_of(rows)) for rows in (2, 6, 9, 18)}
    monkeypatch.setattr(nn.functional, "gelu", None)
    for rows, found in wanted.items():
        torch.testing.assert_close(net(rows_of(rows)), found)


@pytest.mark.slow
def test_a_call_that_the_program_for_its_sizes_refuses_is_left_to_the_model():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    for rows in (4, 9):
        net(rows_of(rows))
        tsopt.wait(net)
    twice = rows_of(9).repeat(1, 2)[:, ::2]  # of other strides
    for _ in range(3):
        torch.testing.assert_close(net(twice), Net().eval().layers(twice))
        assert tsopt.wait(net)
    assert len(reports(net)) <= 3, "no job is begun again and again"


class Cache:
    def __init__(self):
        self.rows, self.seen = torch.zeros(2, 16), 2


class Step(Net):
    """Its cache grows by a row with each call, and counts the rows."""

    def forward(self, x, cache):
        cache.rows, cache.seen = torch.cat([cache.rows, self.layers(x)]), cache.seen + 1
        return x + cache.rows.mean(0), cache.seen


@pytest.mark.slow
def test_a_cache_that_grows_while_a_job_is_running_is_compiled_for_many_sizes(monkeypatch):
    net, eager = tsopt.hybridize(Step().eval(), **QUICK), Step().eval()
    x, mine = rows_of(1), Cache()
    for _ in range(5):  # a job for the first size, which never comes again; the others are seen meanwhile
        net(x, mine)
    tsopt.wait(net)
    net(x, mine)
    tsopt.wait(net)
    assert len(reports(net)) == 2
    theirs = Cache()
    for _ in range(6):
        eager(x, theirs)
    wanted = [eager(x, theirs) for _ in range(3)]
    monkeypatch.setattr(nn.functional, "gelu", None)
    for value, count in wanted:
        found = net(x, mine)
        torch.testing.assert_close(found[0], value)
        assert found[1] == count == mine.seen
    torch.testing.assert_close(mine.rows, theirs.rows)


@pytest.mark.slow
def test_where_no_program_serves_two_sizes_each_that_comes_again_gets_its_own():
    class BySize(Net):
        def forward(self, x):
            return self.layers(x) * float(str(x.shape[0]))  # nothing that a program could follow

    net = tsopt.hybridize(BySize().eval(), **QUICK)
    for rows in (4, 9, 9, 9):
        net(rows_of(rows))
        tsopt.wait(net)
    assert [report.winner for report in reports(net)][-1] == "TorchScript"
    torch.testing.assert_close(net(rows_of(9)), BySize().eval()(rows_of(9)))
    assert net(rows_of(5)).shape == (5, 16)
