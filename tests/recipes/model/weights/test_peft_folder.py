"""A folder that peft wrote has the logits that peft computes with it, or is refused with what to type: never others."""

import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.adapter import NoAdapter
from recipes.adapter.ia3 import IA3
from recipes.adapter.lora import Lora
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.weights import initialize, peft_folder

TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "down_proj"]
OURS: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": TARGETS, "use_rslora": False}
OURS |= {"use_dora": False, "modules_to_save": []}
# settings of peft -> ours that a remedy is expected to name; None: nothing of ours computes the same
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, {}),
    "dropout": ({"lora_dropout": 0.5}, {}),
    "gaussian": ({"init_lora_weights": "gaussian"}, {}),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, {}),
    "mica": ({"init_lora_weights": "mica"}, {}),
    "rank": ({"r": 2}, {"r": 2}),
    "scale": ({"lora_alpha": 5}, {"lora_alpha": 5}),
    "rslora": ({"use_rslora": True}, {"use_rslora": True}),
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "one block": (
        {"layers_to_transform": [1]},
        {"target_modules": [f"model.layers.1.{x}" for x in ("mlp.down_proj", "self_attn.q_proj")]},
    ),
    "other layers": ({"target_modules": ["v_proj"]}, {"target_modules": ["v_proj"]}),
    "excluded layers": ({"exclude_modules": ["q_proj"]}, {"target_modules": ["down_proj"]}),
    "alpha pattern": ({"alpha_pattern": {"q_proj": 64}}, None),
    "rank pattern": ({"rank_pattern": {"q_proj": 2}}, None),
    "pissa": ({"init_lora_weights": "pissa"}, None),
    "fast pissa": ({"init_lora_weights": "pissa_niter_2"}, None),
    "olora": ({"init_lora_weights": "olora"}, None),
    "alora": ({"alora_invocation_tokens": [5]}, None),
    "biases": ({"lora_bias": True}, None),
    "whole head": ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
    "tokens": ({"trainable_token_indices": [4, 5]}, None),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, None),
    "more blocks": ({"layer_replication": [[0, 2], [1, 2]]}, None),
    "compressed inputs": ({"velora_config": peft.VeloraConfig(num_groups=2)}, None),
    "singular values": ({"kasa_config": peft.KasaConfig()}, None),
}

