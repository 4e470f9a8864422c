"""What every contender trains, and how it reports the seconds of its steps."""

import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A training, the same for each contender.

    Attributes:
        family: `gpt2` or `llama`.
        tokens: Raw file of uint16 tokens.
        vocab_size: V, without padding.
        seq_len: T.
        num_layers: Blocks.
        num_heads: Attention heads.
        hidden_size: W.
        batch: Sequences per step.
        steps: Steps that are timed.
        skip: Steps before them.
        bf16: Whether products are in bfloat16.
        compile: Whether the contender compiles, each in its own way.
        threads: Of torch; None: as many as it takes.
    """

    family: str
    tokens: str
    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    hidden_size: int
    batch: int
    steps: int
    skip: int
    bf16: bool
    compile: bool
    threads: int | None

    @property
    def ffn_hidden_size(self) -> int:
        """Width of a Llama's MLP: 8/3 W, a multiple of 64."""
        return -(-8 * self.hidden_size // 3 // 64) * 64

    @property
    def num_steps(self) -> int:
        """Steps in all: one more, because a step ends where the next begins."""
        return self.skip + self.steps + 1

    def to_argument(self) -> str:
        """Return the text that `read_spec` reads."""
        return json.dumps(asdict(self))


def read_spec() -> Spec:
    """Return the spec that this process was started with, and take its number of threads."""
    import torch

    spec = Spec(**json.loads(sys.argv[1]))
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.manual_seed(0)
    return spec


class Clock:
    """Notes when steps begin; all contenders are timed from one step's begin to the next one's."""

    def __init__(self) -> None:
        self._began: list[float] = []

    def tick(self) -> None:
        """Note that a step begins."""
        self._began.append(time.perf_counter())

    def watch(self, batches: Any) -> Iterator[Any]:
        """Yield what is in `batches`; a step begins with each."""
        for batch in batches:
            self.tick()
            yield batch

    def report(self, spec: Spec) -> None:
        """Print the seconds of a step as the last line of this process."""
        began = self._began[spec.skip :]
        seconds = [after - before for before, after in itertools.pairwise(began)]
        assert len(seconds) >= spec.steps, f"{len(seconds)} of {spec.steps} steps were timed"
        found = {
            "seconds": statistics.median(seconds),
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        print(json.dumps(found), flush=True)
