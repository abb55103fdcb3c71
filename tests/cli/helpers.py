"""What tests of commands share."""

from __future__ import annotations

import re

import torch
from torch import nn

HEAD = "import torch\nfrom torch import nn\nexample_input = torch.ones(1, 4)\n"


def assert_only_stages(err: str) -> None:
    """What a log has of a command that went well: a line for each stage, with the time."""
    assert all(re.fullmatch(r"m\.py: .+ \(\d+\.\d s\)", line) for line in err.splitlines()), err


def failed(ran, text):
    """A command ended with a usage error that says so; its standard error."""
    assert ran.code == 2
    assert text in ran.err, ran.err
    assert "error: " in ran.err
    assert ran.out == ""
    return ran.err


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Writing(nn.Module):
    """Counts its calls, draws a number and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(2)
        return x * self.calls + torch.rand(1)


def clip():
    import transformers

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return transformers.CLIPConfig(
        text_config=small | {"vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 49},
        vision_config=small | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    )


def config_of(kind):
    import transformers

    if kind == "clip":
        return clip(), "CLIPModel"
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    if kind == "bert":
        return transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **small), "BertModel"
    if kind == "vit":
        return transformers.ViTConfig(image_size=16, patch_size=8, num_channels=1, **small), "ViTModel"
    whisper = transformers.WhisperConfig(
        **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 8 for part in ("encoder", "decoder")},
        **{"d_model": 8, "vocab_size": 50, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 16},
        **{name: 1 for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")},
    )
    return whisper, "WhisperModel"
