"""Reinforcement learning with values: a policy predicts the rewards of each token, which advantages are measured by.

Shapes: R completions of this rank; T tokens of a row, of at most W.
"""

from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from recipes.loss.ppo import PPO
from recipes.numerics.loss import IGNORE_INDEX
from recipes.task.policy import PolicyTuning


class ActorCritic(PolicyTuning):
    """Trains a language model on the rewards of its completions, and a value of each token.

    The value of a token is a linear function of the hidden state before it, and begins at 0: of the policy, or of a
    second model with the first weights of the policy, whose training does not touch the policy. It is computed in the
    forward pass that computes log-probabilities.

    Args:
        value: `head` on the policy, or `model`, a second one of its size.
        **settings: See `PolicyTuning`.

    Attributes:
        attaches: What is added to the model, see `recipes.config.instantiate.make_model`.
    """

    attaches: ClassVar[str] = "recipes.model.score.attach_value"
    of_tokens_names: ClassVar[tuple[str, ...]] = (
        *PolicyTuning.of_tokens_names,
        *("advantages", "returns", "old_values"),
    )
    loss: PPO

    def __init__(self, *, value: Literal["head", "model"], **settings: Any) -> None:
        super().__init__(**settings)
        self._value = value  # the model is made with it, see `attaches`

    @override
    def _judge(self, rows: dict[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
        host = {
            name: rows[name].cpu() for name in ("rewards", "is_truncated", "targets", "old_values", "old_log_probs")
        }
        reference = rows.get("reference_log_probs")
        found = self.loss.estimate(
            host["rewards"],
            host["is_truncated"],
            host["targets"] != IGNORE_INDEX,
            values=host["old_values"],
            log_probs=host["old_log_probs"],
            reference=None if reference is None else reference.cpu(),
            sum_over_ranks=lambda values: self.engine.sum_over_data_ranks(values.to(self.device)).cpu(),
        )
        self._row |= found.logged
        return {"advantages": found.advantages.to(self.device), "returns": found.returns.to(self.device)}

    # A weight of the divergence that follows a target is part of the train state.

    @property
    def _adapts(self) -> bool:
        return isinstance(self.loss, PPO) and self.loss.adapts  # whoever loads weights alone gives another loss

    @override
    def recipes_live_scalars(self) -> dict[str, Any]:
        return super().recipes_live_scalars() | ({"kl_weight": self.loss.kl_weight} if self._adapts else {})

    @override
    def recipes_restore_scalars(self, scalars: dict[str, Any]) -> None:
        super().recipes_restore_scalars(scalars)
        if self._adapts and "kl_weight" in scalars:  # else that of the config is the first one
            self.loss.kl_weight = scalars["kl_weight"]
