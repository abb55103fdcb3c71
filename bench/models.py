"""The models that tsopt is measured on: transformers configurations with random weights, and two small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

import tsopt


@dataclass(frozen=True)
class Case:
    """A model and how it is called, batch 1."""

    make: Callable[[], nn.Module]
    example: Callable[[], tsopt.Example]

    def load(self, seed: int = 0) -> tuple[nn.Module, tsopt.Example]:
        torch.manual_seed(seed)
        return perturbed(self.make()).eval(), self.example()


class Tagger(nn.Module):
    """A bidirectional LSTM over embeddings, a label for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True, bidirectional=True)
        self.labels = nn.Linear(256, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.labels(hidden)


class Ensemble(nn.Module):
    """Small networks in a Python loop, and the mean of what they say."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
            for _ in range(members)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


class Heads(nn.Module):
    """Attention as the lectures write it: a loop over heads, each with layers of its own."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        size = width // heads
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(width, size) for _ in range(3)) for _ in range(heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for query, key, value in self.heads:
            scores = query(x) @ key(x).transpose(-2, -1)
            found.append((scores / scores.shape[-1] ** 0.5).softmax(-1) @ value(x))
        return self.out(torch.cat(found, -1))


class Pyramid(nn.Module):
    """Convolutions of several sizes side by side, written step by step over all of them, not branch by branch."""

    def __init__(self, sizes: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Conv2d(3, channels, size, padding=size // 2) for size in sizes)
        self.narrow = nn.ModuleList(nn.Conv2d(channels, 8, 1) for _ in sizes)
        self.label = nn.Linear(8 * len(sizes), 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        wide = [conv(image).relu() for conv in self.wide]
        narrow = [conv(x).relu() for conv, x in zip(self.narrow, wide, strict=True)]
        pooled = [x.mean((-2, -1)) for x in narrow]
        return self.label(torch.cat(pooled, 1))


def perturbed(model: nn.Module) -> nn.Module:
    """Batch norm statistics as training leaves them: fresh ones (0 and 1) would hide an error in folding."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def resnet(depths: list[int], sizes: list[int], layer: str) -> nn.Module:
    config = transformers.ResNetConfig(depths=depths, hidden_sizes=sizes, layer_type=layer)
    return transformers.ResNetForImageClassification(config)


def image(size: int = 224) -> tsopt.Example:
    return tsopt.example(torch.randn(1, 3, size, size))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (1, length))


class Encoder(nn.Module):
    """The encoder of a speech model, 30 seconds of sound at a time."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.WhisperConfig(decoder_layers=1)
        self.encoder = transformers.WhisperModel(config).encoder

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.encoder(features).last_hidden_state


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(
        image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2
    )
    return transformers.EfficientNetForImageClassification(config)


MODELS: dict[str, Case] = {
    "mlp": Case(mlp, lambda: tsopt.example(torch.randn(1, 64))),
    "lstm": Case(Tagger, lambda: tsopt.example(tokens(64))),
    "resnet18": Case(lambda: resnet([2, 2, 2, 2], [64, 128, 256, 512], "basic"), image),
    "resnet50": Case(lambda: resnet([3, 4, 6, 3], [256, 512, 1024, 2048], "bottleneck"), image),
    "mobilenet_v2": Case(
        lambda: transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config()), image
    ),
    "bert_base": Case(
        lambda: transformers.BertModel(transformers.BertConfig()),
        lambda: tsopt.example(input_ids=tokens(128), attention_mask=torch.ones(1, 128, dtype=torch.int64)),
    ),
    "distilbert": Case(
        lambda: transformers.DistilBertModel(transformers.DistilBertConfig()),
        lambda: tsopt.example(input_ids=tokens(128), attention_mask=torch.ones(1, 128, dtype=torch.int64)),
    ),
    "gpt2": Case(
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)),
        lambda: tsopt.example(tokens(64)),
    ),
    "gpt2_token": Case(
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)),
        lambda: tsopt.example(tokens(1)),
    ),
    "vit_b16": Case(lambda: transformers.ViTForImageClassification(transformers.ViTConfig()), image),
    "llama_160m": Case(llama, lambda: tsopt.example(tokens(64))),
    "llama_160m_token": Case(llama, lambda: tsopt.example(tokens(1))),
    "efficientnet_b0": Case(efficientnet, image),
    "convnext_tiny": Case(lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig()), image),
    "swin_tiny": Case(lambda: transformers.SwinForImageClassification(transformers.SwinConfig()), image),
    "segformer_b0": Case(
        lambda: transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig()), lambda: image(512)
    ),
    "ensemble_16": Case(lambda: Ensemble(16, 64), lambda: tsopt.example(torch.randn(1, 64))),
    "heads_8": Case(lambda: Heads(8, 64), lambda: tsopt.example(torch.randn(1, 32, 64))),
    "pyramid_4": Case(lambda: Pyramid((1, 3, 5, 7), 64), lambda: image(112)),
    "whisper_tiny": Case(Encoder, lambda: tsopt.example(torch.randn(1, 80, 3000))),
}
