"""LightningModules and a LightningDataModule as people write them, which know nothing of recipes."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from matplotlib import pyplot
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric
from torchmetrics.classification import Accuracy


class Noisy(TensorDataset):
    """Rows with noise from the global generator, so that an epoch differs from the one before."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


class Rows(lightning.LightningDataModule):
    """Two hundred rows in shuffled batches: 13 of 16 in an epoch, the last of 8."""

    def __init__(self, batch_size: int = 16, num_workers: int = 0, noisy: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str | None = None) -> None:
        x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        y = (x.sum(dim=1) > 0).long()
        self.train_set = (Noisy if self.hparams["noisy"] else TensorDataset)(x, y)
        self.val_set = TensorDataset(x[:50], y[:50])

    def train_dataloader(self) -> Any:
        size, workers = self.hparams["batch_size"], self.hparams["num_workers"]
        return DataLoader(self.train_set, batch_size=size, shuffle=True, num_workers=workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=25)

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.val_set[:30]), 20)


class Classifier(lightning.LightningModule):
    """Automatic optimization with a schedule by epochs; names of attributes that tasks of ours have, too."""

    def __init__(
        self, lr: float = 1e-2, dropout: float = 0.1, num_inputs: int = 8, spike_at: int | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.model = nn.Sequential(nn.Linear(num_inputs, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 10))
        self.loss = nn.CrossEntropyLoss()
        self.metrics: dict[str, float] = {}
        self.num_epochs = 0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.flatten(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.loss(self(x), y)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.hparams.get("spike_at"):
            loss = 1000 * loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))

    def on_train_epoch_end(self) -> None:
        self.num_epochs += 1
        self.log("epochs", float(self.num_epochs))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)}


class Branched(Classifier):
    """Adds up the network and the branches in a dict, each of which it calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.branches = nn.ModuleDict({"narrow": nn.Linear(8, 10, bias=False), "wide": nn.Linear(8, 10)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(branch(x.flatten(1)) for branch in self.branches.values())


class Sampling(Classifier):
    """Draws random numbers in its validation, and more of them for a figure where its logger takes one."""

    def on_train_start(self) -> None:
        self.logger.experiment.add_text("note", "begun")  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.logger.log_metrics({"epoch_begun": float(self.current_epoch)})  # type: ignore[union-attr]
            for logger in self.loggers:
                logger.log_metrics({"begun_by_each": 1.0})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(self(x + 0.1 * torch.randn(x.shape)), y))
        experiment = self.logger.experiment  # type: ignore[union-attr]
        if batch_idx == 0 and hasattr(experiment, "add_figure"):
            figure, axes = pyplot.subplots(figsize=(1, 1))
            axes.plot(torch.randn(8))
            experiment.add_figure("sample", figure, self.global_step)


class Grouped(Classifier):
    """Two groups of parameters, of which one has a name, with a rate of its own in each step."""

    def configure_optimizers(self) -> Any:
        first, last = self.model[0].parameters(), self.model[3].parameters()
        groups = [{"params": [*last], "name": "head"}, {"params": [*first], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Measured(Classifier):
    """Logs given losses, one for each validation."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.losses[self.current_epoch]))


class TwoSets(Rows):
    """A data module with two sets to validate."""

    def val_dataloader(self) -> Any:
        return [DataLoader(self.val_set, batch_size=25), DataLoader(self.train_set, batch_size=50)]


class OnTwoSets(Classifier):
    """Logs a loss, and rows, of each set."""

    def __init__(self, logs_loss: bool = True) -> None:
        super().__init__()
        self.logs_loss = logs_loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_rows", float(len(x)))
        if self.logs_loss:
            self.log("val_loss", self.loss(self(x), y))


class Normalized(Classifier):
    """Running statistics of batches; says what each rank validates with."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        mean = self.model[1].running_mean
        self.log("val_mean", mean.norm(), sync_dist=True)
        self.log("val_spread", (self.all_gather(mean) - mean).abs().max())


class ByHand(Classifier):
    """Manual optimization with two batches a step, whatever an epoch leaves over."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        self.num_batches += 1
        if self.num_batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


class Tested(Classifier):
    """Logs in a test, and predicts classes, scores and a text for each row."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        scores = self(batch[0]).softmax(1)
        return {"class": scores.argmax(1), "scores": scores, "shown": [f"row of {len(x)}" for x in batch[0]]}


class Averaging(Classifier):
    """Predicts one number for a whole batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).mean()


class Plateau(Classifier):
    """A learning rate that is halved whenever a loss has not risen; names the epochs it begins."""

    def __init__(self, monitor: str = "val_loss", interval: str = "epoch", frequency: int = 1) -> None:
        super().__init__()
        self.schedule = {"monitor": monitor, "interval": interval, "frequency": frequency}

    def on_train_epoch_start(self) -> None:
        self.log("epoch_begun", float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.schedule}}


