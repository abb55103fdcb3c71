"""Opening a bundle that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import tsopt


def refused(directory: Path, text: str, **options) -> tsopt.BundleError:
    with pytest.raises(tsopt.BundleError, match=text) as caught:
        tsopt.load(directory, **options)
    return caught.value
