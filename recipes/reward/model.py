"""Score completions with a reward model: that of a run of `recipe=reward_model`, or a published one of its form.

It reads the tokens that the policy has read and sampled, so that its tokenizer has to be the policy's. The score is
that of the last of them: the token that ends the completion, or the one at which it is cut, as in its own training.

Shapes: R rows of T tokens, W hidden size.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from recipes.errors import ConfigError
from recipes.reward.model_folder import ANOTHER_TOKENIZER, SETTING, find_export


class RewardModel:
    """Gives each completion the number that a reward model computes for it after its prompt.

    The model has one score, as `AutoModelForSequenceClassification` of transformers loads it and `mode=export` writes
    that of a run. Its frozen weights are in the memory of the process that calls it, in the dtype of their files.

    Args:
        pretrained: Folder of such a model, or a run whose `export` it is, or a hub name.
        weight: Factor in the sum of all rewards.
        rows_at_a_time: Completions that it reads at a time.
        device: `auto` for the GPU of the rank, if that has one; or `cpu`.

    Attributes:
        pretrained: Folder or hub name of the model.
        uses_gpu: Whether its process is to see the GPU of the rank.
    """

    reads_tokens: ClassVar[bool] = True

    def __init__(
        self,
        *,
        pretrained: str,
        weight: Annotated[float, ">= -1000, <= 1000"],
        rows_at_a_time: Annotated[int, ">= 1"],
        device: Literal["auto", "cpu"],
    ) -> None:
        self.weight = weight
        self.pretrained = find_export(pretrained)
        self.uses_gpu = device == "auto"
        self._rows_at_a_time = rows_at_a_time
        self._model: Any = None
        self._device: Any = None

    def check_tokens(self, own: Any) -> None:
        """Check that a tokenizer gives the tokens of texts and of chats that the model was trained on.

        Args:
            own: `recipes.tokenizer.Tokenizer` of the policy, with its chat template.

        Raises:
            ConfigError: It is another one, or its chat template is.
        """
        from recipes.model.weights.files import locate
        from recipes.tokenizer import read_folder

        folder = locate(self.pretrained)
        setting = f"{SETTING}={self.pretrained}"
        if not own.shares_vocabulary(folder):
            raise ConfigError(setting, *ANOTHER_TOKENIZER)
        if read_folder(folder).chat_template != own.chat_template:
            reason = "it was trained with another chat template than that of the prompts here"
            raise ConfigError(setting, reason, "data.chat_template=<that of its training>")

    def load(self) -> None:
        """Read the weights.

        Raises:
            ConfigError: They are not there, damaged, or not those of a language model with one score.
        """
        import torch  # lazy, as below: a rank has it, and who only constructs this class need not

        from recipes.model.weights.files import locate, open_weights
        from recipes.model.weights.hf_reward import load_classifier

        try:
            with open_weights(folder := locate(self.pretrained)):  # whose errors say what is wrong with a file
                model = load_classifier(folder, expected_missing=())
        except ConfigError as error:
            fix = f"{SETTING}=<what mode=export resume=<a run of recipe=reward_model> writes>"
            raise ConfigError(f"{SETTING}={self.pretrained}", error.reason, fix) from error
        self._device = torch.device("cuda" if self.uses_gpu and torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval().requires_grad_(False)

    def __call__(self, *, tokens: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Return the score of each row of tokens."""
        scores: list[float] = []
        for start in range(0, len(tokens), self._rows_at_a_time):
            scores += self._score(tokens[start : start + self._rows_at_a_time])
        return scores

    def _score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        last = torch.tensor([len(row) for row in rows]) - 1  # [R]
        places = torch.arange(int(last.max()) + 1)  # [T]
        inputs = torch.zeros(len(rows), len(places), dtype=torch.int64)
        for row, tokens in enumerate(rows):
            inputs[row, : len(tokens)] = torch.tensor(tokens)
        is_real = (places <= last[:, None]).to(self._device, torch.int64)
        with torch.inference_mode():
            found = self._model.base_model(input_ids=inputs.to(self._device), attention_mask=is_real, use_cache=False)
            states = found.last_hidden_state[torch.arange(len(rows)), last.to(self._device)]  # [R, W]
            # not by the head itself: scores of half precision would be equal within many groups
            scores = (states.float() * self._model.score.weight.float()).sum(dim=-1)  # [R]
        values: list[float] = scores.tolist()
        return values