class Taught(Classifier):
    """A student and the moving average of its weights; draws in the last hooks of a batch and of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.zeros(10, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.loss(self(x), y) + (self.model[3].weight - self.teacher).square().sum()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.lerp_(self.model[3].weight.detach(), 0.1 + 0.1 * float(torch.rand(())))
        self.log("teacher_norm", self.teacher.norm())

    def on_validation_end(self) -> None:
        self.drawn = torch.randn(10)


class Keeping(Classifier):
    """Adds a number and an object to its checkpoints, beside its settings, and takes all of them back."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches, self.scale = 0, Scale(2.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1
        self.log("num_batches", float(self.num_batches))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"].update(of_module=self.scale)
        checkpoint["counted"], checkpoint["scale"] = self.num_batches, self.scale

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["hyper_parameters"]["lr"] == self.hparams["lr"]
        self.num_batches, self.scale = checkpoint["counted"], checkpoint["scale"]


class Scale:
    """An object that no file is loaded with."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Adversaries(lightning.LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        fake = self.generator(torch.randn(len(real), 4).to(real))
        self._step(of_generator, self._judge(fake, real=True), "generator_loss")
        judged = self._judge(real, real=True) + self._judge(fake.detach(), real=False)
        self._step(of_discriminator, judged, "discriminator_loss")

    def _judge(self, rows: Tensor, *, real: bool) -> Tensor:
        judged = self.discriminator(rows)
        return nn.functional.binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(real)))

    def _step(self, optimizer: Any, loss: Tensor, name: str) -> None:
        self.toggle_optimizer(optimizer)
        self.log(name, loss)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=self.lr, betas=(0.5, 0.999)) for part in parts]


class WithStrayTensor(Classifier):
    """A module that optimizes a tensor that it does not own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.zeros(2, requires_grad=True)], lr=0.1)


class Unfreezing(Classifier):
    """A module that brings a callback, by which its optimizer grows."""

    @property
    def backbone(self) -> nn.Module:
        return self.model[0]

    def configure_callbacks(self) -> Any:
        return BackboneFinetuning(1)


class Words(lightning.LightningDataModule):
    """Batches without a tensor."""

    def train_dataloader(self) -> Any:
        return DataLoader(["a", "bc", "def", "gh"], batch_size=2)  # type: ignore[arg-type]  # any sequence


class Reader(Classifier):
    """A module that makes its inputs of text."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.tensor([[float(len(word))] * 8 for word in batch])
        return super().training_step((rows, torch.zeros(len(batch), dtype=torch.long)), batch_idx)


class WithLoaders(Classifier):
    """A module that has its loaders itself."""

    def train_dataloader(self) -> Any:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(Noisy(x, (x.sum(dim=1) > 0).long()), batch_size=16, shuffle=True)


class Habitual(Classifier):
    """What modules log in public projects: names that are logged by batch or by epoch, and to the logger itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.loss(self(x), y)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        self.logger.log_metrics({"of_module": 2.0})  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(self(x), y), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("step", float(self.current_epoch))
        for logger in self.loggers:
            logger.experiment.add_scalar("epoch", self.current_epoch)  # type: ignore[attr-defined]
            logger.log_metrics({"epochs_done": self.current_epoch + 1.0}, step=self.current_epoch)


class Composed(Classifier):
    """A module that is given its network, and functions that make optimizer and schedule, declared as their results."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler) -> None:  # type: ignore[valid-type]  # as people write it
        super().__init__()
        self.save_hyperparameters("optimizer", "scheduler", logger=False)
        self.model = net
        self.accuracy, self.best = Accuracy(task="multiclass", num_classes=10), MaxMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self(x), y)
        self.log("val/acc", self.accuracy, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.accuracy.compute())
        self.log("val/acc_best", self.best.compute(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        assert self.trainer.model is not None
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.hparams["scheduler"](optimizer=optimizer)}


class Annealed(Classifier):
    """A module whose schedules depend on the length that the Trainer was given; it ends once it is told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        assert self.trainer.max_epochs is not None
        warmup = self.trainer.estimated_stepping_batches / self.trainer.max_epochs / 2
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        by_epoch = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows without end, as an agent collects them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(8)
            yield x, (x.sum() > 0).long()


class OfStream(Classifier):
    """A module that makes its data itself, without end."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=16)


class OfLightning1(Classifier):
    """A module with the argument and the hook that Lightning 2 has removed."""

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> Tensor:
        return super().training_step(batch, batch_idx)

    def training_epoch_end(self, outputs: Any) -> None:
        """Do nothing."""


class WithoutLoaders(lightning.LightningDataModule):
    """A data module that has lost its loaders."""


class TrainingOnly(Rows):
    """A data module without a validation."""

    val_dataloader = lightning.LightningDataModule.val_dataloader  # type: ignore[assignment]  # not overridden


class Interrupted(Classifier):
    """A module whose run is told to stop in a validation, before its first batch or in it."""

    def __init__(self, stop_at: int | None = None, in_batch: bool = False) -> None:
        super().__init__()
        self.stop_at, self.in_batch = stop_at, in_batch

    def on_validation_start(self) -> None:
        if self.trainer.global_step == self.stop_at and not self.in_batch:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.stop_at and self.in_batch and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)
