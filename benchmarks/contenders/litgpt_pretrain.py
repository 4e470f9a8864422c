"""`litgpt pretrain` with a Llama of that size; it always compiles, but for TORCHDYNAMO_DISABLE=1."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec import LOG_EVERY, Clock, Spec, read_spec

sys.path.insert(0, str(Path(__file__).parent.parent))

from plain_gpt2 import Windows
from torch.utils.data import DataLoader

CLOCK = Clock()


class Timed(DataLoader):  # type: ignore[type-arg]
    """Notes when a batch is taken; litgpt's loop calls nothing of ours. Its last checkpoint holds this loader."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return CLOCK.watch(super().__iter__())


def make_config(spec: Spec) -> Any:
    """Return litgpt's config of a Llama: imported late, after the switch for its compiler."""
    from litgpt.config import Config

    return Config(
        name="llama",
        block_size=spec.seq_len,
        vocab_size=spec.vocab_size,
        padding_multiple=64,
        n_layer=spec.num_layers,
        n_head=spec.num_heads,
        n_embd=spec.hidden_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=spec.ffn_hidden_size,
    )


def main() -> None:
    spec = read_spec()
    if not spec.compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"

    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup

    class Tokens(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, **_: Any) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> Timed:
            windows = Windows(spec.tokens, length=spec.seq_len, count=spec.num_steps * spec.batch)
            return Timed(windows, batch_size=self.batch_size, shuffle=True)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Windows(spec.tokens, length=spec.seq_len, count=1), batch_size=1)

    with tempfile.TemporaryDirectory() as folder:
        setup(
            "llama",
            model_config=make_config(spec),
            out_dir=Path(folder),
            precision="bf16-mixed" if spec.bf16 else "32-true",
            data=Tokens(),
            train=TrainArgs(
                save_interval=None,
                log_interval=LOG_EVERY,
                global_batch_size=spec.batch,
                micro_batch_size=spec.batch,
                max_tokens=spec.num_steps * spec.batch * spec.seq_len,
                max_norm=1.0,
                lr_warmup_steps=2,
                tie_embeddings=True,
            ),
            eval=EvalArgs(interval=10 * spec.num_steps, max_iters=1, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            devices=1,
            logger_name="csv",
        )
    CLOCK.report(spec)


if __name__ == "__main__":
    main()
