"""Symptoms of a policy that learns from the rewards of its own completions; its loss says nothing about them."""

from bisect import bisect_right

from .curve import Block, Curve, standard_error
from .finding import Cause, Evidence, Finding, Severity, medians
from .generalization import noise_of_validations
from .run import Run

MIN_ROWS = 8  # fewer have no early and late part
MIN_ROWS_OF_REWARD = 30  # a reward is noisy: from fewer rows, none can be called flat
NO_SPREAD = 0.9  # fraction of groups, in the last quarter: what is learned comes from a tenth of the samples
NEAR_ALL, NEAR_NONE = 0.9, 0.1  # rewards from 0 to 1: (almost) all completions are right, or wrong
ERRORS = 3.0  # standard errors that a change must exceed
GROWTH, TRUNCATED = 1.5, 0.1  # of the tokens of a completion, and of the fraction without an end
COLLAPSED = 0.1  # entropy, as a fraction of that of the start: healthy runs lose two thirds of it
DROP = 0.1  # of the best validation: fewer than 100 questions differ by less from one validation to the next
MIN_VALIDATIONS = 4
GAP, GAP_GROWTH = 0.02, 3.0  # nats per token: a ratio of 1.02, a tenth of the usual clipping
LARGE_GAP = 0.1
CLIPPED = 0.3  # of the tokens: GSPO, which clips the most of all, reports 0.15
FAILED = 0.01  # of the completions


def find_no_spread(run: Run) -> Finding | None:
    """Detect groups whose completions all have the same reward, so that no advantage is left to learn from."""
    fractions, rewards = run.curves["no_spread"].finite, run.curves["reward"].finite
    if not rewards.values or len(fractions) < (3 if min(fractions.values, default=0.0) == 1 else MIN_ROWS):
        return None
    late, level = fractions.part(0.75, 1).block(), rewards.part(0.75, 1).block()
    if late.median < NO_SPREAD:
        return None
    harder = Cause(
        "the prompts are too easy for this model",
        run.suggest("data.path=<harder prompts>", "harder prompts; leave out those that are always answered right"),
    )
    better = Cause(
        "the prompts are too hard for this model: no sample is ever right",
        run.suggest(
            "start_from=<a run of recipe=sft on answers of this kind>",
            "fine-tune on such answers first; easier prompts",
        ),
    )
    partial = Cause(
        "the reward is all or nothing",
        run.suggest("reward=[numeric,format]", "add a reward for a part of what is asked, such as the format"),
    )
    more = Cause(
        "too few or too similar samples of each prompt",
        run.suggest(
            run.scaled_override("rollout.num_generations", 2), "more samples per prompt; a temperature of 1 or above"
        ),
    )
    severity: Severity = "critical" if fractions.block().median >= NO_SPREAD else "warning"
    causes: tuple[Cause, ...]
    if not _is_fraction(rewards):
        which, causes = "every completion of a group has the same reward", (partial, more, harder, better)
    elif level.median >= NEAR_ALL:
        which, causes = "all completions are right, which is too easy", (harder, more)
        severity = "note"
    elif level.median <= NEAR_NONE:
        which, causes = "all completions are wrong, which is too hard", (better, partial, more)
    else:
        which, causes = "some prompts are always answered right, the others never", (partial, more, better)
    return Finding(
        severity=severity,
        meaning=f"almost no group has rewards that differ, and without a difference nothing is learned: {which}",
        evidence=(*medians(fractions, late), *medians(rewards, level)),
        causes=causes,
    )


def find_flat_reward(run: Run) -> Finding | None:
    """Detect a reward that is where it began although the rewards of a group differ."""
    rewards = run.curves["reward"].finite
    if len(rewards) < MIN_ROWS_OF_REWARD or (_is_fraction(rewards) and rewards.block().median >= NEAR_ALL):
        return None
    spread = run.curves.get("no_spread")
    if spread is not None and len(spread.finite) and spread.finite.block().median >= NO_SPREAD:
        return None  # found above
    first, last, change, error = _compare_ends(rewards)
    if change > ERRORS * error or change + ERRORS * error > 0.5 * max(abs(first.median), rewards.noise):
        return None  # it rose, or noise may hide that it did
    return Finding(
        severity="warning",
        meaning="the reward stays where it began although completions of a prompt differ in it: nothing is learned",
        evidence=medians(rewards, first, last),
        causes=(
            Cause(
                "the learning rate is too low",
                run.suggest(run.scaled_override("optimizer.lr", 5), "five times the learning rate"),
            ),
            Cause(
                "the reward does not depend on the completion, or is noise",
                run.suggest(
                    "callbacks.completions.every_n_steps=1", "read completions beside their rewards; score one twice"
                ),
            ),
            Cause(
                "the tie to the reference is too strong",
                run.suggest(run.scaled_override("loss.beta", 0.1), "a tenth of the weight of the KL divergence"),
            ),
        ),
    )


