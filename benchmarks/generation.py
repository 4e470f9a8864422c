"""Generation with models of this project and with `transformers.generate`, timed in turns on one thread.

64 prompts of 32 tokens, 128 new tokens each, without a stop token; the two models have the same sizes.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import in_turn, report
from torch import nn

from recipes.generation import Sampling, generate
from recipes.model import decoder
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama

ROUNDS = 5
BATCH, PROMPT, NEW = 64, 32, 128
VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, POSITIONS = 1024, 128, 352, 4, 4, 512
FAR = 256  # new tokens, for the growth of the time per token


def make_models() -> dict[str, tuple[Any, nn.Module]]:
    """Return the models of this project and of transformers, by architecture."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_layers": LAYERS, "num_heads": HEADS, "hidden_size": WIDTH}
    sizes["max_seq_len"] = POSITIONS
    ours = {
        "GPT-2": GPT2(**sizes, dropout=0.0),
        "Llama": Llama(**sizes, num_kv_heads=HEADS, ffn_hidden_size=HIDDEN, rope_theta=10000.0),
    }
    for model in ours.values():
        model.init_weights(0)
    no_end = {"bos_token_id": 0, "eos_token_id": None}
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, **no_end
    )
    llama = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        **no_end,
    )
    theirs = {"GPT-2": transformers.GPT2LMHeadModel(gpt2), "Llama": transformers.LlamaForCausalLM(llama)}
    return {name: (ours[name], theirs[name].eval()) for name in ours}


def measure(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a call: on one thread, its time on a machine with nothing else to do."""
    began = time.process_time()
    run()
    return time.process_time() - began


def measure_attention(run: Callable[[int], object]) -> tuple[float, float]:
    """Return the CPU seconds that attention takes in a call with 128 new tokens, and in one with 256."""
    attend_once, seconds = decoder._attend_once, 0.0

    def timed(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal seconds
        began = time.process_time()
        mixed = attend_once(*arguments, **named)
        seconds += time.process_time() - began
        return mixed

    found = []
    decoder._attend_once = timed
    try:
        for num_new in (NEW, FAR):
            seconds = 0.0
            run(num_new)
            found.append(seconds)
    finally:
        decoder._attend_once = attend_once
    return found[0], found[1]


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    prompts = torch.randint(VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    contenders: dict[tuple[str, str], dict[str, Callable[[], object]]] = {}
    attention: dict[tuple[str, str], Callable[[], tuple[float, float]]] = {}
    for architecture, (ours, theirs) in make_models().items():
        for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):

            def run_ours(num_new: int, model: Any = ours, temperature: float = temperature) -> object:
                sampling = Sampling(temperature=temperature)
                return generate(model, prompts.tolist(), num_new, sampling=sampling, seeds=range(BATCH))

            def run_theirs(num_new: int, model: Any = theirs, samples: bool = temperature > 0) -> object:
                options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": samples}
                return model.generate(prompts, **options, top_k=0, pad_token_id=0)

            contenders[architecture, mode] = {
                "ours": lambda run=run_ours: run(NEW),
                "theirs": lambda run=run_theirs: run(NEW),
                "ours, far": lambda run=run_ours: run(FAR),
            }
            attention[architecture, mode] = lambda run=run_ours: measure_attention(run)
    rows = []
    for (architecture, mode), runs in contenders.items():
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in in_turn(ROUNDS + 1):
            for name, run in runs.items():
                took = measure(run)
                if number:  # the first round warms up
                    seconds[name].append(took)
        ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True))
        ours, theirs, far = (statistics.median(seconds[name]) for name in runs)
        shares = [attention[architecture, mode]() for _ in range(ROUNDS)]
        near_share, far_share = (statistics.median(values) for values in zip(*shares, strict=True))
        without = (ours - near_share) / NEW, (far - ours - far_share + near_share) / (FAR - NEW)
        rows.append(
            {
                "model": architecture,
                "tokens": mode,
                "transformers, tokens/s": f"{BATCH * NEW / theirs:,.0f}",
                "generate, tokens/s": f"{BATCH * NEW / ours:,.0f}",
                "median ratio": f"{ratio:.2f}",
                "ms per step, first 128": f"{1e3 * ours / NEW:.2f}",
                "ms per step, next 128": f"{1e3 * (far - ours) / (FAR - NEW):.2f}",
                "without attention, first 128": f"{1e3 * without[0]:.2f}",
                "without attention, next 128": f"{1e3 * without[1]:.2f}",
            }
        )
    report("generation", rows)


if __name__ == "__main__":
    main()
