"""Communication between two processes: messages over a socket, tensors through a file. No pickle."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.tensor_bytes import bytes_in

LENGTH = struct.Struct("!I")
LONGEST = 1 << 26  # bytes of a message; tensors are not in messages
ALIGN = 64
LARGE = 1 << 20  # bytes of a tensor

Message = dict[str, Any]
Described = list[dict[str, Any]]


class Gone(Exception):
    """The other side has closed the connection, or said something that is not a message."""


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Sends a message, and open files with it.

    Raises:
        Gone: nobody is there.
        TimeoutError: nobody reads, for as long as the connection's time limit.
    """
    text = json.dumps(message).encode()
    try:
        if files:
            socket.send_fds(connection, [LENGTH.pack(len(text))], list(files))
            connection.sendall(text)
        else:
            connection.sendall(LENGTH.pack(len(text)) + text)
    except (BrokenPipeError, ConnectionError) as error:
        raise Gone("the connection is closed") from error


def receive(connection: socket.socket, files: int = 0) -> tuple[Message, list[int]]:
    """The next message, and up to `files` open files.

    Raises:
        Gone: the connection has ended.
        TimeoutError: nothing came for as long as the connection's time limit.
    """
    try:
        head, found, _, _ = socket.recv_fds(connection, LENGTH.size, files)
        head += _exactly(connection, LENGTH.size - len(head)) if head else b""
        if not head:
            raise Gone("the connection is closed")
        size = LENGTH.unpack(head)[0]
        if size > LONGEST:
            raise Gone(f"a message of {size} bytes is too large")
        message = json.loads(_exactly(connection, size))
    except ConnectionError as error:
        raise Gone("the connection is closed") from error
    except ValueError as error:
        raise Gone("invalid message") from error
    if not isinstance(message, dict):
        raise Gone("invalid message")
    return message, list(found)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise Gone("the connection is closed")
        data += part
    return bytes(data)


def write_tensors(path: Path, tensors: Sequence[torch.Tensor]) -> Described:
    """Writes tensors to a file; what `read_tensors` needs to know goes into a message."""
    described: Described = []
    with path.open("wb") as file:
        for tensor in tensors:
            value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            raw = bytes_in(value).numpy()
            file.write(b"\0" * (-file.tell() % ALIGN))
            overlaps = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
            described.append(
                {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "stride": list(value.stride() if overlaps else tensor.stride()),
                    "offset": file.tell(),
                }
            )
            file.write(raw.data)
    return described


def read_tensors(path: Path, described: Described) -> list[torch.Tensor]:
    """The tensors of a file, in memory of their own.

    Raises:
        Gone: the file is not what the message says.
    """
    with path.open("rb") as file:
        try:
            return [_read(file, item) for item in described]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise Gone(f"invalid tensors: {error}") from error


def _read(file: BufferedReader, item: dict[str, Any]) -> torch.Tensor:
    dtype, shape, stride = getattr(torch, item["dtype"]), list(item["shape"]), list(item["stride"])
    count = torch.Size(shape).numel()
    if item["offset"] < 0 or item["offset"] + count * dtype.itemsize > os.fstat(file.fileno()).st_size:
        raise ValueError("a tensor beyond the end of the file")
    flat = _empty(count, dtype)
    if count:
        file.seek(item["offset"])
        if file.readinto(flat.view(torch.uint8).numpy().data) != flat.nbytes:
            raise ValueError("the file was cut while it was read")
    value = flat.reshape(shape)
    return (
        value
        if list(value.stride()) == stride
        else torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(value)
    )


def _empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for elements; where they are many, it goes back to the system with the tensor.

    The logits of a language model come by the dozen. What they leave behind in the heap is not given back.
    """
    size = count * dtype.itemsize
    if size < LARGE:
        return torch.empty(count, dtype=dtype, device="cpu")
    try:  # NOTE: private: what the helper reads, its children are not to share
        own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a tensor of {size} bytes") from error
    return torch.frombuffer(own, dtype=dtype)
