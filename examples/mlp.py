"""A small multilayer perceptron for tabular data, so small that call overhead dominates."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
example_input = torch.randn(1, 64)
