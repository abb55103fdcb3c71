"""The process-wide settings that a hybrid was compiled under."""

from __future__ import annotations

import torch

from tests.forks import FORKS, in_a_fork
from tsopt.runtime.calling.settings import Settings


@FORKS
def test_a_fork_is_never_renumbered(torch_threads):
    torch_threads(2)
    settings = Settings(follows_threads=True)

    def was_renumbered():
        torch.set_num_threads(1)
        return settings.was_renumbered()

    assert not in_a_fork(was_renumbered)
    assert not settings.was_renumbered()
    torch_threads(1)
    assert settings.was_renumbered()
