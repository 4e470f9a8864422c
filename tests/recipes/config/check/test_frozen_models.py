"""A frozen model is an option of model at a place that the task names; what cannot hold it is one sentence."""

from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.check.origin import check_origin

TYPED = ("task=distillation", "model@teacher=llama_nano", "teacher.pretrained=hub/teacher")


def messages(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


def test_a_teacher_is_an_option_of_model() -> None:
    assert messages(*TYPED) == []
    assert messages(*TYPED, "strategy=fsdp", "trainer.devices=2") == []
    assert messages(*TYPED, "strategy=deepspeed_stage_2", "trainer.devices=2") == []
    assert messages(*TYPED, "strategy=ddp", "context_parallel_size=2", "trainer.devices=2") == []
    assert messages("task=distillation", "model@teacher=llama_nano", "mode=plan") == [], "a plan reads no weights"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "model@teacher=gpt2_nano",
            "model@teacher=gpt2_nano: the task of this run asks no teacher;"
            " type task=distillation model@teacher=gpt2_nano",
        ),
        ("model@judge=gpt2_nano", "model@judge=gpt2_nano: the task of this run asks no judge; type model=gpt2_nano"),
        (
            "task=distillation model@teacher=lama_nano teacher.vocab_size=2048 teacher.pretrained=hub/teacher",
            "model@teacher=lama_nano: there is no option 'lama_nano' of model; type model@teacher=llama_nano",
        ),
        (
            "task=distillation model@teacher=llama_nano",
            "teacher.pretrained=null: a teacher whose weights are drawn from the seed knows nothing;"
            " type teacher.pretrained=<folder or hub name>, such as what mode=export writes of a run",
        ),
        (
            "task=distillation model@teacher=gpt2_nano teacher.pretrained=hub/teacher teacher.vocab_size=64",
            "teacher.vocab_size=64 model.vocab_size=2048: what the teacher predicts over its tokens says nothing of"
            " others; type model.vocab_size=64, with the tokenizer of the teacher",
        ),
        (
            "task=distillation model@teacher=gpt2_nano teacher.pretrained=hub/teacher teacher.max_seq_len=64",
            "seq_len=128: the teacher reads the same samples, and accepts at most teacher.max_seq_len=64 tokens;"
            " type seq_len=64",
        ),
        (
            f"{' '.join(TYPED)} strategy=deepspeed_stage_3 trainer.devices=2",
            "strategy=deepspeed_stage_3 task=distillation: ZeRO-3 gathers the weights of the model that it trains, and"
            " of no teacher beside it; type strategy=fsdp, which shards both",
        ),
        (
            f"{' '.join(TYPED)} strategy=fsdp trainer.devices=2 pipeline_parallel_size=2 micro_batch_size=4",
            "pipeline_parallel_size=2 task=distillation: a pipeline splits the trained model into stages, and the last"
            " one would lack the teacher; type pipeline_parallel_size=1",
        ),
        (
            f"{' '.join(TYPED)} strategy=fsdp trainer.devices=2 tensor_parallel_size=2",
            "tensor_parallel_size=2 task=distillation: the teacher is sharded over the ranks of strategy=fsdp only;"
            " type tensor_parallel_size=1",
        ),
        (
            f"{' '.join(TYPED)} mode=plan plan.search=true plan.hardware=h100x8",
            "plan.search=true task=distillation: a search places the trained model, and no teacher beside it;"
            " type plan.search=false",
        ),
        (
            f"{' '.join(TYPED)} task.temperature=0",
            "task.temperature=0: it must be above 0; type task.temperature=<above 0>",
        ),
    ],
)
def test_what_does_not_work_is_one_sentence(typed: str, message: str) -> None:
    assert message in messages(*typed.split())


def test_a_run_folder_may_name_a_model_of_this_project_as_teacher_and_nothing_else(tmp_path: Path) -> None:
    composed, _ = compose_and_check(TYPED)
    assert composed is not None
    config = composed.config
    assert list(check_origin(config, [], tmp_path / "config.yaml")) == []
    forged = config | {"teacher": config["teacher"] | {"_target_": "os.system"}}
    assert [mistake.setting for mistake in check_origin(forged, [], tmp_path / "config.yaml")] == [
        "teacher._target_=os.system"
    ]
