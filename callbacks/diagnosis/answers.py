"""A symptom of preference tuning: the margin grows, because both answers become less probable."""

from .curve import standard_error
from .finding import Cause, Finding, medians
from .run import Run

MIN_ROWS = 8
# log-probabilities of single batches differ by what their answers are; a change this many times its error is none
ERRORS = 4.0


def find_falling_answers(run: Run) -> Finding | None:
    """Detect chosen answers that become less probable while their lead over the rejected ones grows."""
    if "chosen_log_prob" not in run.curves or "margin" not in run.curves:
        return None
    chosen, margin = run.curves["chosen_log_prob"].finite, run.curves["margin"].finite
    if min(len(chosen), len(margin)) < MIN_ROWS:
        return None
    before, *_, after = chosen.blocks(4)
    lead_before, *_, lead = margin.blocks(4)
    error = standard_error(chosen.noise, before.num_points, after.num_points)
    if before.median - after.median <= ERRORS * error or lead.median <= lead_before.median:
        return None
    return Finding(
        severity="warning",
        meaning="the chosen answers become less probable, and the rejected ones faster: generated answers get worse",
        evidence=(*medians(chosen, before, after), *medians(margin, lead_before, lead)),
        causes=(
            Cause(
                "the loss compares the two answers, and asks for no probability of either",
                run.suggest("loss.nll_weight=1", "add the cross-entropy of the chosen answers to the loss"),
            ),
            Cause(
                "more steps, or larger ones, than the preference needs",
                run.suggest(
                    "checkpoint.monitor=val/exact_match checkpoint.mode=max",
                    "keep the checkpoint whose generated answers are best; a lower learning rate",
                ),
            ),
        ),
    )
