"""FLOPs per token: published figures, and torch's FLOP counter, with every difference explained."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from support import ROOT, composed_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vision_language_cases import IMAGE_SIZE, IMAGE_TOKEN, PATCHES, make_llava, write_llava

from recipes.adapter.lora import Lora
from recipes.model.flops import CountsFlops, Flops, flops_per_sample, flops_per_weight
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.llava import Llava
from recipes.model.resnet import ResNet, ResNet18, ResNet50
from recipes.model.score import attach_score, compute_rewards
from recipes.model.timm_model import TimmModel
from recipes.model.weights import initialize
from recipes.optimizer.rules import apply_rules
from recipes.task.vision_language import VisionLanguage

GPT2_SHAPES = {  # layers, heads, hidden_size
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1558M": (48, 25, 1600),
}


@pytest.mark.parametrize(
    ("name", "palm", "causal"),  # GFLOP at T = 1024, vocabulary 50304, positional table included
    [
        ("124M", 0.860, 0.803),
        ("350M", 2.431, 2.280),
        ("774M", 5.210, 4.927),
        ("1558M", 10.289, 9.817),
    ],
)
def test_gpt2_family_in_both_conventions(name: str, palm: float, causal: float) -> None:
    num_layers, num_heads, hidden_size = GPT2_SHAPES[name]
    with torch.device("meta"):
        model = GPT2(
            vocab_size=50257,
            max_seq_len=1024,
            num_layers=num_layers,
            num_heads=num_heads,
            hidden_size=hidden_size,
            dropout=0.0,
        )
    flops = model.flops_per_token(1024)
    # The published digits are cut off, not rounded.
    assert int(flops.palm / 1e6) == round(palm * 1e3)
    assert int(flops.causal / 1e6) == round(causal * 1e3)


def test_llama_3_8b_at_8192_tokens_leaves_the_untied_embedding_out() -> None:
    with torch.device("meta"):
        model = Llama(
            vocab_size=128256,
            max_seq_len=8192,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            hidden_size=4096,
            ffn_hidden_size=14336,
            rope_theta=500000.0,
        )
    flops = model.flops_per_token(8192)
    num_parameters = 8_030_261_248 - 128256 * 4096
    assert flops == Flops(
        palm=6 * num_parameters + 12 * 32 * 4096 * 8192,
        causal=6 * num_parameters + 6 * 32 * 4096 * 8192,
    )
    assert (round(flops.palm / 1e9, 1), round(flops.causal / 1e9, 1)) == (57.9, 51.5)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_gpt2_differs_from_torchs_counter_by_norms_biases_and_positions_alone(
    tie_embeddings: bool,
) -> None:
    with torch.device("meta"):
        model = GPT2(
            vocab_size=64,
            max_seq_len=32,
            num_layers=2,
            num_heads=2,
            hidden_size=16,
            dropout=0.0,
            tie_embeddings=tie_embeddings,
        )
    inputs = torch.zeros(3, 32, dtype=torch.long, device="meta")
    # The math backend: torch counts a fused backward as five products of T x T instead of four.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1), inputs.flatten()).backward()
    counted = counter.get_total_flops() / inputs.numel()
    not_multiplied = model.position.weight.numel() + sum(
        parameter.numel() for parameter in model.parameters() if parameter.dim() == 1
    )
    assert model.flops_per_token(32).palm - counted == 6 * not_multiplied


@pytest.mark.parametrize(("small_images", "image_size"), [(False, 224), (True, 32), (True, 8)])
@pytest.mark.parametrize("architecture", [ResNet18, ResNet50])
def test_resnet_forward_equals_torchs_counter(architecture: type[ResNet], small_images: bool, image_size: int) -> None:
    with torch.device("meta"):
        model = architecture(num_classes=1000, in_channels=3, small_images=small_images)
        images = torch.empty(2, 3, image_size, image_size)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert model.flops_per_sample(image_size).palm == 3 * counter.get_total_flops() / 2


@pytest.mark.parametrize(("architecture", "multiply_adds"), [(ResNet18, 1_814_073_344), (ResNet50, 4_089_184_256)])
def test_resnet_forward_takes_the_published_1_81_and_4_09_billion_multiply_adds(
    architecture: type[ResNet], multiply_adds: int
) -> None:
    with torch.device("meta"):
        model = architecture(num_classes=1000, in_channels=3, small_images=False)
    assert model.flops_per_sample(224).palm / 6 == multiply_adds


# those that are complete, and of one tower; others are in the files named after them
_OTHERS = {"huggingface", "clip", "dual_encoder", "llava", "mlp", "of_module", "timm"}
OPTIONS = sorted({path.stem for path in (ROOT / "conf/model").glob("*.yaml")} - _OTHERS)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_agrees_with_torchs_counter_in_all_that_it_multiplies(option: str) -> None:
    """Norms, biases and positions are in N by convention, and multiply nothing: 0.5 % at 124M."""
    node = composed_config(f"model={option}", "trainer.accelerator=cpu")["model"]
    with torch.device("meta"):
        model = instantiate(node)
    is_text = type(model).input_kind == "tokens"
    shape = (model.max_seq_len,) if is_text else (model.in_channels, 224, 224)
    inputs = torch.zeros(2, *shape, device="meta").to(torch.long if is_text else torch.float32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(inputs)
    counted = 3 * counter.get_total_flops() / 2
    flops = flops_per_sample(model, shape)
    assert flops is not None
    extra = 0
    if is_text:
        one_dimensional = [p.numel() for p in model.parameters() if p.dim() == 1]
        positions = model.position.weight.numel() if hasattr(model, "position") else 0
        extra = 6 * shape[0] * (sum(one_dimensional) + positions)
    if hasattr(model, "v_head_dim"):  # its values are filled up to the size of its keys for the kernel
        filled_up = model.num_heads * (model.head_dim + model.qk_rope_head_dim - model.v_head_dim)
        counted -= 6 * model.num_layers * filled_up * shape[0] ** 2
    assert flops.palm - extra == counted
    assert extra < 0.02 * counted


def test_padding_takes_no_flops_and_rows_of_other_ranks_count_at_their_own_length() -> None:
    """Two ranks with two rows each, of 3, 50, 17 and 64 tokens, all padded to 64."""

    class Task(CountsFlops):
        data_size = 2

        def meta_model(self) -> GPT2:
            with torch.device("meta"):
                return GPT2(vocab_size=64, max_seq_len=64, num_layers=2, num_heads=2, hidden_size=16, dropout=0.0)

    lengths = [3, 50, 17, 64]
    batch = {"inputs": torch.zeros(2, 64), "num_tokens": sum(lengths), "num_token_pairs": sum(n * n for n in lengths)}
    task = Task()
    found = task.recipes_flops(batch)
    rows = [flops_per_sample(task.meta_model(), (length,)) for length in lengths]
    assert found is not None
    assert found.palm * 2 == pytest.approx(sum(row.palm for row in rows if row), rel=1e-12)
    assert found.causal * 2 == pytest.approx(sum(row.causal for row in rows if row), rel=1e-12)
    assert task.recipes_flops_key(batch) != task.recipes_flops_key(batch | {"num_tokens": 133})


@pytest.mark.parametrize(
    "frozen",
    [
        (),
        ("embedding", "position", "blocks.0.", "blocks.1."),
        ("embedding", "position", "blocks", "norm"),  # all but the head
        ("blocks.3.",),
    ],
)
def test_frozen_weights_have_the_flops_that_torch_counts(frozen: tuple[str, ...]) -> None:
    with torch.device("meta"):
        size = {"vocab_size": 64, "max_seq_len": 32, "num_layers": 4, "num_heads": 2, "hidden_size": 16}
        model = GPT2(**size, dropout=0.0, tie_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.int64, device="meta")).sum().backward()
    # vectors and the positional table are in N, as in the paper, and in no product
    per_weight = flops_per_weight(model)
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name.startswith("position")]
    products = model.flops_per_token(32).palm - sum(per_weight[p] * p.numel() for p in others)
    assert counter.get_total_flops() == pytest.approx(products * 32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_has_no_flops_of_the_head_that_it_does_not_use(tied: bool) -> None:
    with torch.device("meta"):
        size = {"vocab_size": 64, "max_seq_len": 32, "num_layers": 2, "num_heads": 2, "hidden_size": 16}
        model = GPT2(**size, dropout=0.0, tie_embeddings=tied)
        attach_score(model)
    with FlopCounterMode(display=False) as counter:
        tokens, last = (torch.zeros(shape, dtype=torch.int64, device="meta") for shape in ((1, 32), (1,)))
        compute_rewards(model, tokens, last).sum().backward()
    # in N and in no product: vectors, the positional table, and the score, which is of a row
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name.startswith(("position", "score"))]
    products = model.flops_per_token(32).palm - sum(6 * p.numel() for p in others)
    assert counter.get_total_flops() == pytest.approx(products * 32)


# billions of multiply-adds of one image forward, as published with the models
@pytest.mark.parametrize(
    ("name", "published"),
    [("resnet50", 4.1), ("convnext_tiny", 4.5), ("vit_base_patch16_224", 17.6), ("efficientnet_b0", 0.39)],
)
def test_an_image_model_takes_six_flops_for_each_published_multiply_add(name: str, published: float) -> None:
    flops = flops_per_sample(_timm(name), (3, 224, 224))
    assert flops is not None
    assert flops.palm == flops.causal
    assert flops.palm / 6e9 == pytest.approx(published, rel=0.02)


def test_the_products_of_a_forward_pass_are_those_that_a_resnet_counts() -> None:
    with torch.device("meta"):
        own = ResNet50(num_classes=1000, in_channels=3, small_images=False)
    assert flops_per_sample(_timm("resnet50"), (3, 224, 224)) == flops_per_sample(own, (3, 224, 224))


def test_a_linear_probe_of_an_image_model_has_the_flops_of_its_forward_pass_and_its_head() -> None:
    model = _timm("convnext_atto")
    whole = flops_per_sample(model, (3, 64, 64))
    model.requires_grad_(False)
    forward = flops_per_sample(model, (3, 64, 64))
    model.inner.head.fc.requires_grad_(True)
    probe = flops_per_sample(model, (3, 64, 64))
    assert whole is not None
    assert forward is not None
    assert probe is not None
    assert forward.palm == whole.palm / 3
    assert probe.palm == forward.palm + 2 * model.inner.head.fc.weight.numel()


def test_the_images_of_a_count_leave_the_random_numbers_of_the_run_alone() -> None:
    before = torch.get_rng_state()
    flops_per_sample(_timm("vit_tiny_patch16_224", drop_path=0.1, dropout=0.1), (3, 224, 224))
    assert torch.equal(before, torch.get_rng_state())


def _timm(name: str, **settings: float) -> TimmModel:
    pytest.importorskip("timm")
    chosen = {"drop_path": 0.0, "dropout": 0.0, "norm": "batch", "arguments": {}} | settings
    with torch.device("meta"):
        return TimmModel(name=name, num_classes=1000, in_channels=3, image_size=None, pretrained=None, **chosen)


def make_lora(*modules: str) -> Lora:
    settings = {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    return Lora(**settings, target_modules="all", modules_to_save=[*modules])  # type: ignore[arg-type]


STAGES: dict[str, tuple[list[str], Lora | None]] = {
    "projector": (["vision_tower", "language_model", "lm_head"], None),
    "projector and language model": (["vision_tower"], None),
    "all": ([], None),
    "language model": (["vision_tower", "multi_modal_projector"], None),
    "adapter": ([], make_lora()),
    "adapter and projector": ([], make_lora("multi_modal_projector")),
}


@pytest.mark.parametrize("vision", ["clip_vision_model", "siglip_vision_model"])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_of_a_vision_language_model_has_the_flops_that_torch_counts(
    stage: str, vision: str, tmp_path: Path
) -> None:
    freeze, adapter = STAGES[stage]
    folder = write_llava(tmp_path, vision=vision)
    with torch.device("meta"):
        model = make_llava(folder)
        if adapter is not None:
            adapter.apply(model)
    apply_rules(model, freeze=freeze, groups=[], layer_decay=None)
    counted, real = copy.deepcopy(model), model
    real.to_empty(device="cpu")
    initialize(real, seed=0)  # type: ignore[arg-type]
    tokens = torch.randint(0, IMAGE_TOKEN, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[0, : 2 * PATCHES] = tokens[1, :PATCHES] = IMAGE_TOKEN
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        real(tokens, images=torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE)).sum().backward()
    per_token = counted.flops_per_token(24)
    assert per_token is not None
    # norms are in N, as in the paper, and in no product
    per_weight = flops_per_weight(counted)
    parts = (counted.decoder, counted.inner.get_output_embeddings())
    norms = sum(per_weight[p] * p.numel() for part in parts for p in part.parameters() if p.ndim == 1)
    found = (per_token.palm - norms) * tokens.numel() + 3 * counted.flops_per_image()
    # where nothing before the language model is trained, its first layers need no gradient of their inputs
    of_first = 2 * 32 * (32 + 16 + 16) + 2 * 3 * 4 * 32 if stage == "adapter" else 0
    assert found - of_first * tokens.numel() == counter.get_total_flops()


def test_images_of_all_ranks_are_counted_and_those_of_zeros_in_the_place_of_none_are_not(tmp_path: Path) -> None:
    """Two ranks with three images, of which this one has none."""

    class Task(VisionLanguage):
        data_size = 2  # type: ignore[assignment]

        def __init__(self) -> None: ...

        def meta_frozen_models(self) -> list[nn.Module]:
            return []

        def meta_model(self) -> Llava:
            with torch.device("meta"):
                return make_llava(folder)

    folder, task = write_llava(tmp_path), Task()
    batch = {"inputs": torch.zeros(2, 24), "num_tokens": 90, "num_token_pairs": 2100, "images": torch.zeros(1, 3, 8, 8)}
    of_tokens, of_all = (task.recipes_flops(batch | {"num_read_images": number}) for number in (0, 3))
    assert of_tokens is not None
    assert of_all is not None
    per_image = task.meta_model().flops_per_image()
    for convention in ("palm", "causal"):
        added = getattr(of_all, convention) - getattr(of_tokens, convention)
        assert added == pytest.approx(1.5 * per_image, rel=1e-12)
    own = task.recipes_flops(batch)  # of data that counts none: those of this rank
    assert own is not None
    assert own.palm - of_tokens.palm == pytest.approx(per_image, rel=1e-12)
    assert len({task.recipes_flops_key(batch | {"num_read_images": number}) for number in (0, 3)}) == 2
