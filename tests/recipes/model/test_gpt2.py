"""GPT-2: what it computes, that padding changes nothing, and its first loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2

torch.set_num_threads(1)


def small(**changes: object) -> GPT2:
    settings = {
        "vocab_size": 100,
        "max_seq_len": 16,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 32,
        "dropout": 0.0,
    }
    model = GPT2(**(settings | changes))  # type: ignore[arg-type]
    model.init_weights(0)
    return model


def tokens(batch: int = 2, length: int = 16, vocab_size: int = 100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (batch, length), generator=generator)


def loss_of(model: nn.Module) -> torch.Tensor:
    logits = model(tokens())
    return F.cross_entropy(logits.flatten(0, 1), tokens().roll(-1, dims=1).flatten())


def test_padded_and_unpadded_model_have_the_same_loss_and_gradient_of_every_parameter() -> None:
    padded, plain = small(vocab_pad_multiple=64), small(vocab_pad_multiple=1)
    assert padded.embedding.weight.shape[0] == 128
    losses = [loss_of(padded), loss_of(plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
    for (name, ours), (_, reference) in zip(padded.named_parameters(), plain.named_parameters(), strict=True):
        gradient = ours.grad[: len(reference)]
        # The sums run over other block sizes: float32 rounding of gradients below 1.
        torch.testing.assert_close(gradient, reference.grad, rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_padded_tokens_get_probability_zero_and_gradient_exactly_zero(tie_embeddings: bool) -> None:
    model = small(tie_embeddings=tie_embeddings)
    logits = model(tokens())
    assert logits.shape == (2, 16, 128)
    assert torch.equal(logits[..., 100:], torch.full((2, 16, 28), -math.inf))
    assert logits.grad_fn.name() != "CopySlices"  # autograd has not seen the fill
    loss_of(model).backward()
    assert torch.equal(model.head.weight.grad[100:], torch.zeros(28, 32))
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_first_loss_is_ln_of_the_vocabulary() -> None:
    # Logits of std 0.02 sqrt(W) = 0.11 raise it by half their variance, 0.006; 32 targets are a
    # sample that moves it by 0.11 / sqrt(32) = 0.02.
    assert loss_of(small()).item() == pytest.approx(math.log(100), abs=0.05)


def test_the_head_stays_tied_from_the_meta_device_to_the_cpu() -> None:
    with torch.device("meta"):
        model = GPT2(vocab_size=100, max_seq_len=16, num_layers=2, num_heads=4, hidden_size=32, dropout=0.0)
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens()), small()(tokens()))


def test_a_token_does_not_attend_to_later_tokens() -> None:
    model = small()
    changed = tokens()
    changed[:, 10:] = 0
    assert torch.equal(model(tokens())[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens())[:, 10:], model(changed)[:, 10:])


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), small()(tokens()))


def test_heads_that_do_not_divide_the_width_are_rejected_with_a_width_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_heads=3: .* type model\.hidden_size=33"):
        small(num_heads=3)


def test_more_tokens_than_positions_are_rejected() -> None:
    with pytest.raises(AssertionError, match="17 tokens > max_seq_len 16"):
        small()(tokens(length=17))


@pytest.mark.parametrize("part", ["blocks", "model"])
def test_compiled_and_eager_gradients_agree_without_graph_breaks(part: str) -> None:
    eager, compiled = small(num_layers=1), small(num_layers=1)
    # aot_eager traces forward and backward as inductor would, and needs no C++ compiler.
    if part == "blocks":
        for block in compiled.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    else:
        compiled.compile(backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        loss_of(model).backward()
    for ours, reference in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad, rtol=0, atol=1e-7)
