"""Loss and gradients of a language model head, timed in turns: all logits at once, chunked, and torch's function."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measure import in_turn, report
from torch import Tensor

from recipes.model.decoder import Head
from recipes.numerics.head_loss import HeadLoss
from recipes.numerics.loss import cross_entropy_sum

# tokens, width, classes, padded classes, bfloat16, rounds
CASES: dict[str, tuple[int, int, int, int, bool, int]] = {
    "2,048 tokens, 2,048 classes": (2048, 192, 2000, 2048, False, 15),
    "the same in bfloat16": (2048, 192, 2000, 2048, True, 15),
    "512 tokens, 50,304 classes": (512, 768, 50257, 50304, False, 5),
}
CHUNKS = (256, 512, 1024, 2048)


def make_contenders(
    hidden: Tensor, head: Head, targets: Tensor, *, bf16: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the ways to compute the loss and its gradients, by name."""

    def contender(objective: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = head.weight.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = objective()
            (loss / targets.numel()).backward()  # type: ignore[no-untyped-call]

        return run

    yield "all logits", contender(lambda: cross_entropy_sum(head(hidden), targets))
    compiled = torch.compile(cross_entropy_sum, dynamic=False)
    yield "all logits, compiled", contender(lambda: compiled(head(hidden), targets))
    for size in CHUNKS:
        if size <= targets.numel():
            yield f"chunks of {size}", contender(functools.partial(_chunked(head, size), hidden, head.weight, targets))
    loss = _chunked(head, 512, compiles=True)
    yield "chunks of 512, compiled", contender(lambda: loss(hidden, head.weight, targets))
    if not bf16:
        options = torch.nn.LinearCrossEntropyOptions()
        yield (
            "F.linear_cross_entropy",
            contender(
                lambda: F.linear_cross_entropy(
                    hidden.flatten(0, 1), head.weight, targets.flatten(), reduction="sum", options=options
                )
            ),
        )


def _chunked(head: Head, size: int, *, compiles: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    head_loss = HeadLoss(vocab_size=head.vocab_size, chunk_tokens=size, label_smoothing=0.0, z_loss=0.0)
    if compiles:
        head_loss.compile()
    return lambda hidden, weight, targets: head_loss(hidden, weight, targets=targets)[0]


def main() -> None:
    rows: list[dict[str, Any]] = []
    for case, (num_tokens, width, vocab_size, padded, bf16, rounds) in CASES.items():
        torch.manual_seed(0)
        hidden = torch.randn(1, num_tokens, width, requires_grad=True)
        head = Head(width, padded, vocab_size=vocab_size)
        targets = torch.randint(vocab_size, (1, num_tokens))
        contenders = dict(make_contenders(hidden, head, targets, bf16=bf16))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run()
        for _ in in_turn(rounds):
            for name, run in contenders.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
        usual = statistics.median(seconds["all logits"])
        rows += [
            {
                "case": case,
                "way": name,
                "ms": f"{1e3 * statistics.median(found):.1f}",
                "of all logits": f"{statistics.median(found) / usual:.2f}",
            }
            for name, found in seconds.items()
        ]
    report("head_loss", rows)


if __name__ == "__main__":
    main()