def find_growing_completions(run: Run) -> Finding | None:
    """Detect completions that grow towards the longest allowed one, and end less often, without more reward."""
    lengths, truncated = run.curves["completion_tokens"].finite, run.curves["truncated"].finite
    rewards = run.curves["reward"].finite
    if min(len(lengths), len(truncated), len(rewards)) < MIN_ROWS:
        return None
    before, after, _, _ = _compare_ends(lengths)
    cut_before, cut_after, _, _ = _compare_ends(truncated)
    _, _, change, error = _compare_ends(rewards)
    grows = after.median > GROWTH * before.median and cut_after.median > cut_before.median + TRUNCATED
    if not grows or change > ERRORS * error:
        return None
    longest = run.number("rollout.max_new_tokens")
    limit = (Evidence("rollout.max_new_tokens", longest, after.first_step, after.last_step),) if longest else ()
    return Finding(
        severity="warning",
        meaning="completions grow until they are cut off, and earn no more for it: length is learned, not the task",
        evidence=(*medians(lengths, before, after), *medians(truncated, cut_before, cut_after), *limit),
        causes=(
            Cause(
                "wrong completions are punished less if they are long, as each token of one counts less",
                run.suggest("loss.kind=dapo", "divide by the tokens of the batch instead of those of a completion"),
            ),
            Cause(
                "a completion that is cut off is scored like one that ended",
                run.suggest("loss.mask_truncated=true", "leave completions without an end out of the loss"),
            ),
            Cause(
                "the reward pays for length",
                run.suggest("reward=[exact_match,length]", "score the answer alone, or add a cost per token"),
            ),
        ),
    )


def find_collapsed_entropy(run: Run) -> Finding | None:
    """Detect a policy that samples one completion per prompt before it is right."""
    entropy, rewards = run.curves["entropy"].finite, run.curves["reward"].finite
    if min(len(entropy), len(rewards)) < MIN_ROWS:
        return None
    before, after, _, _ = _compare_ends(entropy)
    half = rewards.part(0.5, 1)
    _, level, change, error = _compare_ends(half)
    is_solved = _is_fraction(rewards) and level.median >= NEAR_ALL
    if after.median > COLLAPSED * before.median or is_solved or change > ERRORS * error:
        return None
    return Finding(
        severity="warning",
        meaning="the entropy has collapsed: all samples of a prompt are alike, and no better one can be found any more",
        evidence=(*medians(entropy, before, after), *medians(rewards, level)),
        causes=(
            Cause(
                "the learning rate is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.3), "a third of the learning rate"),
            ),
            Cause(
                "rare tokens are clipped before they become probable",
                run.suggest("loss.epsilon_high=0.28", "a wider upper limit of the ratio, 1.28"),
            ),
            Cause(
                "nothing ties the policy to its start",
                run.suggest("loss.beta=0.04", "add the KL divergence from the first weights to the loss"),
            ),
        ),
    )


