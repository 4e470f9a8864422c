"""SampleText: its calls of `recipes_generate_text`, its file, and that training is not affected."""

import json
import random
import re
from typing import Any

import pytest
import torch

from callbacks.sample_text import SampleText, framed


def make_sampler(**changes: Any) -> SampleText:
    arguments: dict[str, Any] = {
        "prompts": ["a", "b"],
        "num_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": None,
        "every_n_steps": None,
    }
    return SampleText(**{**arguments, **changes})


def make_writer(base: type, text: str | None = "<{prompt}>") -> Any:
    """Make a module that generates text, and uses random numbers to do so."""

    class Writer(base):  # type: ignore[misc]
        calls: list[Any]

        def recipes_generate_text(self, prompt: str, num_tokens: int, **options: Any) -> str | None:
            self.calls.append((prompt, num_tokens, options, self.training, torch.is_grad_enabled()))
            torch.manual_seed(options["seed"])
            torch.rand(5)
            random.random()
            return None if text is None else text.format(prompt=prompt)

    module = Writer()
    module.calls = []
    return module


def read_samples(folder: Any) -> list[Any]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").open()]


def test_the_end_of_training_is_sampled_once(plain_module, make_trainer, tmp_path) -> None:
    module = make_writer(plain_module)
    make_trainer(callbacks=[make_sampler()]).fit(module)
    options = {"temperature": 0.5, "top_k": 4, "top_p": None, "seed": 0}
    assert module.calls == [("a", 3, options, False, False), ("b", 3, options, False, False)]
    assert read_samples(tmp_path) == [
        {"step": 8, "prompt": "a", "text": "<a>"},
        {"step": 8, "prompt": "b", "text": "<b>"},
    ]


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 8]), (4, [4, 8]), (100, [8])])
def test_samples_come_every_n_steps_and_at_the_end_but_no_step_twice(
    plain_module, make_trainer, tmp_path, every, steps
) -> None:
    module = make_writer(plain_module)
    trainer = make_trainer(callbacks=[make_sampler(prompts=["a"], every_n_steps=every)])
    trainer.fit(module)
    assert [line["step"] for line in read_samples(tmp_path)] == steps


def test_sampling_restores_random_states_and_modes(plain_module, make_trainer) -> None:
    module = make_writer(plain_module)
    module.frozen = torch.nn.Dropout().eval()  # a part that its owner keeps in eval mode
    trainer = make_trainer(callbacks=[make_sampler()], max_steps=1)
    states = []
    random.seed(1)
    torch.manual_seed(1)
    module.on_train_start = lambda: states.append((torch.get_rng_state(), random.getstate()))
    module.on_fit_end = lambda: states.append((torch.get_rng_state(), random.getstate()))
    trainer.fit(module)
    assert len(module.calls) == 2
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert module.training
    assert not module.frozen.training


@pytest.mark.parametrize("silent", ["no method", "None"])
def test_a_model_without_text_writes_no_samples(plain_module, make_trainer, tmp_path, caplog, silent) -> None:
    module = plain_module() if silent == "no method" else make_writer(plain_module, text=None)
    make_trainer(callbacks=[make_sampler(every_n_steps=2)]).fit(module)
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert caplog.text.count("pass generate_fn to SampleText") == (silent == "no method")


def test_a_function_generates_for_a_module_of_any_kind(plain_module, make_trainer, tmp_path) -> None:
    calls: list[Any] = []

    def generate(module: Any, prompt: str, num_tokens: int, **options: Any) -> str:
        calls.append((module, num_tokens, options, module.training, torch.is_grad_enabled()))
        return f"{torch.rand(()).item():.4f}"

    module = plain_module()
    make_trainer(callbacks=[make_sampler(generate_fn=generate, every_n_steps=4)]).fit(module)
    options = {"temperature": 0.5, "top_k": 4, "top_p": None, "seed": 0}
    assert calls == [(module, 3, options, False, False)] * 4
    torch.manual_seed(0)
    assert {line["text"] for line in read_samples(tmp_path)} == {f"{torch.rand(()).item():.4f}"}


def test_a_run_without_a_folder_still_logs_its_sample(
    plain_module, make_trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning_recipes")
    make_trainer(callbacks=[make_sampler(prompts=["a"])], logger=False).fit(make_writer(plain_module))
    assert [record.getMessage() for record in caplog.records if "sample" in record.msg % record.args]
    assert "<a>" in caplog.text


def test_both_rules_of_a_frame_are_equally_wide() -> None:
    top, text, bottom = framed("one line\n\n", title="sample at step 8").split("\n")
    assert (len(top), text, len(bottom)) == (78, "one line", 78)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"every_n_steps": 0}, "set None to sample only at the end"),
        ({"num_tokens": 0}, "set num_tokens=128"),
        ({"temperature": -1.0}, "set 0"),
        ({"top_k": 0}, "set None"),
        ({"top_p": 1.5}, "set None"),
        ({"prompts": "Once"}, "set prompts=['Once']"),
    ],
)
def test_an_argument_outside_its_range_is_an_error_that_says_what_to_set(wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        make_sampler(**wrong)


def test_a_method_of_another_kind_named_generate_text_is_not_called(plain_module, make_trainer) -> None:
    class Own(plain_module):  # type: ignore[misc, valid-type]
        def generate_text(self, ids: torch.Tensor) -> None:
            raise AssertionError("called")

    make_trainer(callbacks=[make_sampler()], max_steps=1).fit(Own())


def test_there_is_no_state_to_save() -> None:
    assert make_sampler().state_dict() == {}
