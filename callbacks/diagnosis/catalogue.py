"""The catalogue of symptoms; within a severity, findings are listed in this order, most harmful and certain first."""

from .epochs import find_memorizing, find_repeated_order
from .finding import Symptom
from .generalization import find_easier_validation, find_no_validation, find_overfitting
from .gradients import find_collapsing_scale, find_constant_clipping, find_rising_norm, find_skipped_steps
from .learning import find_divergence, find_early_decay, find_short_warmup, find_stuck_loss, find_unfinished_decay
from .speed import find_data_wait, find_growing_memory, find_slowdown
from .spikes import find_bad_batches, find_unstable_spikes

CATALOGUE = (
    Symptom(
        "loss_scale_collapsing", "the loss scale is halved again and again", ("loss_scale",), find_collapsing_scale
    ),
    Symptom("diverged", "the loss falls, then rises for good or is NaN", ("loss",), find_divergence),
    Symptom("nothing_learned", "the loss stays at its first value or ln(classes)", ("loss",), find_stuck_loss),
    Symptom(
        "decayed_too_early",
        "the learning rate is near zero long before the end",
        ("loss", "learning_rate"),
        find_early_decay,
    ),
    Symptom("not_shuffled", "the loss repeats its course in every epoch", ("loss", "epoch"), find_repeated_order),
    Symptom("overfitting", "validation rises, training falls", ("loss", "val_loss"), find_overfitting),
    Symptom("warmup_too_short", "a hump at the start", ("loss", "learning_rate"), find_short_warmup),
    Symptom("unstable_spikes", "spikes with large gradients, slow recovery", ("loss",), find_unstable_spikes),
    Symptom("bad_batches", "spikes of single steps", ("loss",), find_bad_batches),
    Symptom("steps_lost", "skipped steps, rollbacks, single NaN", ("loss",), find_skipped_steps),
    Symptom(
        "gradient_norm_rising",
        "the gradient norm grows, the loss does not fall",
        ("loss", "grad_norm"),
        find_rising_norm,
    ),
    Symptom(
        "clipped_every_step",
        "every step is clipped heavily",
        ("clipped_fraction", "grad_norm"),
        find_constant_clipping,
    ),
    Symptom("memorizing", "the loss drops at each epoch boundary", ("loss", "epoch"), find_memorizing),
    Symptom("easier_validation", "validation is better than training", ("loss", "val_loss"), find_easier_validation),
    Symptom("slowing_down", "steps become slower and slower", ("speed",), find_slowdown),
    Symptom("waiting_for_data", "part of each step is spent waiting for data", ("data_wait",), find_data_wait),
    Symptom("memory_growing", "memory keeps growing", ("memory",), find_growing_memory),
    Symptom("ended_before_decay", "the schedule is longer than the run", ("learning_rate",), find_unfinished_decay),
    Symptom("never_validated", "no validation loss", (), find_no_validation),
)
