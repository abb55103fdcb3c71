"""What tests of commands share."""

from __future__ import annotations

import re

HEAD = "import torch\nfrom torch import nn\nexample_input = torch.ones(1, 4)\n"


def assert_only_stages(err: str) -> None:
    """What a log has of a command that went well: a line for each stage, with the time."""
    assert all(re.fullmatch(r"m\.py: .+ \(\d+\.\d s\)", line) for line in err.splitlines()), err
