"""Every private attribute of Lightning that this project touches."""

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


def _without_lightnings_signals(trainer: lightning.Trainer) -> None:
    """Lightning asks rank 0 before every micro-batch whether it was told to stop, and waits for the answer
    (#21487, 2.6.6); and at SIGTERM it broadcasts inside the handler, which fails wherever the handler interrupts
    when a peer is dead. `recipes.runtime.signals` takes the signals instead."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
