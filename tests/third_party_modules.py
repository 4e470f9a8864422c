"""Small modules as people write them; each uses torch's, numpy's and Python's random generators during training."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

SAMPLES = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))  # [N, features]


def loader(samples: Any = SAMPLES, **options: Any) -> DataLoader[Any]:
    """Load batches of two, shuffled by torch's global generator."""
    return DataLoader(samples, **{"batch_size": 2, "shuffle": True, **options})


class Mixup(LightningModule):
    """Mixes samples with numpy's and Python's generators; the optimizer and data are arguments."""

    def __init__(self, make_optimizer: Any = torch.optim.AdamW, scheduler: bool = False, **log: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self._make_optimizer, self._scheduler, self._log = make_optimizer, scheduler, log

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        share = np.random.beta(1, 1) * random.random()
        loss: Tensor = self.net(share * batch + (1 - share) * batch.flip(0)).square().mean()
        self.log("train_loss", loss, **self._log)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean() + 0.0 * random.random())

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.parameters(), lr=0.01)
        if not self._scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(shuffle=False)


class SkipsBatches(Mixup):
    """Returns None for some batches, as people do for bad ones."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class FromIterator(Mixup):
    """Fetches its own batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss


class Stream(IterableDataset[Tensor]):
    """An iterable dataset without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from SAMPLES


class Streaming(Mixup):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(Stream(), shuffle=False)


class Ragged(Mixup):
    """Gives every batch a different shape."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader([SAMPLES[: size + 2] for size in range(6)], batch_size=None)


class Workers(Mixup):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(num_workers=1)


class Owner(Mixup):
    """Defines attributes with names that callbacks might look up."""

    num_samples, num_tokens, writes_rows, row = 7, 50257, True, None
    grad_norm = clip_threshold = torch.tensor(3.0)

    def log_row(self, *args: Any) -> None:
        raise AssertionError("called")

    flops_of = generate_text = save_weights = sample_losses = forward_on_meta = guard_steps = log_row


class Autoencoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch + torch.randn_like(batch))), batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


class Gan(LightningModule):
    """Uses two optimizers, stepped manually; the discriminator only on every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        noise = torch.randn(len(batch), 4)
        for optimizer, is_generator in ((of_generator, True), (of_discriminator, False)):
            if not is_generator and batch_idx % 2:
                continue
            self.toggle_optimizer(optimizer)
            fake = self.discriminator(self.generator(noise))
            real = self.discriminator(batch)
            loss = fake.sigmoid().log().neg().mean() if is_generator else (fake - real).mean()
            self.log("g_loss" if is_generator else "d_loss", loss, prog_bar=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


class Replay(IterableDataset[Any]):
    """Yields samples from a buffer that the training step fills."""

    def __init__(self, buffer: deque[Any]) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        for index in np.random.choice(len(self.buffer), 8, replace=False):
            yield self.buffer[index]


class Dqn(LightningModule):
    """Plays one environment step per batch and stores it, as in Lightning's reinforcement learning example."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = nn.Linear(4, 2), nn.Linear(4, 2)
        self.buffer: deque[Any] = deque(maxlen=20)
        self.state, self.reward = torch.zeros(4), 0.0
        for _ in range(10):
            self.play()

    def play(self) -> None:
        action = random.randrange(2) if np.random.random() < 0.5 else int(self.net(self.state).argmax())
        before, self.state = self.state, torch.from_numpy(np.random.randn(4).astype("float32"))
        self.buffer.append((before, action, float(action), self.state))
        self.reward += action

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.play()
        states, actions, rewards, next_states = batch
        values = self.net(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            expected = self.target(next_states).max(1).values * 0.9 + rewards
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log("reward", self.reward)
        return nn.functional.mse_loss(values, expected.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Replay(self.buffer), batch_size=2)


class ByHand(Mixup):
    """Accumulates, clips and schedules manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Transformer(LightningModule):
    """A two-layer language model with dropout, attention and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1] - 1)
        logits = self.head(self.encoder(self.embed(batch[:, :-1]), mask=mask, is_causal=True))  # [B, T, V]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=0.1)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(torch.randint(16, (12, 7), generator=torch.Generator().manual_seed(2)))
