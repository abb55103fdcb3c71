"""Models for the tests of capture."""

from __future__ import annotations

from torch import nn


class Net(nn.Module):
    """`forward` given as a function of the module and the inputs."""

    def __init__(self, function, **tensors) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Module):
                self.add_module(name, tensor)
            elif isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.eval()

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
