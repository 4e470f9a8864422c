"""A folder of weights is located, checked for completeness and read; missing files are named."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipes.config.published import read_size
from recipes.errors import ConfigError
from recipes.model.weights import files as published_weights
from recipes.model.weights.files import locate, open_weights


def test_safetensors_are_preferred_to_pickles_and_read_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with open_weights(tmp_path) as weights:
        assert weights.names() == {"a"}
        assert torch.equal(weights.read("a"), torch.ones(2))


class Stop:
    """Would end the process where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def header(tensors: dict[str, Any], *, num_bytes: int = 8) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def pickled(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


INFO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4321\n"
INDEX = "model.safetensors.index.json"
DAMAGED: dict[str, tuple[str, bytes]] = {
    "nothing": ("model.safetensors", b""),
    "four bytes": ("model.safetensors", b"abcd"),
    "pointer": ("model.safetensors", POINTER),
    "page": ("model.safetensors", b"<!DOCTYPE html><html>404</html>"),
    "long header": ("model.safetensors", b"\xff" * 64),
    "no JSON": ("model.safetensors", (4).to_bytes(8, "little") + b"{{{{"),
    "cut": ("model.safetensors", header({"a": INFO})[:-4]),
    "overlap": ("model.safetensors", header({"a": INFO, "b": INFO})),
    "beyond the end": ("model.safetensors", header({"a": INFO | {"data_offsets": [0, 80]}})),
    "other dtype": ("model.safetensors", header({"a": INFO | {"dtype": "F99"}})),
    "empty pickle": ("pytorch_model.bin", b""),
    "pickle pointer": ("pytorch_model.bin", POINTER),
    "cut pickle": ("pytorch_model.bin", pickled({"a": torch.ones(2)})[:-100]),
    "cut old pickle": ("pytorch_model.bin", pickled({"a": torch.ones(2)}, _use_new_zipfile_serialization=False)[:-9]),
    "no pickle": ("pytorch_model.bin", b"root:x:0:0:root:/root:/bin/bash\n"),
    "code": ("pytorch_model.bin", pickled({"a": Stop()})),
    "path": ("pytorch_model.bin", pickled({"a": Path("x")})),
    "list": ("pytorch_model.bin", pickled([torch.ones(2)])),
    "tensor": ("pytorch_model.bin", pickled(torch.ones(2))),
    "module": ("pytorch_model.bin", pickled(torch.nn.Linear(1, 1))),
    "text": ("pytorch_model.bin", pickled({"a": torch.ones(2), "note": "text"})),
    "numbers": ("pytorch_model.bin", pickled({1: torch.ones(2)})),
    "sparse": ("pytorch_model.bin", pickled({"a": torch.ones(2).to_sparse()})),
    "on meta": ("pytorch_model.bin", pickled({"a": torch.ones(2, device="meta")})),
    "index list": (INDEX, b"[]"),
    "index without files": (INDEX, b'{"weight_map": {}}'),
    "index without map": (INDEX, b"{}"),
    "index of numbers": (INDEX, b'{"weight_map": {"a": 1}}'),
    "index of lists": (INDEX, b'{"weight_map": {"a": [1]}}'),
    "index pointer": (INDEX, POINTER),
    "deep index": (INDEX, b"[" * 100_000),
    "file outside": (INDEX, b'{"weight_map": {"a": "../outside.safetensors"}}'),
    "absolute file": (INDEX, b'{"weight_map": {"a": "/etc/passwd"}}'),
    "long name": (INDEX, b'{"weight_map": {"a": "' + b"x" * 300 + b'"}}'),
}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with open_weights(folder) as weights:
        return {name: weights.read(name) for name in weights.names()}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_and_foreign_files_are_one_error(damage: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "published"
    folder.mkdir()
    name, content = DAMAGED[damage]
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^model\.pretrained={folder}: ") as error:
        read_all(folder)
    pulls = f"git -C {folder} lfs pull, then the same command"
    assert error.value.fix == pulls if content == POINTER else error.value.fix.startswith("model.pretrained=<")
    assert "Error: " in error.value.reason or name in error.value.reason
    assert "weights_only" not in error.value.reason


def test_pickles_from_before_torch_1_6_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_all(tmp_path)["a"], torch.ones(2))


def test_weights_without_their_scales_are_rejected(tmp_path: Path) -> None:
    kinds = (torch.int8, torch.uint8, torch.float8_e4m3fn)
    save_file({str(kind): torch.ones(2).to(kind) for kind in kinds}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        for kind in kinds:
            with pytest.raises(ConfigError, match="it is quantized, and its scales would be lost"):
                weights.read(str(kind))


def test_what_is_neither_a_weight_nor_quantized_is_rejected(tmp_path: Path) -> None:
    kinds = (torch.bool, torch.int64, torch.complex64)
    save_file({str(kind): torch.ones(2).to(kind) for kind in kinds}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        for kind in kinds:
            with pytest.raises(ConfigError, match="and weights are floating-point numbers"):
                weights.read(str(kind))
        counter = weights.read("torch.int64", like=torch.zeros(2, dtype=torch.int64))
        assert torch.equal(counter, torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_value_with_which_every_loss_is_nan_is_rejected(value: float, tmp_path: Path) -> None:
    save_file(
        {"a": torch.tensor([0.0, value], dtype=torch.float64), "b": torch.ones(0)}, tmp_path / "model.safetensors"
    )
    with open_weights(tmp_path) as weights:
        weights.read("b")
        with pytest.raises(ConfigError, match=r"model\.safetensors holds NaN, inf or a value above float32 in a"):
            weights.read("a")


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_the_model_is_read_from_what_a_training_loop_saved(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({key: {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with caplog.at_level("INFO", "lightning_recipes"):
        assert torch.equal(read_all(tmp_path)["a"], torch.ones(2))
    assert "pytorch_model.bin: epoch" in caplog.text


def test_a_file_for_a_folder_is_answered_with_the_folder(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.gguf"):
        (tmp_path / name).write_text("{}")
    for key, read in (("model.pretrained", locate), ("model.name", lambda name: read_size(name, "vocab_size"))):
        with pytest.raises(ConfigError, match=f"it is a file, not a folder; type {key}={tmp_path}$"):
            read(str(tmp_path / "model.safetensors"))
        with pytest.raises(ConfigError, match=f"type mode=convert_gguf mode.path={tmp_path}/model.gguf"):
            read(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["~nobody/x", "x" * 300, "a\0b"])
def test_a_name_that_no_folder_has_is_no_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(ConfigError, match="not a local folder|there is no such folder"):
        locate(name)
    assert published_weights.published_folder(name) is None


@pytest.mark.parametrize(
    ("holds", "reason", "fix"),
    [
        ("adapter_config.json", "an adapter of peft", "adapter=<lora or ia3> adapter.pretrained={folder}"),
        ("checkpoints/last.txt", "that of a run", "mode=export resume={folder}, then {key}={folder}/export"),
        ("manifest.json", "a checkpoint of a run", "mode=export resume={folder}, then {key}="),
        ("readme.md", "no config.json", "{key}=<folder with config.json and model.safetensors>"),
    ],
)
def test_a_folder_that_holds_something_else_than_a_model_is_told_what_to_type(
    holds: str, reason: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / holds).parent.mkdir(exist_ok=True)
    (tmp_path / holds).write_text("{}")
    for key, read in (("model.pretrained", locate), ("model.name", lambda name: read_size(name, "vocab_size"))):
        with pytest.raises(ConfigError) as caught:
            read(str(tmp_path))
        assert reason in caught.value.reason
        assert fix.format(folder=tmp_path, key=key) in caught.value.fix


def test_weights_with_the_head_of_another_task_or_an_adapter_in_them_are_none_of_a_language_model(
    tmp_path: Path,
) -> None:
    typed = f"model.name={tmp_path}"
    for named, is_other in (("LlamaForTokenClassification", True), ("OPTForCausalLM", False), ("LlamaModel", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [named]}))
        if not is_other:
            published_weights.check_head(tmp_path, typed)
            continue
        with pytest.raises(ConfigError, match=f"it holds a {named}, which has another head") as caught:
            published_weights.check_head(tmp_path, typed)
        assert caught.value.fix == "model.name=<folder or hub id of a causal language model>"
    save_file({"layers.0.q_proj.lora_A.default.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lora_A\.default\.weight, of an adapter that was not merged"):
        open_weights(tmp_path).__enter__()


def test_a_hash_is_of_the_tensors_and_not_of_their_files(tmp_path: Path) -> None:
    def published(name: str, *shards: dict[str, torch.Tensor]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for index, tensors in enumerate(shards):
            save_file(tensors, folder / f"{index}.safetensors", metadata={"folder": name})
        names = {key: f"{index}.safetensors" for index, tensors in enumerate(shards) for key in tensors}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        return published_weights.hash_weights(str(folder))

    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor(1.0, dtype=torch.bfloat16)
    expected = published("one", {"a": a, "b": b})
    assert published("two", {"b": b}, {"a": a}) == expected
    changed = [{"a": a.flip(0)}, {"a": a.reshape(3, 2)}, {"a": a.double()}, {"b": b + 1}, {"c": b.clone()}]
    hashes = {published(f"changed {i}", {"a": a, "b": b} | change) for i, change in enumerate(changed)}
    assert len(hashes - {expected}) == len(changed)


def test_a_model_of_parts_has_the_hash_of_all_of_them(tmp_path: Path) -> None:
    for name, value in (("tower", 1.0), ("decoder", 2.0), ("other", 3.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.tensor([value])}, tmp_path / name / "model.safetensors")
    tower, decoder, other = (str(tmp_path / name) for name in ("tower", "decoder", "other"))
    assert published_weights.hash_parts([tower]) == published_weights.hash_weights(tower)
    hashes = {published_weights.hash_parts(each) for each in ([tower, decoder], [tower, other], [other, decoder])}
    assert len(hashes) == 3


def test_a_folder_without_config_or_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
    with (
        pytest.raises(ConfigError, match=r"neither model\.safetensors nor pytorch_model\.bin"),
        open_weights(tmp_path),
    ):
        pass
    (tmp_path / "model.safetensors").symlink_to("../blobs/abc")
    with (
        pytest.raises(ConfigError, match=r"model\.safetensors is a link to \.\./blobs/abc, which does not exist"),
        open_weights(tmp_path),
    ):
        pass


@pytest.mark.parametrize("name", ["", "true"])
def test_what_names_no_model_is_not_looked_for(name: str) -> None:
    with pytest.raises(ConfigError, match=r"it names neither a folder nor a repository.*, or null"):
        locate(name)


def test_a_tensor_in_two_shards_is_not_read_from_one_of_them(tmp_path: Path) -> None:
    for index, values in enumerate((torch.ones(2), torch.zeros(2)), start=1):
        save_file({"a": values, f"b{index}": values.clone()}, tmp_path / f"model-0000{index}-of-00002.safetensors")
    with pytest.raises(
        ConfigError, match=r"it has shards \(model-00001-of-00002.*without model.safetensors.index.json"
    ):
        read_all(tmp_path)
    names = dict.fromkeys(("a", "b1"), "model-00001-of-00002.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names | {"b2": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match="model-00001-of-00002.safetensors and model-00002-of.* both hold a; type"):
        read_all(tmp_path)


@pytest.mark.parametrize("name", ["qweight", "SCB", "weight_scale_inv", "weight_packed"])
def test_quantized_weights_are_known_by_what_is_beside_them(name: str, tmp_path: Path) -> None:
    """Whatever config.json says; the message does not speak of missing tensors."""
    save_file({f"model.layers.0.mlp.{name}": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"its weights are quantized \(model.safetensors holds .*{name}\), and"):
        read_all(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"missing: two\.safetensors"), open_weights(tmp_path):
        pass


def test_a_hub_name_offline_and_without_huggingface_hub_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(ConfigError, match=r"cannot be downloaded from the hub .*no network.* or null"):
            published_weights.locate("openai-community/gpt2")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[huggingface\]'"):
        published_weights.locate("openai-community/gpt2")
