"""What is asked in a fork of the process that tests."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import pytest

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
PATIENCE = 60  # seconds, for what would wait forever


def in_a_fork(check: Callable[[], object]) -> bool:
    """Whether a check passes in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch, which the child does not need
        child = os.fork()
    if not child:
        signal.alarm(PATIENCE)
        code = 1
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
