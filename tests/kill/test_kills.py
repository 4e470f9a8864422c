"""A run killed at any moment and resumed with the same command equals, bit for bit, a run that was never killed."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kill.cases import CASES, IMAGES, compose, get_captioned, get_illustrated, get_image_files, get_overrides
from kill.disk import differences
from kill.killer import Killer
from kill.lives import ForkedLife, Zygote
from kill.victim import Moment, Victim
from support import write_texts

pytestmark = pytest.mark.fresh_python  # the command's ranks are found as its children

SEED = 1
# kills of each case, and how many of them hit the real command
KILLS = {
    "single": (3, 1),
    "kto": (2, 0),  # the log-probabilities of a reference, and a divergence before each step
    "fsdp": (2, 0),
    "deepspeed_stage_2": (1, 0),
}
SLOW = "pp2 x tp2"  # four ranks on two cores


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder: Path = tmp_path_factory.mktemp("compose")
    texts = write_texts(folder / "texts")
    runs = [compose(get_overrides(name, folder, texts)) for name in CASES]
    of_images = [[*IMAGES], get_image_files(folder), get_captioned(folder), get_illustrated(folder)]
    zygote = Zygote([*runs, *(compose([*typed, f"hydra.run.dir={folder}"]) for typed in of_images)])
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def killer(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("kills"), zygote, seed=SEED)


@pytest.fixture(scope="module")
def long_killer(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(tmp_path_factory.mktemp("long_kills"), zygote, seed=SEED + 1)


@pytest.mark.parametrize("name", KILLS)
def test_eight_kills_lose_no_checkpoint_and_no_bit(name: str, killer: Killer) -> None:
    num_kills, num_by_command = KILLS[name]
    _kill(killer, name, num_kills, num_by_command=num_by_command)


@pytest.mark.slow
def test_two_kills_of_ranks_that_divide_layers_and_matrices_lose_no_bit(killer: Killer) -> None:
    _kill(killer, SLOW, 2, num_by_command=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in CASES if name != SLOW])
def test_two_hundred_kills_lose_no_checkpoint_and_no_bit(name: str, long_killer: Killer) -> None:
    _kill(long_killer, name, 40, num_by_command=3)


def test_random_crops_killed_with_0_1_and_3_loader_processes_are_those_of_a_run_never_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    _kill_twice(zygote, tmp_path, IMAGES, num_workers=(0, 1, 3))


def test_augmented_files_killed_with_0_1_and_3_loader_processes_are_those_of_a_run_never_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    _kill_twice(zygote, tmp_path, get_image_files(tmp_path), num_workers=(0, 1, 3))


def test_captioned_images_killed_with_0_1_and_3_loader_processes_are_those_of_a_run_never_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    _kill_twice(zygote, tmp_path, get_captioned(tmp_path), num_workers=(0, 1, 3))


def test_illustrated_rows_killed_with_0_1_and_3_loader_processes_are_those_of_a_run_never_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    _kill_twice(zygote, tmp_path, get_illustrated(tmp_path), num_workers=(0, 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_augmented_files_killed_twice_lose_no_bit(num_workers: int, zygote: Zygote, tmp_path: Path) -> None:
    _kill_twice(zygote, tmp_path, get_image_files(tmp_path), num_workers=(num_workers,) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_random_crops_killed_twice_lose_no_bit(num_workers: int, zygote: Zygote, tmp_path: Path) -> None:
    _kill_twice(zygote, tmp_path, IMAGES, num_workers=(num_workers,) * 3)


def _kill_twice(zygote: Zygote, folder: Path, overrides: Sequence[str], *, num_workers: tuple[int, int, int]) -> None:
    """Kill a run at two moments of its steps, each life with a number of loader processes, and compare the last."""
    rng = random.Random(SEED)
    victim, reference = (Victim(folder=folder / name, rng=rng) for name in ("victim", "reference"))
    moments: list[Moment | None] = [Moment(after="save", seconds=0.01, saves_before=number) for number in (2, 3)]
    for one, lives in ((reference, [(0, None)]), (victim, zip(num_workers, [*moments, None], strict=True))):
        one.folder.mkdir()
        for workers, moment in lives:
            run = compose([*overrides, f"loader.num_workers={workers}", f"hydra.run.dir={one.folder}"])
            ended = one.live(lambda log, run=run: ForkedLife(zygote, run, log, world_size=1), moment)
            assert ended == (moment is None)
    assert not victim.lost
    assert [death.row < 100 for death in victim.deaths] == [True, True]
    assert list(differences(victim.folder, reference.folder)) == []


def _kill(killer: Killer, name: str, num_kills: int, *, num_by_command: int) -> None:
    result = killer.kill(name, num_kills, num_by_command=num_by_command)
    assert not result.broken, "\n".join(result.broken)
    assert not result.lost, "\n".join(result.lost)
    assert result.num_kills == num_kills
    assert result.num_finished == len(result.victims)