# settings of a kind that the others show, each compared by name in any case
_REPEATED = {"dropout", "gaussian", "orthogonal", "rank", "scale", "excluded layers", "fast pissa", "tokens", "head"}
_REPEATED |= {"more blocks", "compressed inputs", "singular values"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published Llama of two blocks with square projections."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(vocab_size=64, **size, max_position_embeddings=16, bos_token_id=1, eos_token_id=2)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    path = tmp_path_factory.mktemp("published")
    model.save_pretrained(path)
    return str(path)


def publish(folder: str, target: Path, config: Any) -> tuple[Tensor, Any]:
    """Write an adapter with peft and return the logits that peft has with it, and its model."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, on adapters of which something must be kept in mind
        model = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(str(target))
        torch.manual_seed(1)  # fast PiSSA draws again
        loaded = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(folder), str(target))
        logits: Tensor = loaded(TOKENS).logits
    return logits.detach(), loaded


def load(folder: str, adapter: Any) -> Tensor:
    with torch.device("meta"):
        model = HuggingFace(name=folder, pretrained=folder, max_seq_len=16, vocab_size=64)
        adapter.apply(model)
    model.to_empty(device="cpu")
    initialize(model, seed=0)  # type: ignore[arg-type]
    with torch.no_grad():
        logits: Tensor = model.eval()(TOKENS)
    return logits


def follow(folder: str, make: Any, settings: dict[str, Any]) -> tuple[Tensor | str, dict[str, Any]]:
    """Load an adapter and type what each error asks for, until there is nothing of ours to type.

    Returns:
        The logits, or the advice where the adapter is refused for good, and what was typed.
    """
    typed: dict[str, Any] = {}
    for _ in range(4):
        mistake: ConfigError
        try:
            return load(folder, make(**settings | typed)), typed
        except ConfigError as error:
            mistake = error
        found = dict(re.findall(r"adapter\.(\w+)=(\[.*?\]|[^\s,]+)", mistake.fix))
        if "pretrained" in found or not found:
            return mistake.fix, typed
        typed |= {name: yaml.safe_load(value) for name, value in found.items()}
    raise AssertionError(f"it goes round in a circle: {mistake}")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in _REPEATED else kind for kind in FOLDERS]
)
def test_a_folder_has_the_logits_of_peft_or_is_refused(kind: str, folder: str, tmp_path: Path) -> None:
    settings, expected = FOLDERS[kind]
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    )
    reference, theirs = publish(folder, tmp_path, config)
    logits, typed = follow(folder, Lora, OURS | {"pretrained": str(tmp_path)})
    assert isinstance(logits, str) == (expected is None), typed
    if isinstance(logits, str) and "merge_and_unload" in logits:  # as advised
        theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
        logits = load(str(tmp_path / "merged"), NoAdapter())
    if isinstance(logits, Tensor):
        assert typed == (expected or {})
        torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("inputs", [[], ["o_proj"], ["o_proj", "down_proj"]])
def test_factors_of_inputs_and_outputs_are_kept_apart(inputs: list[str], folder: str, tmp_path: Path) -> None:
    """The factors of a square layer have as many values either way: [outputs, 1] and [1, inputs]."""
    targets = ["q_proj", "o_proj", "down_proj"]
    config = peft.IA3Config(target_modules=targets, feedforward_modules=inputs, task_type="CAUSAL_LM")
    reference, _ = publish(folder, tmp_path, config)
    settings = {"target_modules": targets, "feedforward_modules": ["down_proj"], "modules_to_save": []}
    settings |= {"pretrained": str(tmp_path)}
    logits, typed = follow(folder, IA3, settings)
    assert isinstance(logits, Tensor), logits
    assert typed.keys() <= {"feedforward_modules"}
    torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def plain(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    path = tmp_path_factory.mktemp("plain")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    return path, publish(folder, path, config)[0]


def copy(plain: tuple[Path, Tensor], target: Path, **changes: Any) -> str:
    """Copy an adapter with other settings; None removes one."""
    shutil.copytree(plain[0], target, dirs_exist_ok=True)
    file = target / peft_folder.CONFIG
    config = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if k not in changes or v is not None}
    file.write_text(json.dumps(config))
    return str(target)


def test_folders_of_older_versions_are_read(folder: str, plain: tuple[Path, Tensor], tmp_path: Path) -> None:
    """They lack settings, whose value was today's default, and keep the tensors in a pickle."""
    old = dict.fromkeys(("use_rslora", "use_dora", "alpha_pattern", "lora_bias", "peft_version"))
    path = copy(plain, tmp_path, **old, enable_lora=None, merge_weights=False)
    tensors = load_file(tmp_path / peft_folder.WEIGHTS)
    (tmp_path / peft_folder.WEIGHTS).unlink()
    torch.save(tensors, tmp_path / peft_folder.OLD_WEIGHTS)
    torch.testing.assert_close(load(folder, Lora(**OURS, pretrained=path)), plain[1], rtol=1e-5, atol=1e-5)


def test_every_setting_of_peft_is_compared_or_known_to_change_nothing(
    folder: str, plain: tuple[Path, Tensor], tmp_path: Path
) -> None:
    """A later version may add settings: one that is set is refused, too."""
    model = HuggingFace(name=folder, pretrained=folder, max_seq_len=16, vocab_size=64)
    Lora(**OURS).apply(model)
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)} - peft_folder._HARMLESS
    for name in sorted(fields | {"a_setting_of_2027"}):
        path = copy(plain, tmp_path, **{name: [["other"]]})
        with pytest.raises(
            ConfigError, match=rf"its adapter_config\.json has {name}=.*type adapter.pretrained=(null|<)"
        ):
            peft_folder.load_adapter(model, path)
        shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"r": 0}, "adapter.pretrained=<folder with a valid adapter_config.json>"),
        ({"r": "4"}, "adapter.pretrained=<folder with a valid adapter_config.json>"),
        ({"lora_alpha": float("nan")}, "adapter.pretrained=<folder with a valid adapter_config.json>"),
        ({"use_dora": "true"}, "adapter.pretrained=<folder with a valid adapter_config.json>"),
        ({"lora_bias": True}, "adapter.pretrained=null, which begins a new adapter"),
        ({"peft_type": "VERA"}, "adapter.pretrained=null model.name=<the model that peft's merge_and_unload() made"),
        ({"peft_type": "PREFIX_TUNING"}, "adapter.pretrained=null, which begins a new adapter"),
        ({"peft_type": None}, "adapter.pretrained=null"),
        ({"peft_type": "IA3"}, "adapter=ia3"),
        ({"peft_type": ["LOHA"]}, "adapter.pretrained=null"),
    ],
)
def test_a_setting_that_none_of_ours_can_have_is_not_advised(
    changes: dict[str, Any], fix: str, folder: str, plain: tuple[Path, Tensor], tmp_path: Path
) -> None:
    path = copy(plain, tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        load(folder, Lora(**OURS, pretrained=path))
    assert error.value.fix.startswith(fix)


def test_all_settings_of_a_folder_are_one_command(folder: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=5, use_rslora=True, target_modules=["v_proj"], task_type="CAUSAL_LM")
    reference, _ = publish(folder, tmp_path, config)
    with pytest.raises(ConfigError) as error:
        load(folder, Lora(**OURS, pretrained=str(tmp_path)))
    typed = dict(re.findall(r"adapter\.(\w+)=(\S+)", error.value.fix))
    assert len(typed) == 4
    settings = OURS | {name: yaml.safe_load(value) for name, value in typed.items()}
    logits = load(folder, Lora(**settings, pretrained=str(tmp_path)))
    torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rank", "layer", "head"])
def test_the_model_that_was_typed_is_not_advised(
    kind: str, folder: str, plain: tuple[Path, Tensor], tmp_path: Path
) -> None:
    path = copy(plain, tmp_path)
    tensors = load_file(tmp_path / peft_folder.WEIGHTS)
    name = next(iter(tensors))
    if kind == "rank":
        tensors |= {name: values[:2] if ".lora_A." in name else values[:, :2] for name, values in tensors.items()}
    else:
        place = "model.layers.5.self_attn.q_proj" if kind == "layer" else "lm_head"
        tensors[f"base_model.model.{place}.lora_A.weight"] = tensors[name].clone()
    save_file({name: values.contiguous() for name, values in tensors.items()}, tmp_path / peft_folder.WEIGHTS)
    with pytest.raises(ConfigError) as error:
        load(folder, Lora(**OURS, pretrained=path))
    advised = {"rank": "adapter.pretrained=<folder whose", "layer": "adapter.pretrained=<a complete copy"}
    assert error.value.fix.startswith(advised.get(kind, "adapter.pretrained=null model.name=<the model that peft's"))


def test_damaged_files_are_named(folder: str, plain: tuple[Path, Tensor], tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(ConfigError, match=rf"adapter\.pretrained={tmp_path}") as error:
            load(folder, Lora(**OURS, pretrained=str(tmp_path)))
        return str(error.value)

    assert "there is no adapter_config.json in it" in refused()
    copy(plain, tmp_path)
    weights = tmp_path / peft_folder.WEIGHTS
    tensors = load_file(weights)
    save_file({name: values.to(torch.int8) for name, values in tensors.items()}, weights)
    assert "as int8: it is quantized" in refused()
    whole = (plain[0] / peft_folder.WEIGHTS).read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read: SafetensorError" in refused()
    for text in ("[]", "{", "[" * 100_000):
        (tmp_path / peft_folder.CONFIG).write_text(text)
        assert peft_folder.CONFIG in refused()


def test_an_adapter_of_a_published_model_is_not_for_ours(plain: tuple[Path, Tensor]) -> None:
    sizes = {"vocab_size": 50, "max_seq_len": 32, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    for adapter in (
        Lora(**OURS, pretrained=str(plain[0])),
        IA3(target_modules="all", feedforward_modules=[], modules_to_save=[], pretrained="x"),
    ):
        with pytest.raises(ConfigError, match="type model=huggingface model.name=<"):
            adapter.apply(GPT2(**sizes, dropout=0.0))


def rewrite(path: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> str:
    """Replace each tensor of a folder by those that `change` returns, and return the folder."""
    tensors = load_file(path / peft_folder.WEIGHTS)
    changed = {own: kept for name, values in tensors.items() for own, kept in change(name, values).items()}
    save_file(changed, path / peft_folder.WEIGHTS)
    return str(path)


def test_the_state_dict_of_a_model_of_peft_is_read(folder: str, tmp_path: Path) -> None:
    """Its names have that of the adapter, which save_pretrained() leaves out."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_dora=True, task_type="CAUSAL_LM")
    reference, theirs = publish(folder, tmp_path, config)
    state = {name: values.clone() for name, values in theirs.state_dict().items()}
    save_file({name: value for name, value in state.items() if ".lora_" in name}, tmp_path / peft_folder.WEIGHTS)
    adapter = Lora(**OURS | {"use_dora": True}, pretrained=str(tmp_path))
    torch.testing.assert_close(load(folder, adapter), reference, rtol=1e-5, atol=1e-5)
    saved = "which is no tensor of an adapter; type adapter.pretrained=<folder that save_pretrained"
    save_file(state, tmp_path / peft_folder.WEIGHTS)
    with pytest.raises(ConfigError, match=saved):
        load(folder, adapter)
    two = rewrite(tmp_path, lambda name, values: {name: values, name.replace("default", "b"): values.clone()})
    with pytest.raises(ConfigError, match=r"several adapters \(b, default\)"):
        load(folder, Lora(**OURS | {"use_dora": True}, pretrained=two))


PARTS: dict[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any], str]] = {
    "without a block": (
        lambda name, values: {} if ".layers.1." in name else {name: values},
        {},
        r"names the layer model.layers.1.mlp.down_proj and 1 more, of which .*<a complete copy of it>$",
    ),
    "without a matrix": (
        lambda name, values: {} if ".layers.1.mlp.down_proj.lora_B" in name else {name: values},
        {},
        r"does not have .*layers.1.mlp.down_proj.lora_B.weight; type .*<a complete copy of it>$",
    ),
    "without tensors": (lambda name, values: {}, {}, r"names the layer model.layers.0.mlp.down_proj and 3 more"),
    "further layers": (
        lambda name, values: {name: values},
        {"target_modules": ["q_proj"]},
        r"tensors of model.layers.0.mlp.down_proj, which its adapter_config.json does not name",
    ),
    "other names": (
        lambda name, values: {name.removeprefix("base_model.model."): values},
        {},
        r"which is no tensor of an adapter; type adapter.pretrained=<folder that save_pretrained",
    ),
    "with an embedding": (
        lambda name, values: {name: values, "base_model.model.model.embed_tokens.weight": torch.ones(64, 16)},
        {},
        "which is no tensor of an adapter; type adapter.pretrained=null model.name=<the model that peft's merge",
    ),
    "pattern": (lambda name, values: {name: values}, {"target_modules": "((("}, "adapter_config.json cannot be read"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_adapter_is_refused_whatever_layers_are_typed(
    part: str, folder: str, plain: tuple[Path, Tensor], tmp_path: Path
) -> None:
    change, settings, message = PARTS[part]
    path = rewrite(Path(copy(plain, tmp_path, **settings)), change)
    first = [f"model.layers.0.{layer}" for layer in ("mlp.down_proj", "self_attn.q_proj")]
    for targets in (TARGETS, first):
        if part in ("without a matrix", "with an embedding") and targets == first:
            continue
        with pytest.raises(ConfigError, match=message):
            load(folder, Lora(**OURS | {"target_modules": targets}, pretrained=path))


def test_a_scale_may_be_written_with_a_point(folder: str, plain: tuple[Path, Tensor], tmp_path: Path) -> None:
    path = copy(plain, tmp_path, lora_alpha=8.0)
    logits = load(folder, Lora(**OURS | {"lora_alpha": 8}, pretrained=path))
    torch.testing.assert_close(logits, plain[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("plain/adapter_model.safetensors", "it is a file, not a folder; type adapter.pretrained={}/plain$"),
        ("nowhere", "there is no such folder, and adapters are read from folders alone; type adapter.pretrained=<"),
        ("run", "that of a run.*type mode=export mode.adapter=separate resume={0}/run, then .*={0}/run/export$"),
        ("model", "it holds a whole model, not an adapter; type adapter.pretrained=null model.name={}/model$"),
    ],
)
def test_what_is_no_folder_of_peft_is_answered_with_what_it_is(
    typed: str, message: str, folder: str, plain: tuple[Path, Tensor], tmp_path: Path
) -> None:
    copy(plain, tmp_path / "plain")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "model").symlink_to(folder)
    with pytest.raises(ConfigError, match=message.format(tmp_path)):
        load(folder, Lora(**OURS, pretrained=str(tmp_path / typed)))


def test_an_adapter_of_the_hub_is_downloaded_first(folder: str) -> None:
    with pytest.raises(
        ConfigError, match="type hf download somebody/lora --local-dir <folder>, then adapter.pretrained"
    ):
        load(folder, Lora(**OURS, pretrained="somebody/lora"))
