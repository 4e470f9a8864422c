"""Next-token prediction: loss per token, and generated text if there is a tokenizer."""

from typing import ClassVar, cast

from torch import Tensor
from typing_extensions import override

from recipes.model import LanguageModel
from recipes.model.generate import generate
from recipes.numerics.loss import mean_per_sample
from recipes.task.base import Batch, TrainingTask
from recipes.tokenizer import Tokenizer


class LanguageModeling(TrainingTask):
    """Trains a model of tokens [B, T] -> logits [B, T, V]. Arguments: see `TrainingTask`.

    Attributes:
        tokenizer: For `generate_text`; None if the data is not text.
    """

    input_kind: ClassVar[str] = "tokens"

    tokenizer: Tokenizer | None = None

    @override
    def setup(self, stage: str) -> None:
        if self.trainer.datamodule is not None:  # type: ignore[attr-defined]
            self.tokenizer = self.trainer.datamodule.source.tokenizer  # type: ignore[attr-defined]

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["inputs"])  # [B, T, V], compute dtype
        return self.cross_entropy_sum(logits, batch["targets"]), logits

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return mean_per_sample(self.model(batch["inputs"]), batch["targets"])

    def _tokens_per_sample(self, batch: Batch) -> int:
        return int(batch["inputs"].shape[1])

    def generate_text(
        self,
        prompt: str,
        num_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int,
    ) -> str | None:
        """Return the continuation of a prompt, without the prompt; None without a tokenizer. Call on every rank.

        Args:
            prompt: Text; an empty one starts a new document.
            num_tokens: Largest number of tokens to add.
            temperature: 0: always the likeliest token; below 1: sharper; above 1: flatter.
            top_k: Sample among the k likeliest tokens; None: all.
            top_p: Sample among the fewest tokens that have this probability together; None: all.
            seed: Of the sampling.
        """
        if self.tokenizer is None:
            return None
        prompt_tokens = self.tokenizer.encode(prompt) or [self.tokenizer.end_of_text]
        with self.trainer.precision_plugin.forward_context():
            tokens = generate(
                cast(LanguageModel, self.model),
                prompt_tokens,
                num_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                end_of_text=self.tokenizer.end_of_text,
                agree=self.trainer.strategy.broadcast,
            )
        return self.tokenizer.decode(tokens)

    recipes_generate_text = generate_text  # for the callback that samples
