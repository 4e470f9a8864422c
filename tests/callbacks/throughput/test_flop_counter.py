"""FLOPs are counted while a micro-batch trains: nothing runs twice, and only what is the model's counts."""

from typing import Any

import pytest
import torch
from timed import monitor_at, timed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from callbacks.throughput.callback import SpeedMonitor
from callbacks.throughput.flop_counter import FlopCounter, get_shapes, is_compiled

TERA = 1e12
CONV, HEAD = 2 * 4 * 8 * 3 * 9 * 64, 2 * 4 * 512 * 10


class Vision(nn.Module):
    """A convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(images).flatten(1))
        return logits.square().mean()


def count(model: Any, batch: Tensor) -> float:
    with FlopCounter() as counter:
        model(batch).sum().backward()
    assert counter.error is None
    return counter.flops


def test_the_flops_of_a_step_are_those_of_its_products() -> None:
    model = Vision()
    # the images need no gradient
    assert count(model, torch.randn(4, 3, 8, 8)) == 2 * CONV + 3 * HEAD
    model.conv.requires_grad_(False)  # a frozen part costs its forward pass alone
    assert count(model, torch.randn(4, 3, 8, 8)) == CONV + 2 * HEAD


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_do_not_count(reentrant: bool) -> None:
    model = Vision()
    images = torch.randn(4, 3, 8, 8).requires_grad_()
    whole = count(model, images)
    assert count(lambda batch: checkpoint(model, batch, use_reentrant=reentrant), images) == whole


def test_a_gradient_penalty_counts_its_second_backward_pass() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def penalty(batch: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad((batch @ weight).square().sum(), batch, create_graph=True)
        return gradient.square().sum()

    # x @ w, its gradient, and from there two products for each of the three factors that need one
    product = 2 * 4 * 8 * 8
    assert count(penalty, torch.randn(4, 8, requires_grad=True)) >= 5 * product


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_in_full_and_so_does_its_fused_kernel_of_the_cpu(is_causal: bool) -> None:
    heads = torch.randn(2, 4, 16, 8).requires_grad_()  # [B, H, T, Q]
    product = 2 * 2 * 4 * 16 * 16 * 8
    fused = count(lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal), heads)
    assert fused == 2 * product + 5 * product  # a fused backward pass computes the scores again


def test_batches_are_distinguished_by_their_shapes() -> None:
    batch = {"inputs": torch.zeros(2, 3), "targets": [torch.zeros(2), "word"]}
    assert get_shapes(batch) == ((2, 3), ((2,), ()))


def test_a_plain_module_has_flops_also_when_it_reads_values_or_steps_by_hand(
    plain_module, make_trainer, read_column, clock
) -> None:
    class ByHand(type(timed(plain_module, clock))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss if loss.item() > -1 else -loss)
            self.optimizers().step()

    for module in (timed(plain_module, clock), ByHand()):
        make_trainer(callbacks=[monitor_at(clock)]).fit(module)
        # a batch of one sample: four weights, twice two FLOPs each, in a second
        assert read_column("throughput/tflops") == pytest.approx([16 / TERA] * 7)


def test_what_the_optimizer_multiplies_is_not_the_models(plain_module, make_trainer, read_column, clock) -> None:
    class Multiplying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            torch.ones(64, 64) @ torch.ones(64, 64)
            return loss

    module = timed(plain_module, clock)
    module.configure_optimizers = lambda: Multiplying(module.parameters(), lr=0.01)
    make_trainer(callbacks=[monitor_at(clock)]).fit(module)
    assert read_column("throughput/tflops") == pytest.approx([16 / TERA] * 7)


def test_each_step_runs_once_and_large_attributes_are_not_copied(plain_module, make_trainer) -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    class Remembering(plain_module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.replay, self.large = [], Uncopyable()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.replay.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Remembering()
    make_trainer(callbacks=[SpeedMonitor()]).fit(module)
    assert module.replay == list(range(8))


def test_a_compiled_step_has_no_flops_and_says_why(plain_module, make_trainer, tmp_path, caplog) -> None:
    class Compiled(plain_module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.compiled = torch.compile(self.layer, backend="aot_eager")

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.compiled(batch[0]).square().mean()
            assert is_compiled(loss)
            return loss

    for _ in range(2):  # compiled in the first fit, remembered in the second
        with caplog.at_level("INFO", logger="lightning_recipes"):
            make_trainer(callbacks=[SpeedMonitor()], max_steps=3).fit(Compiled())
    lines = [r.getMessage() for r in caplog.records if "cannot be counted" in r.getMessage()]
    assert len(lines) == 2
    assert "its step is compiled" in lines[0]
    assert "recipes_flops(batch)" in lines[0]
    assert "tflops" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_after_32_shapes_a_row_with_another_one_has_no_flops(plain_module, make_trainer, tmp_path, caplog) -> None:
    import csv

    class Ragged(plain_module):  # type: ignore[misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step([batch], batch_idx)

        def train_dataloader(self) -> DataLoader[Any]:
            sizes = [*range(1, 41), 1, 2]
            return DataLoader([torch.ones(size, 4) for size in sizes], batch_size=None)

    with caplog.at_level("INFO", logger="lightning_recipes"):
        make_trainer(callbacks=[SpeedMonitor()]).fit(Ragged())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 42
    # new shapes are watched and not timed; the last two are known
    assert [row["step"] for row in rows if row["throughput/tflops"]] == ["40", "41"]
    assert sum("first 32 shapes" in record.getMessage() for record in caplog.records) == 1
