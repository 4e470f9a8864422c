"""Images with captions: one gradient for two passes, retrieval over a split, mistakes before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captioned_images import caption_each, encode_noise, write_csv, write_images
from loss_cases import Captioned
from support import composed_config, resolved
from torch import Tensor

from recipes.build import build
from recipes.config import compose_and_check
from recipes.data.image_file import decode

SMALL = [
    *("trainer.accelerator=cpu", "trainer.max_steps=2", "global_batch_size=8", "micro_batch_size=4", "warmup_steps=0"),
    *("callbacks=[grad_norm]", "eval_every=2", "eval_samples=null", "log_every=1", "save_every=null"),
]
UNREAD = ("num_classes", "in_channels", "image_size", "random_crop_padding", "random_horizontal_flip", "targets")
OF_CAPTIONS = [
    *("model=resnet18", "~model.small_images", "model._target_=loss_cases.TwoEncoders", "data=random_images"),
    *("data._target_=loss_cases.Captioned", *(f"~data.{setting}" for setting in UNREAD), "data.num_samples=20"),
    *("model.in_channels=1", "model.num_classes=8", "+model.dropout=0.5", "task=image_text"),
]


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_two_passes_have_the_gradient_of_the_whole_batch_with_the_same_dropout(loss: str, tmp_path: Path) -> None:
    config = composed_config(*SMALL, *OF_CAPTIONS, f"loss={loss}")
    config["task"] |= {"_target_": "loss_cases.PairsAtOnce"}
    run = build(resolved(config, tmp_path))
    run.trainer.fit(run.task, datamodule=run.data)
    task: Any = run.task
    assert set(task.differences) == {name for name, _ in task.model.named_parameters()} - (
        {"logit_bias"} if loss == "clip" else set()  # which changes no softmax
    )
    assert max(task.differences.values()) < 1e-5, task.differences


def test_a_validation_retrieves_among_different_images_and_captions_of_the_split(tmp_path: Path) -> None:
    run = build(resolved(composed_config(*SMALL, *OF_CAPTIONS, "~model.dropout"), tmp_path))
    [found] = run.trainer.validate(run.task, datamodule=run.data, verbose=False)
    data = Captioned(num_samples=20)
    pairs = [data[index] for index in range(20) if data[index]["targets"] == 0]
    model: Any = run.task.model
    inputs = (torch.stack([pair[name] for pair in pairs]) for name in ("inputs", "tokens", "is_token"))
    with torch.no_grad():
        images, captions, _, _ = model(*inputs)
    cosines = F.normalize(images, dim=-1) @ F.normalize(captions, dim=-1).T  # [N, N]
    texts = [int(pair["caption"]) for pair in pairs]
    assert len(set(texts)) < len(texts), "one caption is there twice"
    ranks = [
        len({texts[j] for j in range(len(texts)) if texts[j] != texts[i] and cosines[i, j] >= cosines[i, i]})
        for i in range(len(texts))
    ]
    recall = sum(rank < 5 for rank in ranks) / len(ranks)
    assert 0 < recall < 1
    assert found["val/image_to_caption_recall_5"] == pytest.approx(recall)
    different = sorted(set(texts))
    of_captions = []
    for text in different:
        j = texts.index(text)
        best = max(cosines[i, j] for i in range(len(texts)) if texts[i] == text)
        of_captions.append(sum(bool(cosines[i, j] >= best) for i in range(len(texts)) if texts[i] != text))
    assert found["val/caption_to_image_recall_1"] == pytest.approx(sum(r < 1 for r in of_captions) / len(different))
    median = torch.tensor(of_captions, dtype=torch.float64).quantile(0.5).item() + 1
    assert found["val/caption_to_image_median_rank"] == pytest.approx(median)
    measures = run.task.list_measures()
    assert measures["val/image_to_caption_recall_1"] is True
    assert measures["val/caption_to_image_median_rank"] is False
    assert {name for name in found if name.startswith("val/")} <= set(measures)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["loss=nt_xent"],
            "loss=nt_xent task=image_text: it does not compare images with captions; type loss=clip, or loss=siglip",
        ),
        (
            ["global_batch_size=1", "micro_batch_size=null"],
            "global_batch_size=1: an image is compared with the others of its global batch; type"
            " global_batch_size=256, or more",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_mistake_of_the_config(typed: list[str], message: str) -> None:
    _, mistakes = compose_and_check([*OF_CAPTIONS, *SMALL, *typed])
    assert message in map(str, mistakes)


def test_a_loss_of_captions_is_refused_where_there_are_none() -> None:
    _, mistakes = compose_and_check(["model=resnet18", "loss=siglip", *SMALL])
    reason = "loss=siglip task=classification: it compares images with captions, and this task reads none"
    assert f"{reason}; type recipe=clip, or another loss" in map(str, mistakes)


def test_metrics_of_retrieval_and_of_a_folder_in_use_can_be_monitored(tmp_path: Path) -> None:
    monitored = ["checkpoint.keep_best=1", "checkpoint.mode=max", "save_every=2", "checkpoint.monitor="]
    quick = ["recipe=clip_quickstart", "trainer.max_steps=2", "warmup_steps=0", "eval_every=2", *monitored[:-1]]
    for name in ("image_to_caption_recall_1", "caption_to_image_accuracy"):
        assert not compose_and_check([*quick, f"checkpoint.monitor=val/{name}"])[1]
    zero_shot = [*quick, "checkpoint.monitor=val/zero_shot_accuracy"]
    assert not compose_and_check([*zero_shot, f"callbacks.zero_shot.path={tmp_path}"])[1]
    _, [mistake] = compose_and_check(zero_shot)  # it is off
    assert str(mistake).startswith("checkpoint.monitor=val/zero_shot_accuracy: validation computes val/loss")


def test_images_are_not_classified_by_a_task_without_captions() -> None:
    typed = ["model=resnet18", "data=digits", "callbacks=[zero_shot]", "callbacks.zero_shot.path=x"]
    _, mistakes = compose_and_check(typed)
    assert (
        "callbacks.zero_shot.path=x task=classification: it needs a task that reads images_and_text, and this one reads"
        " images or tensors; type callbacks.zero_shot.path=null, or recipe=clip"
    ) in map(str, mistakes)


def test_a_validation_classifies_and_shows_what_it_finds(tmp_path: Path) -> None:
    names = write_images(tmp_path / "images", 24)
    captions = caption_each(24)
    rows = [(f"images/{name}", text) for name, texts in zip(names, captions, strict=True) for text in texts]
    table = write_csv(tmp_path / "table.csv", rows)
    for number in range(12):
        folder = tmp_path / "classes" / f"kind_{number % 6}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(encode_noise(number))
    config = composed_config(
        *("recipe=clip_quickstart", "data=image_text", f"data.path={table}", "data.val_fraction=0.5"),
        *("trainer.accelerator=cpu", "trainer.max_steps=1", "warmup_steps=0", "global_batch_size=5", "eval_every=1"),
        *("save_every=null", "model.max_seq_len=24", "model.in_channels=3", "model.image_size=32"),
        *("transform.mean=[0.5,0.5,0.5]", "transform.std=[0.5,0.5,0.5]", f"data.cache_dir={tmp_path}/cache"),
        *(f"callbacks.zero_shot.path={tmp_path}/classes", "callbacks.zero_shot.templates=['{}','a {}']"),
    )
    run = build(resolved(config, tmp_path / "run"))
    [found] = run.trainer.validate(run.task, datamodule=run.data, verbose=False)
    model, source = run.task.model.eval(), run.data.source

    def encode(texts: list[str]) -> Tensor:
        tokens, is_token = map(torch.stack, zip(*map(source.encode_caption, texts), strict=True))
        return F.normalize(model(None, tokens, is_token)[1], dim=-1)

    with torch.no_grad():
        classes = [encode([f"kind {number}", f"a kind {number}"]).mean(dim=0) for number in range(6)]
        files = sorted((tmp_path / "classes").rglob("*.png"))
        images = torch.stack([source.transform(decode(file.read_bytes(), 3)) for file in files])
        cosines = F.normalize(model(images, None, None)[0], dim=-1) @ F.normalize(torch.stack(classes), dim=-1).T
        own = torch.tensor([int(file.parent.name[-1]) for file in files])
        ranks = cosines.argsort(dim=1, descending=True).eq(own[:, None]).float().argmax(dim=1)
        assert found["val/zero_shot_accuracy"] == pytest.approx(float((ranks < 1).double().mean()))
        assert found["val/zero_shot_accuracy_top5"] == pytest.approx(float((ranks < 5).double().mean()))

        record = json.loads((tmp_path / "run" / "retrieval_val.json").read_text())
        split = source.val()
        num_images = len({int(split[pair]["image"]) for pair in range(len(split))})
        assert (record["num_images"], record["num_captions"]) == (num_images, len(split))
        every = torch.stack([split[pair]["inputs"] for pair in range(len(split))])[::2]
        of_images = F.normalize(model(every, None, None)[0], dim=-1)
        assert len(record["captions"]) == len(record["images"]) == min(8, num_images)
        known = [text for texts in captions for text in texts]
        for query in record["captions"]:
            cosines = (encode([query["text"]]) @ of_images.T)[0]
            assert [each["cosine"] for each in query["images"]] == pytest.approx(
                cosines.topk(5).values.tolist(), abs=1e-5
            )
            assert query["text"] in known
            assert sum(each["is_own"] for each in query["images"]) == (query["rank"] <= 5)
        for query in record["images"]:
            assert [each["text"] in known for each in query["captions"]] == [True] * 5
            ranks_of_own = [place + 1 for place, each in enumerate(query["captions"]) if each["is_own"]]
            assert ranks_of_own[:1] == [query["rank"]] * (query["rank"] <= 5)
