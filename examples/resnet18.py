"""ResNet-18 from a transformers configuration, with random weights and batch norm statistics as after training."""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

torch.manual_seed(0)
model = ResNetForImageClassification(
    ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
).eval()
for module in model.modules():
    # With the initial statistics, 0 and 1, an error in folding them would go unnoticed.
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.5, 1.5)

example_input = torch.randn(1, 3, 224, 224)
