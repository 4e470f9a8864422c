"""FSDP2 on real ranks, with models whose blocks are of another kind than those of conf/model/."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support import read_metrics, run_train, write_texts

# parameters on the block itself, a vector and a matrix, beside those of modules in it
MODEL = """
import torch
from torch import nn
from recipes.model.init import init_decoder


class Block(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.mix = nn.Parameter(torch.empty(length, length))
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x + self.scale * (self.mix.tril() @ self.up(self.norm(x)))


class Mine(nn.Module):
    input_kind = "tokens"

    def __init__(self, *, vocab_size: int, max_seq_len: int, hidden_size: int):
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, max_seq_len) for _ in range(2))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self, seed):
        init_decoder(self, seed=seed, num_layers=2, vocab_size=self.vocab_size)

    def init_buffers(self):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, the model and its config."""
    folder = tmp_path_factory.mktemp("own")
    write_texts(folder / "texts")
    (folder / "mine.py").write_text(MODEL)
    (folder / "conf/model").mkdir(parents=True)
    settings = "_target_: mine.Mine\nvocab_size: 257\nmax_seq_len: 32\nhidden_size: 32\n"
    (folder / "conf/model/mine.yaml").write_text(settings)
    return folder


def train(folder: Path, name: str, *overrides: str) -> "CompletedProcess[str]":
    common = ["model=mine", "hydra.searchpath=[conf]", "data=text_files", "data.path=texts", "tokenizer=bytes"]
    common += ["trainer.max_steps=4", "warmup_steps=1", "global_batch_size=4", "save_every=null", "log_every=1"]
    common += ["trainer.accelerator=cpu", "callbacks=[grad_norm]", f"hydra.run.dir={name}"]
    return run_train([*common, *overrides], folder=folder, python_path=str(folder))


def test_parameters_on_the_block_itself_train_as_on_one_device(folder: Path) -> None:
    rows = {}
    for name, overrides in (("single", []), ("fsdp", ["strategy=fsdp", "trainer.devices=2"])):
        done = train(folder, name, *overrides, "precision=bf16-mixed")
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = [(row["train/loss"], row["grad/norm"]) for row in read_metrics(folder / name)]
    assert len(rows["single"]) == 4
    for one, other in zip(rows["single"], rows["fsdp"], strict=True):
        # as far as one device in bf16-mixed differs from itself when the order of its sums changes: 2e-5 and 1e-3
        assert other[0] == pytest.approx(one[0], rel=1e-4)
        assert other[1] == pytest.approx(one[1], rel=5e-3)


def test_a_model_that_could_not_be_resumed_is_rejected_before_it_trains(folder: Path) -> None:
    (folder / "mine.py").write_text(MODEL.partition("    def init_buffers")[0])
    done = train(folder, "without")
    (folder / "mine.py").write_text(MODEL)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Mine has no init_buffers(), which a resume calls" in done.stdout + done.stderr
    assert not (folder / "without/metrics.csv").exists()
