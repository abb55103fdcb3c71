"""The process-wide settings that a hybrid was compiled under."""

from __future__ import annotations

import pytest
import torch

from tests.forks import FORKS, in_a_fork
from tsopt.runtime.calling.settings import Settings


@FORKS
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fork_is_renumbered_only_where_nothing_was_compiled_for_another_number(torch_threads, compiled):
    torch_threads(2)
    settings = Settings(follows_threads=True)

    def was_renumbered():
        torch.set_num_threads(1)
        return settings.was_renumbered(compiled=compiled)

    assert in_a_fork(was_renumbered) is not compiled
    assert not settings.was_renumbered(compiled=True)
    torch_threads(1)
    assert settings.was_renumbered(compiled=True)
