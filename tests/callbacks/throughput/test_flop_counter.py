"""FLOPs are counted while a micro-batch trains: nothing runs twice, and only what is the model's counts."""

import csv
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from timed import STEP, monitor_at, timed
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from callbacks.throughput.callback import SpeedMonitor
from callbacks.throughput.flop_counter import FlopCounter, _find_formula, get_shapes, is_compiled

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
    assert fused == 2 * product + 4 * product  # not the scores that a fused backward pass computes again


def attend(query: Tensor) -> Tensor:
    keys, values = torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 6)
    return nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def multiply_sparse(dense: Tensor) -> Tensor:
    return torch.eye(12).to_sparse() @ dense + torch.eye(12).to_sparse_csr() @ dense


def without_autograd(inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = nn.Linear(8, 8)(inputs)
        torch.einsum("ij,kj->ik", hidden, hidden)
    with torch.no_grad():  # fused kernels of eval mode
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(inputs[None], torch.zeros(5, 5))
        nn.MultiheadAttention(8, 2, batch_first=True).eval()(inputs[None], inputs[None], inputs[None])
    return inputs.sum()


def lstm(layers: int, sides: int, positions: int = 3 * 5) -> int:
    """Return the FLOPs of an LSTM from 8 to 16 values; its first layer needs no gradient of the data."""
    first, others = 4 * 16 * (8 + 16), 4 * 16 * (16 * sides + 16) * (layers - 1)
    return 2 * positions * sides * (3 * (first + others) - 4 * 16 * 8)


# operator: a model, its input and its FLOPs by hand: 2 per multiplication, three times for forward and both gradients,
# twice where the input is data
EXACT: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "grouped convolution": (nn.Conv2d(8, 16, 3, padding=1, groups=4), (2, 8, 6, 6), 2 * 2 * 2 * 36 * 16 * 2 * 9),
    "depthwise, transposed": (nn.ConvTranspose1d(8, 8, 3, groups=8), (2, 8, 10), 2 * 2 * 2 * 10 * 8 * 3),
    "LSTM": (lambda x: nn.LSTM(8, 16, 2)(x)[0], (5, 3, 8), lstm(2, 1)),
    "LSTM in both directions": (lambda x: nn.LSTM(8, 16, 2, bidirectional=True)(x)[0], (5, 3, 8), lstm(2, 2)),
    # in the first of five steps, the state is zero and needs no gradient
    "GRU": (lambda x: nn.GRU(8, 16)(x)[0], (5, 3, 8), 2 * 15 * 3 * 16 * (2 * 8 + 3 * 16) - 2 * 3 * 3 * 16 * 16),
    # x W, and the gradient of W; (x W) y has a 64th of that, and the outer product of x and the gradient
    "bilinear": (lambda x: nn.Bilinear(64, 64, 32)(x, x), (16, 64), 2 * 16 * 32 * (2 * 64 * 64 + 2 * 64)),
    "attention of more queries than keys": (attend, (2, 4, 16, 8), 2 * 2 * 4 * 16 * 12 * (8 + 6)),
    "sparse matrices": (multiply_sparse, (12, 4), 2 * 2 * 12 * 4),
    "products without autograd": (
        without_autograd, (5, 8), 2 * 5 * (8 * 8 + 5 * 8 + (4 + 4 + 4) * 8 * 8) + 2 * 4 * 5 * 5 * 8
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", EXACT)
def test_every_operator_that_multiplies_matrices_counts_its_exact_flops(operator: str) -> None:
    model, shape, flops = EXACT[operator]
    batch = torch.randn(shape)
    with FlopCounter() as counter:
        loss = model(batch).sum()
        if loss.requires_grad:
            loss.backward()
    assert (counter.flops, counter.error, counter.left_out) == (flops, None, set())


def test_frozen_layers_and_inputs_with_gradients_count_what_is_computed() -> None:
    model = nn.LSTM(8, 16)
    inputs = torch.randn(5, 3, 8, requires_grad=True)
    product = 2 * 15 * 4 * 16 * (8 + 16)
    assert count(lambda x: model(x)[0], inputs) == 3 * product
    model.requires_grad_(False)
    assert count(lambda x: model(x)[0], inputs) == 2 * product


@pytest.mark.parametrize(("mask", "sides"), [((True,) * 4, 1), ((False, True, True, True), 2)])
def test_recurrent_layers_of_a_gpu_count_as_those_of_a_cpu(mask: tuple[bool, ...], sides: int) -> None:
    # no GPU: the arguments that cuDNN's operators get, as their schema in torch lists them
    weights = list(nn.LSTM(8, 16, 2, bidirectional=sides == 2).parameters())
    inputs = torch.randn(5, 3, 8)
    schema = torch.ops.aten._cudnn_rnn_backward.default._schema.arguments
    given = {"input": inputs, "weight": weights, "weight_stride0": 4, "bidirectional": sides == 2, "output_mask": mask}
    arguments = [given.get(argument.name) for argument in schema]
    forward = _find_formula(torch.ops.aten._cudnn_rnn)(*arguments[:3])
    backward = _find_formula(torch.ops.aten._cudnn_rnn_backward)(*arguments)
    of_data = 2 * 15 * sides * 4 * 16 * 8 if mask[0] else 0
    assert forward + backward == lstm(2, sides) + of_data
    of_miopen = [a for a, argument in zip(arguments, schema, strict=True) if argument.name != "proj_size"]
    assert _find_formula(torch.ops.aten.miopen_rnn_backward)(*of_miopen) == backward


def test_attention_of_a_gpu_counts_as_that_of_a_cpu() -> None:
    query, value = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 4)
    forward = 2 * 2 * 4 * 16 * 16 * (8 + 4)
    with FlopCounter() as counter:
        flex = flex_attention(query, query, value)
    assert (counter.flops, flex.shape) == (forward, value.shape)
    assert _find_formula(flex_attention_backward)(query, query, value, value) == 2 * forward
    # torch's own formula, less the scores: two packed sequences of 16 positions
    packed, ends = torch.randn(32, 4, 8), torch.tensor([0, 16, 32])
    of_packed = _find_formula(torch.ops.aten._flash_attention_backward)(*[packed] * 5, None, ends, ends, 16, 16)
    assert of_packed == 2 * 2 * 2 * 4 * 16 * 16 * (8 + 8)


def test_torchs_own_formulas_are_still_missing_or_wrong() -> None:
    """Once one of these fails, the formula beside it may go."""
    lacking = {"mkldnn_rnn_layer", "_cudnn_rnn", "_trilinear", "_scaled_dot_product_flash_attention_for_cpu"}
    assert [name for name in lacking if getattr(torch.ops.aten, name) in flop_registry] == []
    model, shape, flops = EXACT["grouped convolution"]
    with FlopCounterMode(display=False) as theirs:
        model(torch.randn(shape)).sum().backward()
    assert theirs.get_total_flops() == flops // 2 * (1 + 4)


def test_an_operator_of_another_library_counts_with_its_formula_or_is_named(
    plain_module, make_trainer, read_column, clock, caplog
) -> None:
    library = torch.library.Library("others", "FRAGMENT")
    for name in ("named", "counted"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x.clone(), "CPU")
        library.impl(name, lambda x: x, "Autograd")
    flop_registry[torch.ops.others.counted] = lambda *args, **kwargs: 100

    class Custom(type(timed(plain_module, clock))):  # type: ignore[misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.inference_mode():
                torch.ops.others.named(batch), torch.ops.others.counted(batch)
            return super().training_step(batch, batch_idx)

    make_trainer(callbacks=[monitor_at(clock)]).fit(Custom())
    assert read_column("throughput/tflops") == pytest.approx([116 / TERA] * 7)
    assert [r.getMessage() for r in caplog.records if "leaves out others.named:" in r.getMessage()] != []


def test_batches_are_distinguished_by_their_shapes() -> None:
    batch = {"inputs": torch.zeros(2, 3), "targets": [torch.zeros(2), "word"]}
    assert get_shapes(batch) == ((2, 3), ((2,), "text"))


class Keys(dict[str, Any]):
    """A mapping whose items are attributes, so that an unknown attribute is a KeyError."""

    __getattr__ = dict.__getitem__


class Store(MutableMapping[str, Any]):
    """As torch_geometric keeps the tensors of a graph."""

    def __init__(self, graph: Any, **tensors: Tensor) -> None:
        self._mapping, self._graph = tensors, weakref.ref(graph)

    def __getitem__(self, name: str) -> Tensor:
        return self._mapping[name]

    def __setitem__(self, name: str, value: Tensor) -> None: ...
    def __delitem__(self, name: str) -> None: ...
    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Graph:
    def __init__(self, nodes: int) -> None:
        self._store = Store(self, x=torch.ones(nodes, 4), edges=torch.ones(2, 9))
        self.itself = self

    @property
    def x(self) -> Tensor:
        return self._store["x"]


@dataclass(slots=True)
class Slots:
    x: Tensor
    name: str = "a"


def test_shapes_are_found_in_objects_of_any_kind() -> None:
    assert get_shapes(Graph(5)) == (((5, 4), (2, 9)), ())
    assert get_shapes(Slots(torch.ones(3))) == ((3,), "text")
    assert get_shapes(Keys(x=torch.ones(3))) == ((3,),)
    assert get_shapes([np.ones((2, 3)), print, Graph, nn.Linear(2, 2), None, 1.0]) == ((2, 3), (), (), (), (), ())
    assert get_shapes([[number] for number in range(3_000)]) == (), "a whole dataset"


def test_batches_that_are_objects_have_flops_and_a_speed_from_the_second_step_on(
    plain_module, make_trainer, read_column, clock
) -> None:
    module = timed(plain_module, clock)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch.x, batch_idx)
    loader = DataLoader([Graph(3)] * 8, batch_size=None)
    make_trainer(callbacks=[monitor_at(clock)]).fit(module, loader)
    assert read_column("throughput/tflops") == pytest.approx([3 * 16 / STEP / TERA] * 7)


