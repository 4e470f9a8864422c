"""The validation that a signal did not wait for, made up for when the run goes on. Costs what a validation costs."""

import lightning.pytorch as lightning


def validate_now(trainer: lightning.Trainer) -> None:
    """Validate at the step just restored, before the next one; its numbers go into the row of that step."""
    epoch_loop = trainer.fit_loop.epoch_loop
    # Lightning 2.6 numbers rows by this counter, which is one behind while a step is validated
    epoch_loop._batches_that_stepped = trainer.global_step - 1
    epoch_loop.val_loop.restarting = False
    trainer.validating = True
    epoch_loop.val_loop.run()
    trainer.training = True
    epoch_loop._batches_that_stepped = trainer.global_step
