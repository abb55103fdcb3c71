"""Is `model.generate` faster behind `hybridize`, from the first token on, and are the tokens the same?

Usage: python -m bench.generate [MODEL ...]; writes bench/results/generate.{json,md}. Greedy decoding of 64 tokens with
a cache, batch 1, random weights. Each model has a process of its own, in which eager, the hybrid, a hybrid in int8, and
`torch.compile(dynamic=True)` take turns.

How fast memory is read bounds what float32 can reach: each token reads all weights once.
"""

from __future__ import annotations

import copy
import math
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
    small = tsopt.hybridize(model, precision="int8", cache=False)
    arrival = _FirstToken()
    first, first_seconds = generate(fast, PROMPT, streamer=arrival)
    captures = len(signatures(fast))
    others, _ = generate(model, OTHER_PROMPT)
    second, second_seconds = generate(fast, OTHER_PROMPT)
    later = len(signatures(fast)) - captures
    in_int8_first = [generate(small, prompt)[1] for prompt in (PROMPT, OTHER_PROMPT)]
    peer, peer_failure = compiled_by_torch(model)
    calls = [model, fast, small, *([] if peer is None else [peer])]
    rounds = [[generate(call, PROMPT) for call in calls] for _ in range(ROUNDS)]
    eager, mine, in_int8, *by_torch = (np.array([round_[i][1] for round_ in rounds]) for i in range(len(calls)))
    tokens = [round_[2][0] for round_ in rounds]
    return {
        "int8": {
            "ratios": [float(ratio) for ratio in eager / in_int8],
            "first_seconds": in_int8_first[0],
            "signatures": signatures(small),
            "same_tokens": float((tokens[0] == wanted)[:, -TOKENS:].float().mean()),
            "logits": None if model.config.is_encoder_decoder else error_of_logits(small, model, wanted),
            "in_eager": sum(tsopt.report(small).in_eager.values()) / tsopt.report(small).calls,
        },
        "torch_compile": {"ratios": [float(r) for times in by_torch for r in eager / times], "failure": peer_failure},
        "bound": weights_read(model) / read_speed(),
        "first_seconds": first_seconds,
        "first_token_seconds": arrival.seconds,
        "signatures": signatures(fast),
        "captures": captures,
        "captures_of_another_prompt": later,
        "another_prompt_seconds": second_seconds,
        "same": all(
            torch.equal(a, b) for a, b in ((wanted, first), (others, second), *((e[0], m[0]) for e, m, *_ in rounds))
        ),
        "eager": float(TOKENS / np.median(eager)),
        "tsopt": float(TOKENS / np.median(mine)),
        "ratios": [float(ratio) for ratio in eager / mine],
    }


def compiled_by_torch(model: nn.Module) -> tuple[Any, str]:
    """The model behind `torch.compile(dynamic=True)`, warm; or why there is none."""
    peer = copy.deepcopy(model)
    try:
        peer.forward = torch.compile(peer.forward, dynamic=True)
        for prompt in (PROMPT, OTHER_PROMPT, PROMPT):
            generate(peer, prompt)
    except Exception as error:  # whatever the compiler raises
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return peer, ""


def error_of_logits(small: Any, model: nn.Module, tokens: torch.Tensor) -> float | None:
    """The relative error of the logits of each token, one by one with a cache: eager's tokens are given.

    None if eager serves these calls.
    """
    noise = size = 0.0
    before = sum(tsopt.report(small).in_eager.values())
    with torch.no_grad():
        caches: list[Any] = [None, None]
        for place in range(PROMPT, tokens.shape[1]):
            given = tokens[:, :PROMPT] if place == PROMPT else tokens[:, place - 1 : place]
            found = [
                call(
                    input_ids=given,
                    attention_mask=torch.ones(1, place, dtype=torch.int64),
                    past_key_values=cache,
                    use_cache=True,
                )
                for call, cache in zip((small, model), caches, strict=True)
            ]
            caches = [item.past_key_values for item in found]
            mine, theirs = (item.logits[:, -1].double() for item in found)
            noise, size = noise + float((mine - theirs).square().sum()), size + float(theirs.square().sum())
    in_eager = sum(tsopt.report(small).in_eager.values()) - before
    return None if in_eager > TOKENS // 2 else math.sqrt(noise / size)


def weights_read(model: nn.Module) -> int:
    """Bytes of the weights that each token reads: those of linear layers, the last of which may be the embedding's.

    Of an encoder and a decoder only the latter runs for each token, with products of the encoder's result kept.
    """
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    once = (".encoder.", "encoder_attn.k_proj", "encoder_attn.v_proj")
    return sum(
        module.weight.nbytes
        for path, module in model.named_modules()
        if isinstance(module, kinds) and not any(part in path for part in once)
    )


def read_speed() -> float:
    """Bytes per second at which 256 MB are read, by the faster one of a sum and a product with a vector."""
    matrix, vector = torch.ones(1 << 14, 1 << 12), torch.ones(1 << 12)
    seconds = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for call in (matrix.sum, lambda: matrix @ vector):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds)


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
        _ratio(ratios),
        f"{row['first_token_seconds']:.1f}",
        f"{row['first_seconds']:.1f}",
        str(row["captures"]),
        str(row["captures_of_another_prompt"]),
        *(_further(row) if "int8" in row else ["-"] * 4),
    )
    return f"| {' | '.join(cells)} |"


def _further(row: dict[str, Any]) -> tuple[str, ...]:
    """What rows of earlier versions do not have."""
    in_int8 = row["int8"]
    return (
        f"{1e3 * row['bound']:.1f} of {1e3 / row['tsopt']:.1f}",
        _ratio(in_int8["ratios"]),
        f"{in_int8['same_tokens']:.0%}, {_percent(in_int8['logits'])}, {1 - in_int8['in_eager']:.0%}",
        _ratio(row["torch_compile"]["ratios"]),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ratio(ratios: list[float]) -> str:
    return f"{np.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else "-"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield f"Greedy decoding of {TOKENS} tokens, batch 1, prompt of {PROMPT}: tokens per second, {ROUNDS} rounds."
    yield ""
    yield (
        "| model | same tokens | eager | tsopt | ratio, lowest and highest | first token, s | first `generate`, s "
        "| captures in it | captures with another prompt | ms to read the weights, of a token "
        "| int8 over eager | int8: same tokens, error of logits, calls compiled | torch.compile over eager |"
    )
    yield "|---|---|--:|--:|---|--:|--:|--:|--:|---|---|---|---|"
    yield from (line(name, row) for name, row in rows.items())
    yield ""
    yield "- ms to read the weights: at the speed at which this machine reads 256 MB, of the time of a token; float32"
    yield "  takes no less than that"
    yield "- int8: without calibration data; tokens diverge after the first difference"
    yield from (
        f"- {name}, torch.compile: {row['torch_compile']['failure']}"
        for name, row in rows.items()
        if row.get("torch_compile", {}).get("failure")
    )


if __name__ == "__main__":
    main()
