"""Reward models: a language model that gives a text one number, higher for the better of two answers.

Shapes: B pairs, R = 2 B rows of T inputs, the chosen answer of each pair first.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from recipes.loss import Term
from recipes.loss.preference import BradleyTerry
from recipes.model.score import compute_rewards
from recipes.numerics.loss import IGNORE_INDEX
from recipes.task.base import Batch
from recipes.task.language_modeling import LanguageModeling


class RewardModeling(LanguageModeling):
    """Trains a language model with a score, which the loss compares between the answers of a pair.

    The score is read at the token that ends the answer, such as the end of the text or of the turn; of an answer that
    is cut, at its last token. Arguments: see `TrainingTask`.

    Attributes:
        attaches: What is added to the model, see `recipes.config.instantiate.make_model`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"export"})
    attaches: ClassVar[str] = "recipes.model.score.attach_score"
    loss: BradleyTerry

    @override
    def outputs(self, batch: Batch) -> Tensor:
        longest: int = getattr(self.model, "max_seq_len") if self.source is None else self.source.seq_len  # noqa: B009
        packing = batch.get("packing", {}).get("inputs")
        tokens, last = complete_rows(batch["inputs"], batch["targets"], max_seq_len=longest)
        rewards: Tensor = compute_rewards(self.model, tokens, last, packing=packing).unflatten(0, (-1, 2))  # [B, 2]
        return rewards

    @override
    def _without_padding(self, outputs: Any) -> Any:
        return outputs

    @override
    def own_terms(self, batch: Batch) -> list[Term]:
        return self.loss(self.outputs(batch), batch)

    @override
    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return self.loss.per_sample(self.outputs(batch), batch)

    @override
    def recipes_generate_text(self, *prompt: Any, **options: Any) -> str | None:
        """Return None: the head that predicts tokens is not trained."""
        return None

    @override
    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        rewards = self.outputs(batch)  # [B, 2]
        chosen, rejected = rewards.unbind(dim=1)
        return {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "loss": self.loss.per_sample(rewards, batch),
        }


def complete_rows(inputs: Tensor, targets: Tensor, *, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """Return rows that hold the end of their answer, and its position, [R, T + 1] and [R] int64.

    Inputs of next-token prediction leave out the last token of a text, which is only predicted. The answer ends with
    its last target. Rows of more than `max_seq_len` tokens lose what is beyond, and end where they are cut.

    Args:
        inputs: [R, T], padded at the end.
        targets: [R, T], the token after each input, `IGNORE_INDEX` outside of the answer.
        max_seq_len: Most tokens of a row.
    """
    places = torch.arange(inputs.shape[1], device=inputs.device)  # [T]
    before = torch.where(targets != IGNORE_INDEX, places, 0).amax(dim=1)  # [R], the last position that has a target
    end = targets.gather(1, before[:, None]).clamp(min=0)  # [R, 1]; a row without targets carries no loss
    tokens = torch.cat([inputs, torch.zeros_like(end)], dim=1).scatter(1, before[:, None] + 1, end)
    return tokens[:, :max_seq_len], (before + 1).clamp(max=max_seq_len - 1)
