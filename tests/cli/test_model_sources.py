"""Models from elsewhere than a Python file. Libraries that are not installed here are played."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt as package
from tests.cli.helpers import Writing, clip, config_of, net
from tsopt.cli.model_sources import load_model, stem_of


def module(monkeypatch, name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Anything(nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale


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
    found = load_model("timm:resnet50d", [], 0, note=told.append)
    assert timm == [("resnet50d", False)], "nothing is downloaded"
    assert found.example_input.shape == (1, 3, 20, 24)
    assert not found.model.training
    assert told == ["timm:resnet50d: random weights, example input 1x3x20x24:f32"]


def test_the_seed_makes_weights_and_inputs(timm):
    first, again, other = (load_model("timm:resnet50d", [], seed) for seed in (1, 1, 2))
    assert torch.equal(first.model[0].weight, again.model[0].weight)
    assert torch.equal(first.example_input, again.example_input)
    assert not torch.equal(first.example_input, other.example_input)


def test_inputs_that_are_given_replace_those_that_are_made(timm):
    told = []
    found = load_model("timm:resnet50d", ["2x3x9x9"], 0, note=told.append)
    assert found.example_input[0].shape == (2, 3, 9, 9)
    assert not told


def test_an_unknown_name_is_told_with_similar_ones(timm):
    with pytest.raises(package.UsageError, match="timm has no model 'resnet50e'") as caught:
        load_model("timm:resnet50e", [], 0)
    assert "timm:resnet50" in caught.value.fix


def test_a_tag_that_the_library_refuses_is_told(timm, monkeypatch):
    def refuse(name, pretrained):
        raise RuntimeError("Invalid pretrained tag (a1_in1) for resnet50.")

    monkeypatch.setattr(sys.modules["timm"], "create_model", refuse)
    with pytest.raises(package.UsageError, match="timm cannot make 'resnet50'") as caught:
        load_model("timm:resnet50", [], 0)
    assert "Invalid pretrained tag" in caught.value.why


def test_an_example_that_the_model_does_not_take_is_told(timm, monkeypatch):
    def other(name, pretrained):
        model = net()
        model.default_cfg = {"input_size": (1, 20, 24)}
        return model

    monkeypatch.setattr(sys.modules["timm"], "create_model", other)
    with pytest.raises(package.UsageError, match="does not run on an example input made from its config") as caught:
        load_model("timm:resnet50", [], 0)
    assert "1x1x20x24:f32" in caught.value.what
    assert "--input" in caught.value.fix
    assert load_model("timm:resnet50", ["1x3x20x24"], 0)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_missing_is_named(monkeypatch, library):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(package.UsageError, match=f"{library} is not installed") as caught:
        load_model(f"{library}:resnet18", [], 0)
    assert caught.value.fix == f"pip install {library}"


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
            model = Anything()
            if kind == "vision_transformer":
                model.image_size = 16
            return model

        def with_backbone(weights, weights_backbone):
            made.append((weights, weights_backbone))
            return Anything()

        build = with_backbone if backbone else plain
        build.__module__ = f"torchvision.models.{kind}"
        return build

    builders = {
        "resnet18": builder("resnet", False),
        "fasterrcnn": builder("detection.faster_rcnn", True),
        "fcn": builder("segmentation.fcn", True),
        "r3d": builder("video.resnet", False),
        "vit": builder("vision_transformer", False),
        "odd": builder("odd", False),
    }

    def get_model_builder(name):
        if name not in builders:
            raise ValueError(f"Unknown model {name}")
        return builders[name]

    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=[32])))
    filmed = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=(20, 24))))
    kinds = {"odd": SimpleNamespace(), "r3d": filmed}
    module(monkeypatch, "torchvision")
    module(
        *(monkeypatch, "torchvision.models"),
        get_model_builder=get_model_builder,
        get_model_weights=lambda name: kinds.get(name, weights),
        list_models=lambda: list(builders),
    )
    return made


@pytest.mark.parametrize(
    ("name", "shape"),
    [("resnet18", (1, 3, 32, 32)), ("fcn", (1, 3, 520, 520)), ("r3d", (1, 3, 16, 20, 24)), ("vit", (1, 3, 16, 16))],
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


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("bert", {"input_ids": (1, 16), "attention_mask": (1, 16)}),
        ("vit", {"pixel_values": (1, 1, 16, 16)}),
        ("whisper", {"input_features": (1, 4, 20), "decoder_input_ids": (1, 8)}),
        ("clip", {"input_ids": (1, 16), "attention_mask": (1, 16), "pixel_values": (1, 3, 16, 16)}),
    ],
)
def test_a_directory_of_transformers_is_called_as_its_configuration_says(tmp_path, kind, shapes):
    config, architecture = config_of(kind)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    told = []
    found = load_model(f"hf:{tmp_path}", [], 0, note=told.append)
    assert type(found.model).__name__ == architecture
    assert {name: tuple(value.shape) for name, value in found.example_input.items()} == shapes
    assert told[0].startswith(f"hf:{tmp_path}: random weights, example input ")


def test_an_architecture_that_is_no_model_is_not_made(tmp_path):
    """A file names it, and whatever the library holds has that name."""
    config, _ = config_of("bert")
    config.architectures = ["AutoTokenizer", "logging"]
    config.save_pretrained(tmp_path)
    assert type(load_model(f"hf:{tmp_path}", [], 0).model).__name__ == "BertModel"


def test_floats_have_the_dtype_of_the_weights(tmp_path):
    import transformers

    config, _ = config_of("vit")
    transformers.ViTModel(config).bfloat16().save_pretrained(tmp_path)
    found = load_model(f"hf:{tmp_path}", [], 0)
    assert found.example_input["pixel_values"].dtype == found.model.dtype == torch.bfloat16


@pytest.mark.parametrize("with_weights", [False, True])
def test_trusted_code_of_a_directory_makes_the_model(tmp_path, monkeypatch, with_weights):
    import transformers

    config, _ = config_of("bert")
    if with_weights:
        transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    text["auto_map"] = {"AutoModelForMaskedLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    code = "from transformers import BertForMaskedLM\n\n\nclass Own(BertForMaskedLM):\n    pass\n"
    (tmp_path / "own.py").write_text(code)
    for module in ("dynamic_module_utils", "utils.hub"):  # where the code is copied to
        monkeypatch.setattr(f"transformers.{module}.HF_MODULES_CACHE", str(tmp_path / "copied"), raising=False)
    found = load_model(f"hf:{tmp_path}", [], 0, trust=True)
    assert type(found.model).__name__ == "Own"


def test_a_class_that_is_a_part_of_its_configuration_is_made_from_that_part(tmp_path):
    import transformers

    saved = transformers.CLIPModel(clip())
    saved.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"architectures": ["CLIPTextModel"]}))
    found = load_model(f"hf:{tmp_path}", [], 0)
    assert type(found.model).__name__ == "CLIPTextModel"
    token = "embeddings.token_embedding.weight"
    expected = next(value for name, value in saved.state_dict().items() if name.endswith(token))
    assert torch.equal(next(v for name, v in found.model.state_dict().items() if name.endswith(token)), expected)


def test_the_weights_of_a_directory_are_read(tmp_path):
    import transformers

    config, _ = config_of("bert")
    saved = transformers.BertModel(config)
    saved.save_pretrained(tmp_path)
    told = []
    found = load_model(f"hf:{tmp_path}", [], 0, note=told.append)
    assert torch.equal(found.model.embeddings.word_embeddings.weight, saved.embeddings.word_embeddings.weight)
    assert told[0].startswith(f"hf:{tmp_path}: {tmp_path}, example input ")


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
        ('{"a":' * 100_000, "is not a JSON object"),
        ('{"model_type": "none of these"}', "transformers cannot load"),
    ],
)
def test_a_directory_that_cannot_be_read_is_told(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(package.UsageError, match=said):
        load_model(f"hf:{tmp_path}", [], 0)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_trying_a_model_of_a_library_does_not_change_it(timm, monkeypatch):
    def create_model(name, pretrained):
        model = nn.Sequential(Writing())
        model.default_cfg = {"input_size": (3,)}
        return model

    monkeypatch.setattr(sys.modules["timm"], "create_model", create_model)
    found = load_model("timm:resnet50", [], 0)
    assert found.model[0].calls.tolist() == [0]
    torch.manual_seed(0)
    assert torch.equal(found.example_input, torch.randn(1, 3))


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
