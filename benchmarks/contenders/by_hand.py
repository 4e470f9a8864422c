"""A hand-written script in the manner of nanoGPT: one file, no framework, batches from a memory-mapped file."""

import sys
from pathlib import Path

from spec import Clock, read_spec

sys.path.insert(0, str(Path(__file__).parent.parent))

from plain_gpt2 import random_windows, train


def main() -> None:
    spec, clock = read_spec(), Clock()
    vocab = spec.vocab_size if spec.vocab_size < 1000 else -(-spec.vocab_size // 64) * 64
    shape = (vocab, spec.seq_len, spec.num_layers, spec.num_heads, spec.hidden_size)
    batches = random_windows(spec.tokens, batch=spec.batch, length=spec.seq_len)
    steps = train(shape, batch=spec.batch, steps=spec.num_steps, bf16=spec.bf16, compile_=spec.compile, batches=batches)
    for step, _ in enumerate(steps):
        clock.tick()
        if step % 10 == 0:
            print(step, flush=True)
    clock.report(spec)


if __name__ == "__main__":
    main()
