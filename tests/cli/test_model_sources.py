"""Models from elsewhere than a Python file. Libraries that are not installed here are played."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt as package
from tsopt.cli.model_sources import load_model, stem_of


def module(monkeypatch, name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


# ---- timm ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def timm(monkeypatch):
    made = []

    def create_model(name, pretrained):
        made.append((name, pretrained))
        model = net()
        model.default_cfg = {"input_size": (3, 20, 24)}
        return model

    names = ["resnet50d", "resnet50"]
    module(monkeypatch, "timm", create_model=create_model, is_model=names.__contains__, list_models=lambda: names)
    return made


def test_a_model_of_timm_has_random_weights_and_the_size_of_its_images(timm):
    told = []
    found = load_model("timm:resnet50d", [], 0, tell=told.append)
    assert timm == [("resnet50d", False)], "nothing is downloaded"
    assert found.example_input.shape == (1, 3, 20, 24)
    assert not found.model.training
    assert told == ["random weights, example input 1x3x20x24:f32"]


def test_the_seed_makes_weights_and_inputs(timm):
    first, again, other = (load_model("timm:resnet50d", [], seed) for seed in (1, 1, 2))
    assert torch.equal(first.model[0].weight, again.model[0].weight)
    assert torch.equal(first.example_input, again.example_input)
    assert not torch.equal(first.example_input, other.example_input)


def test_inputs_that_are_given_replace_those_that_are_made(timm):
    told = []
    found = load_model("timm:resnet50d", ["2x3x9x9"], 0, tell=told.append)
    assert found.example_input[0].shape == (2, 3, 9, 9)
    assert not told


def test_an_unknown_name_is_told_with_similar_ones(timm):
    with pytest.raises(package.UsageError, match="timm has no model 'resnet50e'") as caught:
        load_model("timm:resnet50e", [], 0)
    assert "timm:resnet50" in caught.value.fix


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_missing_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(
        package.UsageError, match=rf"{library} is (not installed|installed but does not work)"
    ) as caught:
        load_model(f"{library}:resnet18", [], 0)
    assert "install" in caught.value.fix


def test_a_library_that_is_broken_is_told(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torchvision":
                raise RuntimeError("operator torchvision::nms does not exist")

    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(package.UsageError, match="torchvision is installed but does not work") as caught:
        load_model("torchvision:resnet18", [], 0)
    assert "nms does not exist" in caught.value.why


def test_the_commands_take_such_names(tsopt, timm, tmp_path):
    ran = tsopt("export", "timm:resnet50d", "--backends", "eager", "--no-isolate", "--no-cache", "--seconds", "0.05")
    assert ran.code == 0, ran.err
    assert "random weights, example input 1x3x20x24:f32" in ran.err
    assert (tmp_path / "resnet50d.tsopt").is_dir()
    assert tsopt("inspect", "timm:resnet50d", "--passes").code == 0
    assert tsopt("export", "timm:resnet50d", "--dry-run").code == 0
    assert "has no model" in tsopt("bench", "timm:nothing").err


# ---- torchvision ---------------------------------------------------------------------------------------------------


@pytest.fixture
def torchvision(monkeypatch):
    made = []

    def builder(kind, backbone):
        def plain(weights):
            made.append(weights)
            return net()

        def with_backbone(weights, weights_backbone):
            made.append((weights, weights_backbone))
            return net()

        build = with_backbone if backbone else plain
        build.__module__ = f"torchvision.models.{kind}"
        return build

    builders = {
        "resnet18": builder("resnet", False),
        "fasterrcnn": builder("detection.faster_rcnn", True),
        "fcn": builder("segmentation.fcn", True),
        "r3d": builder("video.resnet", False),
        "odd": builder("odd", False),
    }

    def get_model_builder(name):
        if name not in builders:
            raise ValueError(f"Unknown model {name}")
        return builders[name]

    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=[32])))
    module(monkeypatch, "torchvision")
    module(
        *(monkeypatch, "torchvision.models"),
        get_model_builder=get_model_builder,
        get_model_weights=lambda name: SimpleNamespace() if name == "odd" else weights,
        list_models=lambda: list(builders),
    )
    return made


@pytest.mark.parametrize(
    ("name", "shape"),
    [("resnet18", (1, 3, 32, 32)), ("fcn", (1, 3, 520, 520)), ("r3d", (1, 3, 16, 112, 112))],
)
def test_a_model_of_torchvision_has_random_weights_and_an_input_of_its_kind(torchvision, name, shape):
    assert load_model(f"torchvision:{name}", [], 0).example_input.shape == shape
    assert torchvision[0] in (None, (None, None))


def test_a_detector_takes_a_list_of_images(torchvision):
    (images,) = load_model("torchvision:fasterrcnn", [], 0).example_input
    assert [tuple(image.shape) for image in images] == [(3, 480, 640)]
    assert 0 <= images[0].min() <= images[0].max() <= 1


def test_a_model_that_does_not_say_its_size_needs_an_input(torchvision):
    with pytest.raises(package.UsageError, match="torchvision:odd does not say how it is called"):
        load_model("torchvision:odd", [], 0)
    assert load_model("torchvision:odd", ["1x3x9x9"], 0).example_input[0].shape == (1, 3, 9, 9)


def test_an_unknown_model_of_torchvision_is_told(torchvision):
    with pytest.raises(package.UsageError, match="torchvision has no model 'resnet19'") as caught:
        load_model("torchvision:resnet19", [], 0)
    assert "torchvision:resnet18" in caught.value.fix


# ---- transformers --------------------------------------------------------------------------------------------------


def config_of(kind):
    import transformers

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


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("bert", {"input_ids": (1, 16), "attention_mask": (1, 16)}),
        ("vit", {"pixel_values": (1, 1, 16, 16)}),
        ("whisper", {"input_features": (1, 4, 20), "decoder_input_ids": (1, 8)}),
    ],
)
def test_a_directory_of_transformers_is_called_as_its_configuration_says(tmp_path, kind, shapes):
    config, architecture = config_of(kind)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    told = []
    found = load_model(f"hf:{tmp_path}", [], 0, tell=told.append)
    assert type(found.model).__name__ == architecture
    assert {name: tuple(value.shape) for name, value in found.example_input.items()} == shapes
    assert told[0].startswith("random weights, example input ")
    with torch.no_grad():
        found.model(**found.example_input)


def test_the_weights_of_a_directory_are_read(tmp_path):
    import transformers

    config, _ = config_of("bert")
    saved = transformers.BertModel(config)
    saved.save_pretrained(tmp_path)
    told = []
    found = load_model(f"hf:{tmp_path}", [], 0, tell=told.append)
    assert torch.equal(found.model.embeddings.word_embeddings.weight, saved.embeddings.word_embeddings.weight)
    assert told[0].startswith(f"{tmp_path}, example input ")


def test_code_of_a_directory_needs_trust(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "own.Model"}}))
    with pytest.raises(package.UsageError, match="Python code of its own") as caught:
        load_model(f"hf:{tmp_path}", [], 0)
    assert "--trust" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no config.json"),
        ("{", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"model_type": "none of these"}', "transformers cannot load"),
    ],
)
def test_a_directory_that_cannot_be_read_is_told(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(package.UsageError, match=said):
        load_model(f"hf:{tmp_path}", [], 0)


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pt2(tmp_path):
    x = torch.ones(2, 3, 9, 9)
    torch.export.save(torch.export.export(net().eval(), (x,)), tmp_path / "m.pt2")
    return tmp_path / "m.pt2"


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_knows_its_example(pt2):
    found = load_model(str(pt2), [], 0, trust=True)
    assert isinstance(found.model, torch.export.ExportedProgram)
    assert found.example_input.args[0].shape == (2, 3, 9, 9)


@pytest.fixture
def scripted(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    torch.jit.trace(model, torch.ones(1, 4)).save(tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_file_needs_an_input(scripted):
    with pytest.raises(package.UsageError, match="does not say how it is called"):
        load_model(str(scripted), [], 0, trust=True)
    found = load_model(str(scripted), ["1x4"], 0, trust=True)
    assert found.model(*found.example_input).shape == (1, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_commands_take_such_files(tsopt, scripted, tmp_path):
    options = ("--input", "1x4", "--backends", "eager", "--no-isolate", "--no-cache", "--seconds", "0.05")
    assert "--trust" in tsopt("export", scripted, *options).err
    ran = tsopt("export", scripted, *options, "--trust")
    assert ran.code == 0, ran.err
    assert (tmp_path / "m.tsopt").is_dir()


@pytest.mark.parametrize("name", ["m.pt2", "m.pt"])
@pytest.mark.filterwarnings("ignore")
def test_other_files_are_refused(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(package.UsageError, match="no such file"):
        load_model(str(path), [], 0, trust=True)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(package.UsageError, match="which can hold code"):
        load_model(str(path), [], 0)
    with pytest.raises(package.UsageError, match=r"is not (a program|a TorchScript)") as caught:
        load_model(str(path), [], 0, trust=True)
    assert "Python file" in caught.value.fix


@pytest.mark.parametrize(
    ("spec", "stem"),
    [
        ("timm:resnet50d.a1_in1k", "resnet50d.a1_in1k"),
        ("hf:models/bert-base", "bert-base"),
        ("models/m.pt2", "m"),
        ("m.py:other", "m"),
    ],
)
def test_files_are_named_after_the_model(spec, stem):
    assert stem_of(spec) == stem
