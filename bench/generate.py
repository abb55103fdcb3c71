"""Is `model.generate` faster behind `hybridize`, from the first token on, and are the tokens the same?

Usage: python -m bench.generate [MODEL ...]; writes bench/results/generate.{json,md}. Greedy decoding of 64 tokens with
a cache, batch 1, random weights. Each model has a process of its own; eager and the hybrid take turns.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import tsopt
from bench.process import Rows, measure_each
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
TOKENS, PROMPT, OTHER_PROMPT, ROUNDS = 64, 16, 23, 5


def main() -> None:
    measure_each("bench.generate:one", MODELS, RESULTS / "generate.json", line, page)


def gpt2(**sizes: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=32000
        )
    )


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=32000,
            use_sliding_window=True,
            sliding_window=32,
            max_window_layers=4,
        )
    )


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(d_model=512, encoder_layers=4, decoder_layers=4, vocab_size=20000)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama_134m": llama,
    "qwen3": qwen3,
    "bart": bart,
    "gpt2_2_layers": lambda: gpt2(n_layer=2, n_embd=128, n_head=4, vocab_size=1000),
}


def one(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    fast = tsopt.hybridize(model, cache=False)
    wanted, _ = generate(model, PROMPT)
    arrival = _FirstToken()
    first, first_seconds = generate(fast, PROMPT, streamer=arrival)
    captures = len(signatures(fast))
    others, _ = generate(model, OTHER_PROMPT)
    second, second_seconds = generate(fast, OTHER_PROMPT)
    later = len(signatures(fast)) - captures
    rounds = [(generate(model, PROMPT), generate(fast, PROMPT)) for _ in range(ROUNDS)]
    eager, mine = (np.array([round_[i][1] for round_ in rounds]) for i in (0, 1))
    return {
        "first_seconds": first_seconds,
        "first_token_seconds": arrival.seconds,
        "signatures": signatures(fast),
        "captures": captures,
        "captures_of_another_prompt": later,
        "another_prompt_seconds": second_seconds,
        "same": all(
            torch.equal(a, b) for a, b in ((wanted, first), (others, second), *((e[0], m[0]) for e, m in rounds))
        ),
        "eager": float(TOKENS / np.median(eager)),
        "tsopt": float(TOKENS / np.median(mine)),
        "ratios": [float(ratio) for ratio in eager / mine],
    }


class _FirstToken:
    """A streamer that notes when the first token arrives. It is given the prompt before."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._prompt_given = False
        self.seconds = 0.0

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_given and not self.seconds:
            self.seconds = time.perf_counter() - self._start
        self._prompt_given = True

    def end(self) -> None:
        """The streamer's interface wants it."""


def generate(model: Any, prompt: int, **options: Any) -> tuple[torch.Tensor, float]:
    """The tokens, and the seconds that they took."""
    tokens = torch.arange(5, 5 + prompt)[None]
    start = time.perf_counter()
    with torch.no_grad():
        found = model.generate(
            tokens, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options
        )
    return found, time.perf_counter() - start


def signatures(fast: Any) -> list[list[str]]:
    """What was captured beside the first call."""
    compiled = type(fast)._tsopt_compiled.fast
    return [list(item) for item in compiled.report.signatures] if compiled is not None else []


def line(name: str, row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    cells = (
        name,
        "yes" if row["same"] else "NO",
        f"{row['eager']:.0f}",
        f"{row['tsopt']:.0f}",
        f"{np.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]",
        f"{row['first_token_seconds']:.1f}",
        f"{row['first_seconds']:.1f}",
        str(row["captures"]),
        str(row["captures_of_another_prompt"]),
    )
    return f"| {' | '.join(cells)} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield f"Greedy decoding of {TOKENS} tokens, batch 1, prompt of {PROMPT}: tokens per second, {ROUNDS} rounds."
    yield ""
    yield (
        "| model | same tokens | eager | tsopt | ratio, lowest and highest | first token, s | first `generate`, s "
        "| captures in it | captures with another prompt |"
    )
    yield "|---|---|--:|--:|---|--:|--:|--:|--:|"
    yield from (line(name, row) for name, row in rows.items())


if __name__ == "__main__":
    main()
