"""Configurations of transformers that ask for kernels, which the library would download and run."""

from __future__ import annotations

import json
import os

import pytest

import tsopt
from tests.cli.helpers import config_of
from tsopt.cli.hub_kernels import check_kernels
from tsopt.cli.model_sources import load_model


def rewrite(place, config, architecture, with_weights, change):
    """Saves a model, or only its configuration, and changes config.json."""
    import transformers

    config.architectures = [architecture]
    (getattr(transformers, architecture)(config) if with_weights else config).save_pretrained(place)
    text = json.loads((place / "config.json").read_text())
    change(text)
    (place / "config.json").write_text(json.dumps(text))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernels", ["kernels-community/flash-attn", "flash_attention_2", "paged|flash_attention_3"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_kernels_that_transformers_would_download_need_trust(tmp_path, name, kernels, with_weights):
    rewrite(tmp_path, *config_of("bert"), with_weights, lambda config: config.update({name: kernels}))
    with pytest.raises(tsopt.UsageError, match="asks for the kernels") as caught:
        load_model(f"hf:{tmp_path}", [], 0)
    assert kernels in caught.value.what
    assert "--trust" in caught.value.fix


def test_kernels_of_a_part_of_the_model_need_trust(tmp_path):
    asked = {"attn_implementation": {"vision_config": "flash_attention_2"}}
    rewrite(tmp_path, *config_of("clip"), False, lambda config: config.update(asked))
    with pytest.raises(tsopt.UsageError, match="asks for the kernels 'flash_attention_2'"):
        load_model(f"hf:{tmp_path}", [], 0)


def test_kernels_of_a_configuration_within_another_need_trust(tmp_path):
    config, _ = config_of("clip")
    check_kernels(config, tmp_path)
    config.vision_config._attn_implementation = "flash_attention_2"
    with pytest.raises(tsopt.UsageError, match="asks for the kernels 'flash_attention_2'"):
        check_kernels(config, tmp_path)


def test_kernels_that_another_file_asks_for_need_trust(tmp_path):
    """transformers reads that file instead, if the first one names it."""
    rewrite(tmp_path, *config_of("bert"), False, lambda config: config.update(attn_implementation="flash_attention_2"))
    (tmp_path / "config.json").rename(tmp_path / "config.4.0.0.json")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "configuration_files": ["config.4.0.0.json"]}')
    with pytest.raises(tsopt.UsageError, match="asks for the kernels"):
        load_model(f"hf:{tmp_path}", [], 0)


def test_what_kernels_are_asked_for_may_be_a_name_for_each_part(tmp_path):
    with pytest.raises(tsopt.UsageError, match="'sonicmoe'"):
        check_kernels({"parts": [{"experts_implementation": {"": "eager", "text_config": "sonicmoe"}}]}, tmp_path)
    check_kernels({"attn_implementation": None, "_experts_implementation": "grouped_mm", "other": "a/b"}, tmp_path)


@pytest.mark.parametrize("kernels", ["eager", "sdpa"])
def test_kernels_of_the_library_need_no_trust(tmp_path, kernels):
    rewrite(tmp_path, *config_of("bert"), True, lambda config: config.update(attn_implementation=kernels))
    assert load_model(f"hf:{tmp_path}", [], 0).model.config._attn_implementation == kernels


def test_trust_leaves_the_choice_of_kernels_to_the_library(tmp_path):
    kernels = {"attn_implementation": "flash_attention_2"}
    rewrite(tmp_path, *config_of("bert"), False, lambda config: config.update(kernels))
    with pytest.raises(tsopt.UsageError, match="transformers cannot load") as caught:
        load_model(f"hf:{tmp_path}", [], 0, trust=True)
    assert "flash" in caught.value.why.lower()


def test_the_hub_is_not_asked_for_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # put back afterwards
    monkeypatch.delenv("HF_HUB_OFFLINE")
    config, _ = config_of("bert")
    config.save_pretrained(tmp_path)
    load_model(f"hf:{tmp_path}", [], 0)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