def find_hacked_reward(run: Run) -> Finding | None:
    """Detect a reward that rises on the training prompts while held-out answers get worse."""
    rewards = run.curves["reward"].finite
    for role in ("val_exact_match", "val_reward"):
        val = run.curves[role].finite if role in run.curves else None
        if val is None or len(val) < MIN_VALIDATIONS or len(rewards) < MIN_ROWS:
            continue
        best = max(range(len(val)), key=lambda row: val.values[row])
        last = val.values[-2:]
        if best >= len(val) - 2 or val.values[best] - max(last) <= max(
            DROP * abs(val.values[best]), ERRORS * noise_of_validations(val)
        ):
            continue
        end = bisect_right(rewards.steps, val.steps[best])
        size = max(3, len(rewards) // 10)
        around = Curve(rewards.name, rewards.steps[max(0, end - size) : end], rewards.values[max(0, end - size) : end])
        if not len(around):
            continue
        before, after = around.block(), rewards.part(0.9, 1).block()
        if after.median - before.median <= -ERRORS * standard_error(rewards.noise, before.num_points, after.num_points):
            continue  # training got worse, too: no exploit
        return Finding(
            severity="critical",
            meaning="held-out answers get worse while the reward does not: the policy exploits its reward function",
            evidence=(
                Evidence(f"best {val.name}", val.values[best], val.steps[best], val.steps[best]),
                Evidence(f"last {val.name}", val.values[-1], val.steps[-1], val.steps[-1]),
                *medians(rewards, before, after),
            ),
            causes=(
                Cause(
                    "the reward can be had without a right answer",
                    run.suggest(
                        "callbacks.completions.every_n_steps=1", "read the completions with the highest reward"
                    ),
                ),
                Cause(
                    "the policy moves too far from its start",
                    run.suggest("loss.beta=0.04", "add the KL divergence from the first weights to the loss"),
                ),
                Cause(
                    "too many steps on too few prompts",
                    run.suggest(
                        f"checkpoint.monitor={val.name} checkpoint.mode=max",
                        "keep the checkpoint of the best validation",
                    ),
                ),
            ),
        )
    return None


def find_sampler_gap(run: Run) -> Finding | None:
    """Detect log-probabilities of the sampler that differ from those of the model, increasingly or by much."""
    gaps = run.curves["logprob_gap"].finite
    if len(gaps) < MIN_ROWS:
        return None
    before, after, _, _ = _compare_ends(gaps)
    is_growing = after.median > GAP and after.median > GAP_GROWTH * before.median
    if not is_growing and after.median <= LARGE_GAP:
        return None
    return Finding(
        severity="warning",
        meaning="sampler and model disagree about the probability of sampled tokens: the gradient is that of others",
        evidence=medians(gaps, before, after),
        causes=(
            Cause(
                "sampling computes in another precision or with other kernels than training",
                run.suggest("precision=32-true trainer.max_steps=20", "compare both in float32 for a few steps"),
            ),
            Cause(
                "the difference is there to stay",
                run.suggest("loss.importance=token_truncate", "weight tokens by the ratio of the two, at most 3"),
            ),
            Cause(
                "a router of experts chooses others in training",
                "log how many tokens reach another expert than while sampling",
            ),
        ),
    )


def find_failing_rewards(run: Run) -> Finding | None:
    """Detect reward functions that raise, hang or die."""
    errors = run.curves["reward_errors"].finite
    total = sum(errors.values)
    if not total:
        return None
    size = run.number("global_batch_size")
    share = None if not size or not len(errors) else total / (size * len(errors))
    failing = [step for step, value in zip(errors.steps, errors.values, strict=True) if value]
    timeout = run.scaled_override("task.rewards.timeout_seconds", 3)
    return Finding(
        severity="note" if share is not None and share < FAILED else "warning",
        meaning="a reward function fails for some completions, which then learn from an invented score",
        evidence=(
            Evidence(f"sum of {errors.name}", total, failing[0], failing[-1]),
            *(() if share is None else (Evidence("of all completions, a share of", share, failing[0], failing[-1]),)),
        ),
        causes=(
            Cause(
                "it raises on text it does not expect, such as an empty completion",
                run.suggest("mode=preflight", "call it with such completions"),
            ),
            Cause("it takes longer than its time limit", run.suggest(timeout, "a longer limit, or a faster function")),
        ),
    )


def find_clipped_ratios(run: Run) -> Finding | None:
    """Detect steps in which most tokens are clipped and carry no gradient."""
    clipped = run.curves["clipped_tokens"].finite
    if len(clipped) < MIN_ROWS:
        return None
    late = clipped.part(0.5, 1).block()
    if late.median < CLIPPED:
        return None
    return Finding(
        severity="warning",
        meaning=f"{late.median:.0%} of the tokens are clipped and teach nothing: the policy left its samples behind",
        evidence=medians(clipped, late),
        causes=(
            Cause(
                "too many steps on the same completions",
                run.suggest("rollout.num_iterations=1", "sample anew after each step"),
            ),
            Cause(
                "the learning rate is too high",
                run.suggest(run.scaled_override("optimizer.lr", 0.3), "a third of the learning rate"),
            ),
            Cause(
                "the limits are those of another kind of loss: GSPO's are a thousandth of GRPO's",
                run.suggest("loss.epsilon=0.2 loss.epsilon_high=0.28", "0.2 and 0.28 for ratios of tokens"),
            ),
        ),
    )


def _compare_ends(curve: Curve) -> tuple[Block, Block, float, float]:
    """Return the medians of the first and the last quarter, their difference and its standard error."""
    first, last = curve.part(0, 0.25).block(), curve.part(0.75, 1).block()
    error = standard_error(curve.noise, first.num_points, last.num_points)
    return first, last, last.median - first.median, error


def _is_fraction(rewards: Curve) -> bool:
    """Return whether rewards lie between 0 and 1, so that it is known what right is."""
    return all(0 <= value <= 1 for value in rewards.values)
