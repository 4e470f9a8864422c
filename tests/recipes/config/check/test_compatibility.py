"""The settings proposed where two of a model's sizes do not fit together."""

from pathlib import Path

import pytest
from support import resolved

from recipes.config import compose_and_check
from recipes.config.check.compatibility import _nearest_divisor, _published_weights


class CountedInt(int):
    """Counts how often it is divided."""

    num_divisions = 0

    def __mod__(self, other: int) -> int:
        self.num_divisions += 1
        return int(self) % other


@pytest.mark.parametrize(
    ("number", "wanted", "nearest"), [(768, 11, 12), (768, 5, 4), (99_999_999, 4, 3), (99_999_989, 512, 1), (6, 9, 6)]
)
def test_the_nearest_divisor_of_any_number_is_found_in_twice_as_many_tries_as_it_is_large(
    number: int, wanted: int, nearest: int
) -> None:
    counted = CountedInt(number)
    assert _nearest_divisor(counted, wanted) == nearest
    assert counted.num_divisions <= 2 * wanted


def test_a_published_model_without_a_name_is_one_mistake() -> None:
    typed = ["model=huggingface", "data=token_file", "data.path=setup.py", "data.val_path=setup.py"]
    assert [mistake.setting for mistake in compose_and_check(typed)[1]] == ["model.name=null"]


def test_published_weights_are_looked_for_before_their_tokenizer(tmp_path: Path) -> None:
    model = {"_target_": "recipes.model.llama.Llama", "pretrained": "/nowhere"}
    config = {"model": model, "tokenizer": {"_target_": "recipes.tokenizer.bytes.Bytes"}, "resume": None}
    config |= {"start_from": None}
    [mistake] = _published_weights(resolved(config, tmp_path))
    assert (mistake.setting, mistake.reason) == ("model.pretrained=/nowhere", "there is no such folder")
    assert mistake.fix.endswith("; beside model.pretrained, tokenizer=huggingface tokenizer.name=<the same>")
    resumed = resolved(config | {"resume": "auto"}, tmp_path)
    assert len([*_published_weights(resumed)]) == 1
    (tmp_path / "checkpoints" / "step_0000001.ckpt").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_0000001.ckpt" / "manifest.json").touch()
    assert not [*_published_weights(resumed)], "the checkpoint replaces them"


@pytest.mark.parametrize(
    "typed",
    [
        "model=llama_nano model.hidden_size=200 model.num_heads=6 model.num_kv_heads=6 model.head_dim=32",
        "model=deepseek_nano model.num_heads=5 model.num_kv_heads=5",
    ],
)
def test_heads_of_their_own_size_need_not_divide_the_hidden_size(typed: str) -> None:
    assert compose_and_check(typed.split())[1] == []
