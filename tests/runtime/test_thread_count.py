"""Torch with another number of threads for a while."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.thread_count import torch_threads as computing_with


@pytest.mark.parametrize(("asked_for", "inside"), [(3, 3), (2, 2), (None, 2)])
def test_the_number_of_torch_is_put_back_whatever_has_changed_it(torch_threads, asked_for, inside):
    torch_threads(2)
    with computing_with(asked_for):
        assert torch.get_num_threads() == inside
        torch.set_num_threads(4)
    assert torch.get_num_threads() == 2
