"""Reinforcement learning: a language model samples completions of prompts, and learns from their rewards.

Shapes: B completions of a micro-batch, R of this rank and N of the global batch; T tokens of a row, of at most W.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from recipes.data.conversations.chat_template import find_stop_ids
from recipes.data.conversations.rows import PAD_TO
from recipes.data.packed_batch import Packing, plan_branches
from recipes.errors import ConfigError
from recipes.generation import Completion
from recipes.lightning_internals import get_log_interval
from recipes.loss import Term
from recipes.loss.policy import GRPO, PolicyLoss, PolicyOutputs
from recipes.model import LanguageModel
from recipes.model.weights.adapter import has_adapter
from recipes.numerics.collectives import gather_objects
from recipes.numerics.loss import IGNORE_INDEX, token_losses, widen
from recipes.optimizer import hold_averages
from recipes.reward.workers import RewardWorkers, Scores
from recipes.rollout import Rollout
from recipes.task.answers import AnswerTask, evaluating
from recipes.task.base import Batch
from recipes.task.frozen import naming
from recipes.task.generation import list_tokens

Entropy = Literal["loss", "measure"]  # with its gradient or without
_OF_BATCH = ("seeds", "num_uses")
# nothing is compiled for a length; completions are short, and columns of padding cost as much. Products in float8 need
# a multiple of 16 rows
_PAD_TO_EAGER = 16
_OF_ROWS = ("num_inputs", "num_tokens", "is_truncated", "rewards", "scores", "errors")  # [R] or [R, F]


class PolicyTuning(AnswerTask):
    """Trains a language model on the rewards of completions that it samples itself.

    A step begins with a rollout: every rank samples its completions and scores them; rewards are then known on all
    ranks, so that the statistics of a group, or of the whole batch, are the same whichever ranks and micro-batches its
    completions are divided over. What is sampled depends on the weights and on (seed of the run, position in the
    stream) alone: a resumed run samples the same, and one that was rolled back goes on with other prompts.

    Args:
        rollout: Samples completions.
        rewards: Scores them.
        reference: The model that the loss ties the policy to: the model without its adapter, or a frozen copy of the
            model with the first weights.
        **settings: Arguments of `TrainingTask`.

    Attributes:
        of_tokens_names: What is known of each token of a rollout, [R, W] each.
    """

    of_tokens_names: ClassVar[tuple[str, ...]] = (
        *("inputs", "targets", "sampler_log_probs", "old_log_probs", "reference_log_probs"),
    )
    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks"})
    loss: PolicyLoss

    def __init__(
        self,
        *,
        rollout: Rollout,
        rewards: RewardWorkers,
        reference: Literal["auto", "adapter_off", "frozen_copy"],
        **settings: Any,
    ) -> None:
        self._rollout, self._rewards = rollout, rewards
        super().__init__(reference=reference, **settings)
        # of the whole batch, on the host, while further steps learn from it
        self._held: dict[str, Tensor] | None = None
        self._rows: dict[str, Tensor] = {}  # of this rank, of the newest rollout, [R, …] each
        self._numbers: dict[str, Tensor] = {}  # of all completions of it, on the host, [N, …] each
        self._row: dict[str, float] = {}  # what is logged of the rollout of this step
        self._seconds: dict[str, float] = {}  # of the rollout and the rewards of this step
        self._began: float | None = None  # when this step did

    @property
    @override
    def _copies(self) -> bool:
        if self._reference == "auto" and self._compares:
            return not has_adapter(self.meta_model())
        return super()._copies

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        for name, model in self._rewards.models.items():
            with naming(f"reward.{name}"):
                model.check_tokens(self.tokenizer)

    @override
    def hold_frozen_models(self) -> None:
        super().hold_frozen_models()
        for name, model in self._rewards.models.items():
            self.remember_published_model(f"reward.{name}", model.pretrained)

    # What the loss reads.

    @override
    def outputs(self, batch: Batch) -> PolicyOutputs:
        is_logged = self._trainer is not None and self.training and self._is_logged  # a plan has no trainer
        entropy: Entropy | None = "loss" if self.loss.needs_entropy else "measure" if is_logged else None
        found = self._look(self.model, batch, entropy=entropy, with_values=self.loss.needs_values)
        return found._replace(reference=batch.get("reference_log_probs"))

    def _look(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        entropy: Entropy | None = None,
        with_values: bool = False,
    ) -> PolicyOutputs:
        """Return what a model says of the tokens of completions, from one forward pass."""
        read = functools.partial(_read, temperature=self._rollout.sampling.temperature, entropy=entropy)
        of_hidden = functools.partial(cast(Any, model).value.estimate, tokens=batch["inputs"]) if with_values else None
        packing = batch.get("packing")
        found = self.of_tokens(model, batch["inputs"], batch["targets"], packing, read=read, of_hidden=of_hidden)
        columns = iter(found.unbind(dim=-1) if found.ndim == batch["targets"].ndim + 1 else (found,))
        return PolicyOutputs(
            next(columns),
            entropy=None if entropy is None else next(columns),
            values=next(columns) if with_values else None,
        )

    @property
    def _is_logged(self) -> bool:
        step = self.trainer.global_step + 1
        return step % get_log_interval(self.trainer) == 0 or step == self.trainer.max_steps

    @override
    def _without_padding(self, outputs: Any) -> Any:
        return outputs

    @override
    def own_terms(self, batch: Batch) -> list[Term]:
        return self.loss(self.outputs(batch), batch)

    @override
    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return self.loss.per_sample(self.outputs(batch), batch)

    # The rollout.

    @override
    def before_window(self, micro_batches: list[Batch]) -> list[Batch]:
        """Sample and score the completions of a step, or take those that an earlier step has sampled."""
        self._start_clock()
        size, num = len(micro_batches[0]["seed"]), self.engine.data_size
        first = [(micro_batch * num + self.engine.data_rank) * size for micro_batch in range(len(micro_batches))]
        slots = torch.cat([torch.arange(start, start + size) for start in first])  # [R], places in the global batch
        seeds = self._share({"seeds": torch.cat([batch["seed"] for batch in micro_batches])}, slots)["seeds"]  # [N]
        rows = self._recall(seeds, slots)
        if rows is None:
            rows = self._roll_out(micro_batches, slots)
            if self._rollout.num_iterations > 1:
                whole = self._share(self._pad(rows), slots)
                self._held = {name: value.cpu() for name, value in whole.items()}
                self._held |= {"seeds": seeds.cpu(), "num_uses": torch.tensor(1)}
        self._row |= self._describe()
        self._rows = rows
        return [
            batch | self._cut(rows, slice(place * size, (place + 1) * size)) | self._count_tokens(place)
            for place, batch in enumerate(micro_batches)
        ]

    def _recall(self, seeds: Tensor, slots: Tensor) -> dict[str, Tensor] | None:
        """Return this rank's completions of an earlier step; None: these samples are new."""
        held = self._held
        if held is None or not torch.equal(held["seeds"], seeds.cpu()):
            return None
        if held["num_uses"] >= self._rollout.num_iterations:  # data that repeats has the same seeds again
            return None
        held["num_uses"] = held["num_uses"] + 1
        self._numbers = {name: held[name] for name in _OF_ROWS}
        return {name: value[slots].to(self.device) for name, value in held.items() if name not in _OF_BATCH}

    def _roll_out(self, micro_batches: Sequence[Batch], slots: Tensor) -> dict[str, Tensor]:
        """Return what the loss reads of this rank's completions, [R, …] each. Collective."""
        prompts = [
            tokens[:number]
            for batch in micro_batches
            for tokens, number in zip(batch["prompt"].tolist(), batch["num_prompt"].tolist(), strict=True)
        ]
        seeds = [seed for batch in micro_batches for seed in batch["seed"].tolist()]
        with self._timed("rollout"):
            completions = self._generate(prompts, seeds)
        with self._timed("reward"):
            places = [row for batch in micro_batches for row in batch["row"].tolist()]
            scores = self._score(prompts, completions, places)
        of_functions = torch.tensor([*scores.of_functions.values()], dtype=torch.float64).T  # [R, F]
        rows = _stack(prompts, completions, fit_width=self._fit_width, device=self.device) | {
            "rewards": torch.tensor(scores.total, dtype=torch.float64, device=self.device),
            "scores": of_functions.to(self.device),
            # of each completion a share, so that the sum over all of them is the number
            "errors": torch.full((len(prompts),), sum(scores.num_errors.values()) / len(prompts), device=self.device),
            "is_truncated": torch.tensor([not each.has_ended for each in completions], device=self.device),
            "row": torch.tensor(places, device=self.device),
        }
        self._numbers = {
            name: value.cpu() for name, value in self._share({name: rows[name] for name in _OF_ROWS}, slots).items()
        }
        sampled = self._numbers["num_tokens"].sum().item()
        self._row["rollout/tokens_per_second"] = sampled / max(self._seconds["rollout"], 1e-9)
        rows |= self._look_again(rows, len(micro_batches))
        rows |= self._judge(rows, slots)
        if self._rollout.num_iterations == 1:
            # those of the model itself: the ratio of the step is 1 to the last bit
            rows.pop("old_log_probs", None)
        return rows

    def _judge(self, rows: dict[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
        """Return the advantages of this rank's completions, and what belongs to them, [R, …] each. Collective."""
        loss = cast(GRPO, self.loss)
        advantages = loss.advantages(self._numbers["rewards"], self._rollout.num_generations)  # [N]
        return {"advantages": advantages[slots].to(device=self.device, dtype=torch.float32)}

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        engine, group = self.engine, self.engine.groups.tensor
        assert self.tokenizer is not None, "prompts are text"
        with engine.gather_for_generation() as is_independent:
            return self._rollout.generate(
                cast(LanguageModel, self.model),
                prompts,
                seeds,
                ends=find_stop_ids(self.tokenizer),
                agree=None if group is None else functools.partial(_share_first, group=group),
                all_ended=None if is_independent else self._all_ended,
            )

    def _all_ended(self, ended: bool) -> bool:
        going = torch.tensor(float(not ended), device=self.device)
        return not bool(self.engine.sum_over_ranks(going))

    def _score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rows: Sequence[int]
    ) -> Scores:
        """Return the scores of this rank's completions; those of the first of the ranks that share them."""
        group, tokenizer, own = self.engine.groups.tensor, self.tokenizer, None
        assert tokenizer is not None, "prompts are text"
        if group is None or dist.get_rank(group) == 0:
            of_data = self.source.rows_of(rows, "train")
            try:
                own = self._rewards(
                    prompts=[prompt for prompt, _, _ in of_data],
                    completions=[
                        tokenizer.decode_continuation([*prompt], completion.tokens)
                        for prompt, completion in zip(prompts, completions, strict=True)
                    ],
                    references=[reference for _, reference, _ in of_data],
                    rows=[row for _, _, row in of_data],
                    tokens=[[*prompt, *list_tokens(each)] for prompt, each in zip(prompts, completions, strict=True)],
                )
            except ConfigError as mistake:
                mistake.late = f"The run has ended in step {self.trainer.global_step + 1}, for want of rewards."
                raise
        found = own if group is None else gather_objects(own, group)[0]
        assert found is not None, "the first rank has scored them"
        return Scores(*found)

    @torch.no_grad()
    def _look_again(self, rows: dict[str, Tensor], num_micro_batches: int) -> dict[str, Tensor]:
        """Return log-probabilities and values before the step, if something reads them, and those of the reference."""
        found: dict[str, list[Tensor]] = {}
        size = len(rows["inputs"]) // num_micro_batches
        for start in range(0, len(rows["inputs"]), size):
            part = self._cut(rows, slice(start, start + size))
            if self._rollout.num_iterations > 1 or self.loss.needs_values:
                with evaluating(self.model):
                    own = self._look(self.model, part, with_values=self.loss.needs_values)
                found.setdefault("old_log_probs", []).append(own.log_probs)
                if own.values is not None:
                    found.setdefault("old_values", []).append(own.values)
            if self.loss.needs_reference:
                with self.as_reference() as model:
                    of_reference = self._look(model, part).log_probs  # [B, T]
                found.setdefault("reference_log_probs", []).append(of_reference)
        width = rows["inputs"].shape[1]
        return {name: torch.cat([_widen(part, width) for part in parts]) for name, parts in found.items()}

    def _cut(self, rows: dict[str, Tensor], part: slice) -> Batch:
        """Return some rows, without the columns that none of them needs, and how the model reads them."""
        mine = {name: value[part] for name, value in rows.items()}
        width = self._fit_width(int(mine["num_inputs"].max()))
        cut = {name: value[:, :width] if name in self.of_tokens_names else value for name, value in mine.items()}
        return cut | self._share_prompts(mine, width)

    def _share_prompts(self, rows: dict[str, Tensor], width: int) -> dict[str, Packing]:
        """Return how the model reads each prompt once for several completions of it; nothing if it reads each row."""
        if not self._reads_branches:
            return {}
        host = {name: rows[name].numpy() for name in ("num_inputs", "num_tokens", "row")}
        # the last token of a prompt is of the branch: a completion of it has a target there
        num_shared = host["num_inputs"] - host["num_tokens"].clip(min=1)
        sizes = {"width": width, "pad_to": self._pad_to, "break_even": 6 * cast(Any, self.model).hidden_size}
        packing = plan_branches(host["num_inputs"], num_shared, host["row"], **sizes)
        return {} if packing is None else {"packing": packing}

    @functools.cached_property
    def _reads_branches(self) -> bool:
        # on a GPU, a mask would cost the kernel that holds no scores; a value is read in the place of each token
        takes_branches = "branches" in inspect.signature(self.model.forward).parameters
        is_eager_on_cpu = self.device.type == "cpu" and self._compile_mode is None
        return takes_branches and is_eager_on_cpu and not self.loss.needs_values

    def _fit_width(self, longest: int) -> int:
        """Return the length of padded rows of up to so many tokens."""
        seq_len: int = self.source.seq_len
        return min(-(-longest // self._pad_to) * self._pad_to, seq_len)

    @property
    def _pad_to(self) -> int:
        """What the length of a row is a multiple of; on a CPU, ranks of tensor parallelism divide it."""
        group = self.engine.groups.tensor
        on_cpu = 1 if group is None else dist.get_world_size(group)
        eager = on_cpu if self.device.type == "cpu" else _PAD_TO_EAGER
        return eager if self._compile_mode is None else PAD_TO

    def recipes_completions(self, num_completions: int) -> list[dict[str, Any]]:
        """Return the first of this rank's newest completions with their rewards, for the callback `Completions`."""
        tokenizer, rows = self.tokenizer, self._rows
        assert tokenizer is not None, "prompts are text"
        found = []
        for index in range(min(num_completions, len(rows.get("inputs", ())))):
            inputs, targets = rows["inputs"][index], rows["targets"][index]
            places = (targets != IGNORE_INDEX).nonzero()[:, 0].tolist()
            tokens, is_cut = targets[places].tolist(), bool(rows["is_truncated"][index])
            begin = places[0] + 1 if places else int(rows["num_inputs"][index])
            text = tokenizer.decode_continuation(inputs[:begin].tolist(), tokens if is_cut else tokens[:-1])
            [(prompt, reference, _)] = self.source.rows_of([int(rows["row"][index])], "train")
            # of all tokens of a completion one, or the mean of theirs
            advantages = rows["advantages"][index].expand_as(targets)[places].double()
            scores = dict(zip(self._rewards.names, rows["scores"][index].tolist(), strict=True))
            found.append(
                {"prompt": prompt, "completion": text, "reference": reference, "reward": rows["rewards"][index].item()}
                | {f"reward/{name}": score for name, score in scores.items()}
                | {"advantage": advantages.mean().item() if places else 0.0, "tokens": len(tokens), "ended": not is_cut}
            )
        return found

    # What all ranks know of it.

    def _share(self, of_rank: dict[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
        """Return values of all completions, [N, …], from those of this rank's, [R, …]. Collective."""
        found = {}
        for name, values in of_rank.items():
            wide = values.to(torch.float64 if values.is_floating_point() else torch.int64)  # a sum with zeros is exact
            whole = wide.new_zeros(len(slots) * self.engine.data_size, *values.shape[1:])
            whole[slots.to(whole.device)] = wide
            found[name] = self.engine.sum_over_data_ranks(whole).to(values.dtype)
        return found

    def _pad(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rows as wide as the widest of all ranks. Collective."""
        width = max(gather_objects(rows["inputs"].shape[1]))
        return {
            name: value
            if name not in self.of_tokens_names
            else _widen(value, width, fill=IGNORE_INDEX if name == "targets" else 0)
            for name, value in rows.items()
        }

    def _describe(self) -> dict[str, float]:
        """Return what is logged of the completions of all ranks."""
        rewards, lengths = self._numbers["rewards"], self._numbers["num_tokens"].double()
        of_groups = self.loss.describe_groups(rewards, self._rollout.num_generations)
        return {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std(correction=0).item(),
            **of_groups,
            **dict(
                zip(
                    (f"reward/{name}" for name in self._rewards.names),
                    self._numbers["scores"].mean(dim=0).tolist(),
                    strict=True,
                )
            ),
            "reward/errors": round(self._numbers["errors"].sum().item()),
            "rollout/tokens_mean": lengths.mean().item(),
            "rollout/tokens_max": lengths.max().item(),
            "rollout/truncated_fraction": self._numbers["is_truncated"].double().mean().item(),
        }

    def _count_tokens(self, place: int) -> dict[str, int]:
        """Return what a micro-batch holds on all ranks: its inputs, and the sum of their squares per row."""
        num_inputs = self._numbers["num_inputs"]
        stride = len(num_inputs) // self.trainer.accumulate_grad_batches
        lengths = num_inputs[place * stride : (place + 1) * stride]
        return {"num_tokens": int(lengths.sum()), "num_token_pairs": int((lengths * lengths).sum())}

    @override
    def _log_step(self, loss: Tensor) -> None:
        super()._log_step(loss)
        self.log_row(self._row)
        self._row = {}

    def _start_clock(self) -> None:
        """Note which shares of the step before were spent on its rollout and its rewards."""
        now = time.monotonic()
        if self._began is not None:
            whole = now - self._began
            self._row = {
                "rollout/time_fraction": self._seconds["rollout"] / whole,
                "reward/time_fraction": self._seconds["reward"] / whole,
            }
        self._began, self._seconds = now, {"rollout": 0.0, "reward": 0.0}

    @property
    def rollout_seconds(self) -> dict[str, float]:
        """Seconds of the newest `rollout`, and of its `reward`; 0 in a step that learns from an earlier one."""
        return dict(self._seconds)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began, trainer = time.monotonic(), cast(Any, self.trainer)  # Lightning sets its profiler from outside the class
        with trainer.profiler.profile(name):
            yield
        self._seconds[name] += time.monotonic() - began

    # Validation: `callbacks.generation_eval` answers held-out prompts. There is no loss without rewards.

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    @override
    def on_validation_epoch_end(self) -> None:
        hold_averages(self.trainer.optimizers, self.model, held=False)

    @override
    def list_measures(self) -> dict[str, bool | None]:
        # the loss has both signs and lies around 0, whatever is learned
        return {"reward/mean": True, "val/reward": True, "val/exact_match": True, "train/loss": None}

    # A rollout that further steps learn from is part of the train state.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._held is not None:
            checkpoint["rollout"] = self._held

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._held = checkpoint.get("rollout")

    @override
    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._rewards.close()


def _read(logits: Tensor, targets: Tensor, *, temperature: float, entropy: Entropy | None) -> Tensor:
    """Return the log-probability of each target, [...], 0 if ignored; with its entropy, [..., 2] float32.

    Args:
        logits: [..., V].
        targets: [...].
        temperature: Of the policy.
        entropy: Whether to compute that of the distribution that the target was drawn from, in nats, for a loss with
            its gradient.
    """
    scaled = logits if temperature == 1.0 else widen(logits) / temperature
    log_probs = -token_losses(scaled, targets)
    if entropy is None:
        return log_probs
    with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
        # of a token without probability, such as one that pads the vocabulary, the logarithm is no number to multiply
        each = widen(scaled).log_softmax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
        of_tokens = torch.where(targets != IGNORE_INDEX, -(each.exp() * each).sum(dim=-1), 0.0)
    return torch.stack([log_probs, of_tokens], dim=-1)


def _stack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    fit_width: Callable[[int], int],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return prompts with their completions: values of tokens [R, W], and their numbers [R].

    The token that ends a completion is a target.
    """
    wholes = [*map(list_tokens, completions)]
    num_inputs = [len(prompt) + max(len(whole), 1) - 1 for prompt, whole in zip(prompts, wholes, strict=True)]
    width = fit_width(max(num_inputs))
    inputs = torch.zeros(len(prompts), width, dtype=torch.int64)
    targets = torch.full((len(prompts), width), IGNORE_INDEX)
    log_probs = torch.zeros(len(prompts), width)
    for row, (prompt, whole, completion) in enumerate(zip(prompts, wholes, completions, strict=True)):
        begin, end = len(prompt) - 1, len(prompt) - 1 + len(whole)
        inputs[row, : num_inputs[row]] = torch.tensor([*prompt, *whole[:-1]])
        targets[row, begin:end] = torch.tensor(whole, dtype=torch.int64)
        log_probs[row, begin:end] = torch.tensor(completion.log_probabilities)
    of_tokens = {"inputs": inputs, "targets": targets, "sampler_log_probs": log_probs}
    found = of_tokens | {"num_inputs": torch.tensor(num_inputs), "num_tokens": torch.tensor([*map(len, wholes)])}
    return {name: value.to(device) for name, value in found.items()}


def _widen(values: Tensor, width: int, *, fill: int = 0) -> Tensor:
    """Return rows [n, W'] as [n, width]."""
    wide = values.new_full((len(values), width), fill)
    wide[:, : values.shape[1]] = values
    return wide


def _share_first(value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor of the first rank of a group on all of them."""
    dist.broadcast(value, group=group, group_src=0)
    return value
