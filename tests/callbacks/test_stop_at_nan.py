"""The first NaN ends the run, and the line of the forward pass that produced it is named."""

import traceback
import warnings

import pytest
import torch
from torch import Tensor

from callbacks.stop_at_nan import StopAtNan


def fit(make_trainer, module, **arguments) -> None:
    make_trainer(callbacks=[StopAtNan()], **arguments).fit(module)


def format_error(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.fixture
def forward_of(plain_module):
    """Make a module whose forward pass is a function of its layer's output and the batch index."""

    def make(function):
        class WithForward(plain_module):  # type: ignore[misc, valid-type]
            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                return function(self.layer(batch[0]), batch_idx).square().mean()

        return WithForward()

    return make


def test_a_nan_from_the_forward_pass_is_named_by_step_operation_inputs_and_line(make_trainer, forward_of) -> None:
    def divide(x: Tensor, index: int) -> Tensor:
        zero = x - x
        return x + zero / zero if index == 2 else x  # 0 / 0

    with pytest.raises(FloatingPointError) as caught:
        fit(make_trainer, forward_of(divide))
    text = format_error(caught.value)
    assert "step 3, rank 0: the loss is NaN" in text
    assert "torch.Tensor.div(float32 [2, 1]: 0 to 0, float32 [2, 1]: 0 to 0)" in text
    assert "in divide: return x + zero / zero if index == 2 else x  # 0 / 0" in text
    assert "in training_step" in text


def test_a_nan_from_the_backward_pass_is_named_by_its_forward_line(make_trainer, forward_of) -> None:
    def root(x: Tensor, index: int) -> Tensor:
        zero = x - x
        return x + torch.where(zero == 0, zero, zero.sqrt()) if index == 2 else x

    with pytest.raises(RuntimeError, match="SqrtBackward0") as caught:
        fit(make_trainer, forward_of(root), detect_anomaly=True)
    text = format_error(caught.value)
    assert "step 3, rank 0: the backward pass produced the NaN, in SqrtBackward0" in text
    assert "in root: return x + torch.where(zero == 0, zero, zero.sqrt()) if index == 2" in text
    assert "__torch_function__" not in text.partition("step 3, rank 0")[2]


def test_a_nan_that_does_not_reach_the_loss_does_not_end_the_run(make_trainer, forward_of) -> None:
    def mask(x: Tensor, index: int) -> Tensor:
        nothing = (x - x) / (x - x)
        assert bool(nothing.isnan().all())
        return x

    trainer = make_trainer(callbacks=[StopAtNan()])
    trainer.fit(forward_of(mask))
    assert trainer.global_step == 8


def test_a_nan_in_the_data_is_reported_in_the_inputs_of_the_first_operation(make_trainer, plain_module) -> None:
    class BadBatch(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 4:
                batch[0][0, 0] = torch.nan
            return self.layer(batch[0]).square().mean()

    with pytest.raises(FloatingPointError, match=r"step 5.*float32 \[2, 4\]: 1 to 1, 1 NaN"):
        fit(make_trainer, BadBatch())


def test_a_nan_loss_that_depends_on_no_weight_points_to_the_batch(make_trainer, plain_module) -> None:
    class Constant(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return torch.full((), torch.nan, requires_grad=True)

    with pytest.raises(FloatingPointError, match="look at the batch"):
        fit(make_trainer, Constant())


def test_warnings_and_torch_functions_are_restored_after_the_run(make_trainer, plain_module, forward_of) -> None:
    shown = warnings.showwarning
    fit(make_trainer, plain_module())
    assert warnings.showwarning is shown
    with pytest.raises(FloatingPointError):
        fit(make_trainer, forward_of(lambda x, _: x * torch.nan))
    assert warnings.showwarning is shown
    assert torch._C._len_torch_function_stack() == 0


def test_it_changes_no_weight(make_trainer, plain_module) -> None:
    weights = []
    for callbacks in ([], [StopAtNan()]):
        torch.manual_seed(0)
        module = plain_module()
        make_trainer(callbacks=callbacks, accumulate_grad_batches=2).fit(module)
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)


def test_a_nan_in_the_second_of_two_backward_passes_is_found(make_trainer, plain_module) -> None:
    class Gan(plain_module):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            first = self.layer(batch[0])
            self.manual_backward(first.square().mean())
            second = self.layer(batch[0])
            zero = second - second
            self.manual_backward((second + zero / zero if batch_idx == 2 else second).mean())
            self.optimizers().step()

    with pytest.raises(FloatingPointError, match=r"step 3, rank 0: the loss is NaN") as caught:
        fit(make_trainer, Gan())
    assert "zero / zero if batch_idx == 2" in format_error(caught.value)


def test_inf_ends_the_run_only_if_finite_losses_are_asked_for(make_trainer, forward_of) -> None:
    def overflow(x: Tensor, index: int) -> Tensor:
        return x.exp() + (x.abs() + 1e38) * 10 if index == 2 else x

    fit(make_trainer, forward_of(overflow), max_steps=3)
    with pytest.raises(
        FloatingPointError, match=r"step 3, rank 0: the loss is NaN or inf; the first .* \* 10 if index"
    ):
        make_trainer(callbacks=[StopAtNan(check_finite=True)]).fit(forward_of(overflow))