@pytest.mark.parametrize("depends_on_text", [False, True])
def test_texts_of_a_batch_may_decide_its_flops(
    depends_on_text: bool, plain_module, make_trainer, read_column, clock, caplog
) -> None:
    module = timed(plain_module, clock)
    step = module.training_step
    rows = {True: lambda text: len(text), False: lambda text: 2}[depends_on_text]
    module.training_step = lambda batch, batch_idx: step(torch.ones(rows(batch[1]), 4), batch_idx)
    loader = DataLoader([(torch.ones(2), "a" * (i + 1)) for i in range(8)], batch_size=None)
    with caplog.at_level("INFO", logger="lightning_recipes"):
        make_trainer(callbacks=[monitor_at(clock)]).fit(module, loader)
    # three counts that agree; two that do not
    expected = [] if depends_on_text else [2 * 16 / STEP / TERA] * 5
    assert read_column("throughput/tflops") == pytest.approx(expected)
    assert ("batches with tensors of equal shapes differ in FLOPs" in caplog.text) == depends_on_text
    assert len(read_column("time/step_seconds")) == (6 if depends_on_text else 5)


def test_each_kind_of_step_of_a_gan_has_its_own_flops(plain_module, make_trainer, clock, tmp_path) -> None:
    class Gan(type(timed(plain_module, clock))):  # type: ignore[misc]
        """Trains a second layer in every fifth batch."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(4, 4)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.layer, self.other)]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizers = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizers[0].step()
            if batch_idx % 5 == 4:
                self.manual_backward(self.other(batch).sum())
                optimizers[1].step()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([torch.ones(4)] * 22, batch_size=1)

    make_trainer(callbacks=[SpeedMonitor(batch_size_fn=len)]).fit(Gan())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    flops = {
        i: float(row["throughput/tflops"]) * float(row["time/step_seconds"]) * TERA
        for i, row in enumerate(rows)
        if row["throughput/tflops"]
    }
    # batch 4 was not expected: the next ones are counted until another like it has been
    assert sorted(flops) == [1, 2, 3, *range(10, 22)]
    assert flops == pytest.approx({i: 16 + (64 if i % 5 == 4 else 0) for i in flops})


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


def test_of_varying_shapes_every_second_step_is_timed_and_32_are_counted(
    plain_module, make_trainer, tmp_path, caplog
) -> None:
    class Ragged(plain_module):  # type: ignore[misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step([batch], batch_idx)

        def train_dataloader(self) -> DataLoader[Any]:
            sizes = [*range(70), 0, 2, 1]
            return DataLoader([torch.ones(size + 1, 4) for size in sizes], batch_size=None)

    with caplog.at_level("INFO", logger="lightning_recipes"):
        make_trainer(callbacks=[SpeedMonitor()]).fit(Ragged())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # a step that is counted is not timed, and leaves the next one alone
    assert [i for i, row in enumerate(rows) if not row["time/step_seconds"]] == [*range(0, 64, 2)]
    assert [i for i, row in enumerate(rows) if row["throughput/tflops"]] == [70, 71], "shapes that were counted"
    assert sum("32 shapes that were counted" in record.getMessage() for record in caplog.records) == 1
