"""Heads that read a number from hidden states: of a reward model, that of a text; of a policy, the value of each token.

They are children of the language model, whose other weights keep their names, so that published weights and those of
other runs load as they do without them.

Shapes: R rows of T tokens, W hidden size.
"""

import copy
import functools
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.data.packed_batch import Packing, find_positions, pack_tokens
from recipes.errors import ConfigError
from recipes.model.init import INIT_STD, VALUE_WEIGHT, constant_, named_parameters, normal_
from recipes.parallel.tensor import TensorRanks

SCORE_WEIGHT = "score.weight"
OF_HEADS = (SCORE_WEIGHT, VALUE_WEIGHT)  # which a language model is published without


class Score(nn.Module):
    """Hidden states [R, W] -> scores [R] float32, in whichever precision the model computes.

    Args:
        hidden_size: W.

    Attributes:
        ranks: Tensor-parallel ranks, each of which computes all scores; None: there are none.
    """

    ranks: TensorRanks | None = None

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.ranks is not None:
            # each rank has the whole gradient: of the weight it is that of one rank, and of hidden states, whose
            # gradient is summed over the ranks where they were gathered, a share
            weight = weight.to_local(grad_placements=weight.placements)
            if hidden.requires_grad:
                hidden.register_hook(functools.partial(torch.mul, other=1 / self.ranks.size))
        scores: Tensor = (hidden.float() * weight.float()).sum(dim=-1)
        return scores

    def estimate(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the values of tokens [R, T], [R T] float32, from the hidden states [R T, W] of the policy."""
        values: Tensor = self(hidden)
        return values


def attach_score(model: nn.Module) -> None:
    """Add a score to a language model, in place, and freeze the head that predicts tokens, which it does not use.

    Raises:
        ConfigError: The model does not give its hidden states.
    """
    _check_gives_hidden(model, "score", "reward")
    untyped: Any = model
    inner, head = getattr(model, "inner", None), _get_head(model)
    embedding = untyped.embedding if inner is None else inner.get_input_embeddings()
    untyped.score = Score(head.weight.shape[1])
    if hasattr(model, "tensor_parallel"):
        untyped.tensor_parallel = {**untyped.tensor_parallel, "score": "norm"}
    if head.weight is not embedding.weight:
        head.requires_grad_(False)


class ValueModel(Score):
    """Values from hidden states of its own: of a second model, which begins with the weights of the policy.

    It is called within the forward pass of the policy, which is one for every engine.

    Args:
        trunk: The second model; its head is not used.
        hidden_size: W.
    """

    def __init__(self, trunk: nn.Module, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.trunk = trunk

    @override
    def estimate(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        found: Tensor = self.trunk(tokens, reduce=lambda own, weight: self(own).flatten())  # [R T]
        return found


def attach_value(model: nn.Module, *, value: Literal["head", "model"]) -> None:
    """Add the value of each token to a language model, in place: an estimate of the rewards that follow it.

    Args:
        model: On the meta device.
        value: Whether it is read from the hidden states of the model, or those of a second one.

    Raises:
        ConfigError: The model does not give its hidden states.
    """
    _check_gives_hidden(model, "value", "actor_critic")
    untyped: Any = model
    hidden_size = _get_head(model).weight.shape[1]
    if value == "head":
        untyped.value = Score(hidden_size)
        return
    trunk: Any = copy.deepcopy(model)
    trunk.is_of_values = True
    embedding = trunk.inner.get_input_embeddings() if hasattr(trunk, "inner") else trunk.embedding
    if _get_head(trunk).weight is not embedding.weight:
        _get_head(trunk).requires_grad_(False)
    untyped.value = ValueModel(trunk, hidden_size)


def drop_value(model: nn.Module) -> None:
    """Remove the value from a language model, in place; nothing of one that has none."""
    if isinstance(getattr(model, "value", None), Score):
        del model.value


def _check_gives_hidden(model: nn.Module, what: str, task: str) -> None:
    untyped: Any = model
    gives_hidden = "reduce" in inspect.signature(untyped.forward).parameters
    if not gives_hidden or not getattr(model, "computes_loss_in_chunks", True):
        name = getattr(model, "title", type(model).__name__)
        reason = f"a {what} is computed from hidden states, and those of {name} are not known here"
        fix = "model=gpt2, llama_1b, or another model of model=huggingface"
        raise ConfigError(f"task={task} model=…", reason, fix)


def has_score(model: nn.Module) -> bool:
    """Return whether a model is a reward model."""
    return isinstance(getattr(model, "score", None), Score)


def uses_head(model: nn.Module) -> bool:
    """Return whether a model predicts tokens: not one of rewards or values."""
    return not has_score(model) and not getattr(model, "is_of_values", False)


def list_unused(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a model of rewards or values does not use, and has frozen."""
    value = getattr(model, "value", None)
    if isinstance(value, ValueModel):
        return {f"value.trunk.{name}" for name in list_unused(value.trunk)}
    if uses_head(model):
        return set()
    of_head = {id(weight) for weight in _get_head(model).parameters() if not weight.requires_grad}
    return {name for name, weight in model.named_parameters() if id(weight) in of_head}


def _get_head(model: Any) -> Any:
    """Return what predicts tokens."""
    return model.inner.get_output_embeddings() if hasattr(model, "inner") else model.head


def init_heads(model: nn.Module, *, seed: int) -> None:
    """Draw the weight of the score, if the model has one, from the seed and its name; set that of the value to 0.

    The first values are 0, so that the first advantages are those of the rewards alone.
    """
    for name, parameter in named_parameters(model):
        if name == SCORE_WEIGHT:
            normal_(parameter, name=name, seed=seed, std=INIT_STD)
        elif name == VALUE_WEIGHT:
            constant_(parameter, 0.0)


def compute_rewards(model: nn.Module, tokens: Tensor, last: Tensor, *, packing: Packing | None = None) -> Tensor:
    """Return the reward of each text, [R] float32.

    Args:
        model: Reward model, as of a run of task=reward.
        tokens: [R, T] int64, padded at the end.
        last: [R] int64, position of the last token of each text, that which ends the answer.
        packing: Rows in which the model reads the tokens; None: as they are.
    """
    options = {} if packing is None else {"positions": find_positions(packing)}

    def read(hidden: Tensor, weight: Tensor) -> Tensor:
        untyped: Any = model
        rows = torch.arange(len(last), device=hidden.device)
        states = hidden[rows, last] if packing is None else hidden.flatten(0, 1)[packing["places"][rows, last]]
        scores: Tensor = untyped.score(states)  # of [R, W]
        return scores

    rewards: Tensor = model(tokens if packing is None else pack_tokens(tokens, packing), reduce=read, **options)
    return rewards
