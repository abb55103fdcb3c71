"""A pipeline of transformers: what stands around its model stays, and the model is compiled."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import tsopt
from tsopt.errors import UsageError
from tsopt.pipelines import model_in

WORDS = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "a", "fine", "bad", "day"))}
OPTIONS = {"backends": ("torchscript",), "seconds": 0.05, "isolate": False, "cache": False}


@pytest.fixture
def pipeline():
    words = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    return transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")


def test_the_model_in_it_is_compiled_and_the_pipeline_answers_as_before(always_faster, pipeline):
    fast = tsopt.hybridize(pipeline, **OPTIONS)
    assert type(fast) is type(pipeline)
    assert fast.model is not pipeline.model
    for _ in range(3):
        (found,), (wanted,) = fast("a fine day"), pipeline("a fine day")
        assert found["label"] == wanted["label"]
        assert found["score"] == pytest.approx(wanted["score"], rel=1e-5)
    assert tsopt.report(fast).calls >= 1
    assert tsopt.wait(fast)


def test_it_can_be_had_back(pipeline):
    fast = tsopt.hybridize(pipeline, **OPTIONS)
    assert tsopt.hybridize(fast, active=False).model is pipeline.model


def test_optimize_names_what_takes_a_pipeline(pipeline):
    with pytest.raises(UsageError, match="a TextClassificationPipeline is a pipeline") as caught:
        tsopt.optimize(pipeline, "a fine day")
    assert "tsopt.hybridize(pipeline)" in caught.value.fix


def test_other_things_with_a_model_are_no_pipelines():
    class Trainer:
        model = torch.nn.Linear(2, 2)

    assert model_in(Trainer()) is None
    assert model_in(torch.nn.Linear(2, 2)) is None
