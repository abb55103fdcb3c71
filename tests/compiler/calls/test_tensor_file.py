from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tsopt.compiler.calls.tensor_file import read_tensors, write_tensors
from tsopt.errors import BundleError

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex32, torch.complex64, torch.complex128)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_tensors_come_back(tmp_path, shape):
    tensors = {f"t{n}": torch.ones(shape).to(dtype) for n, dtype in enumerate(DTYPES)} | {"odd": torch.ones(1).bool()}
    write_tensors(tensors, tmp_path / "t")
    found = read_tensors(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].to(torch.complex128).equal(tensor.to(torch.complex128))


def test_bits_of_a_view_are_resolved(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    write_tensors({"conj": tensor.conj(), "neg": tensor.conj().imag.clone()}, tmp_path / "t")
    assert read_tensors(tmp_path / "t")["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert read_tensors(tmp_path / "t")["neg"].tolist() == [-2, 1]


def test_arrays_are_read_without_torch(tmp_path):
    value = torch.tensor([[1 + 2j], [3 - 1j]], dtype=torch.complex128)
    write_tensors({"a": value, "b": torch.tensor(2j, dtype=torch.complex128)}, tmp_path / "t")
    found = read_tensors(tmp_path / "t", arrays=True)
    np.testing.assert_array_equal(found["a"], value.numpy(), strict=True)
    assert (found["b"].shape, complex(found["b"])) == ((), 2j)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_dtype_that_no_file_has_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"tensors of torch\.qint8 cannot be stored in a file"):
        write_tensors({"q": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, tmp_path / "t")


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2), torch.ones((), dtype=torch.float64)])
def test_damaged_pairs_are_refused(tmp_path, value, arrays):
    save_file({"a:complex128": value}, tmp_path / "t")
    with pytest.raises(ValueError, match="is not a tensor of pairs"):
        read_tensors(tmp_path / "t", arrays=arrays)
