"""Tensors through a file: as they were, and refused where the file is not what the message says."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.sandbox.transfer import LARGE, Gone, read_tensors, write_tensors

TENSORS = {
    "empty": torch.empty(0, 3),
    "a number": torch.tensor(2.5),
    "booleans": torch.tensor([True, False, True]),
    "half": torch.randn(5).half(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "transposed": torch.randn(4, 6).t(),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "large": torch.arange(LARGE // 4 + 3, dtype=torch.float32),
    "large and transposed": torch.arange(LARGE, dtype=torch.int16).reshape(2, -1).t(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
}


def test_tensors_are_read_as_they_were_written(tmp_path):
    found = read_tensors(tmp_path / "file", write_tensors(tmp_path / "file", list(TENSORS.values())))
    for (name, tensor), value in zip(TENSORS.items(), found, strict=True):
        assert value.dtype == tensor.dtype, name
        assert torch.equal(value, tensor), name
        if name != "expanded":  # each element has a place of its own
            assert value.stride() == tensor.stride(), name


def test_what_is_read_is_not_the_file(tmp_path):
    place = tmp_path / "file"
    (value,) = read_tensors(place, write_tensors(place, [torch.ones(64)]))
    place.write_bytes(b"\0" * 256)
    assert value.sum() == 64
    value.zero_()
    assert place.stat().st_size == 256


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 8},
        {"offset": -8},
        {"offset": 1 << 62},
        {"offset": 0.5},
        {"offset": "0"},
        {"offset": None},
        {"shape": [1 << 32, 1 << 32]},
        {"shape": [1 << 40]},
        {"shape": [-1]},
        {"shape": ["2"]},
        {"stride": [1, 1]},
        {"stride": [-1]},
        {"dtype": "float64"},
        {"dtype": "nn"},
        {"dtype": "no_such"},
    ],
    ids=str,
)
def test_a_file_that_is_not_what_the_message_says_is_refused(tmp_path, lie):
    (described,) = write_tensors(tmp_path / "file", [torch.ones(4)])
    with pytest.raises(Gone, match="invalid tensors"):
        read_tensors(tmp_path / "file", [described | lie])


def test_a_description_without_a_dtype_is_refused(tmp_path):
    (described,) = write_tensors(tmp_path / "file", [torch.ones(4)])
    del described["dtype"]
    with pytest.raises(Gone, match="dtype"):
        read_tensors(tmp_path / "file", [described])


def test_a_description_that_is_not_a_list_is_refused(tmp_path):
    write_tensors(tmp_path / "file", [torch.ones(4)])
    with pytest.raises(Gone):
        read_tensors(tmp_path / "file", ["no"])
