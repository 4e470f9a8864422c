"""Log-probabilities of answers under the first weights of a run, computed once and found again by a hash of the sample.

Whatever splits, ranks and epochs there are, equal samples have equal ids. The values are in the cache, where runs with
the same weights and data share them, in parts, so that an interrupted computation goes on; and in the folder of the
run, which needs nothing else to be resumed.

Shapes: N samples, K' columns: the answers of a sample, and of KTO the answer to another prompt.
"""

import hashlib
import logging
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.cache import open_cache_dir
from recipes.engine import Engine
from recipes.errors import ConfigError
from recipes.files import replacing

LOGGER = logging.getLogger("lightning_recipes")
_FILE = "reference.npz"
_SAMPLES_PER_PART = 8192
_NUM_COMPARED = 32  # samples of each cached part that are computed again


class ReferenceTable:
    """Log-probabilities by the id of a sample.

    Args:
        ids: [N] int64.
        values: [N, K'] float32.
        device: Device on which samples are looked up.
    """

    def __init__(self, ids: NDArray[np.int64], values: NDArray[np.float32], *, device: torch.device) -> None:
        order = np.argsort(ids, kind="stable")
        self._ids = torch.from_numpy(ids[order]).to(device)  # [N]
        self._values = torch.from_numpy(values[order]).to(device)  # [N, K']

    @classmethod
    def of_run(
        cls, folder: Path, *, resumed: Path | None, keeps: bool, engine: Engine, is_first: bool
    ) -> "ReferenceTable":
        """Return the table in a run folder, or in that of the run that it goes on from. Collective.

        Args:
            folder: The run folder, which only rank 0 reads.
            resumed: Folder of the run whose checkpoint was read, which may be another one; None: unknown.
            keeps: Whether the table of another folder is copied to this one, for those who go on from there.
            engine: The ranks.
            is_first: Whether this is rank 0.

        Raises:
            ConfigError: There is none.
        """
        found: _Part | None = None
        if is_first:
            found = _read(folder / _FILE)
            if found is None and resumed is not None and (found := _read(resumed / _FILE)) is not None and keeps:
                _save(folder / _FILE, found)
        part: _Part | None = engine.broadcast(found)
        if part is None:
            raise ConfigError(
                f"resume={folder}",
                f"{_FILE} is not there: the log-probabilities under the weights that the run began with",
                f"the run folder with its {_FILE}, or the same command without resume",
            )
        return cls(*part, device=engine.root_device)

    @classmethod
    def build(
        cls,
        sets: Sequence[tuple[Any, Any]],
        *,
        key: str,
        cache_dir: str,
        run_folder: Path,
        engine: Engine,
        is_first: bool,
        make_loader: Callable[[Any, Any, range], Iterable[Any]],
        measure: Callable[[Any], tuple[Tensor, Tensor]],
        tolerance: float,
    ) -> "ReferenceTable":
        """Return the table of some datasets, computing the parts of it that are not cached. Collective.

        Args:
            sets: Datasets, each with its source.
            key: Equal for equal log-probabilities of equal tokens.
            cache_dir: Folder of all caches.
            run_folder: Where the table is written.
            engine: The ranks.
            is_first: Whether this is rank 0.
            make_loader: (dataset, source, indices) -> loader of this rank's share of these samples.
            measure: Batch -> ids [B] and log-probabilities [B, K'].
            tolerance: Relative difference of equal log-probabilities, computed in other batches.
        """
        folder = open_cache_dir(cache_dir) / "references"
        found: list[_Part] = []
        for dataset, source in sets:
            identity = f"{key} {source.fingerprint} {len(dataset)}"
            for start in range(0, len(dataset), _SAMPLES_PER_PART):
                indices = range(start, min(start + _SAMPLES_PER_PART, len(dataset)))
                first_id = int(dataset[start]["id"])  # the splits of a source have one fingerprint
                digest = hashlib.blake2b(f"{identity} {start} {first_id}".encode(), digest_size=12).hexdigest()
                path = folder / f"{digest}.npz"
                part: _Part | None = engine.broadcast(_read(path) if is_first else None)
                if part is not None:
                    # a key cannot know all that decides a value, such as the code of a model of one's own
                    some = indices[:_NUM_COMPARED]
                    fresh = _measure_part(len(some), engine, make_loader(dataset, source, some), measure)
                    if not _agree(part, fresh, tolerance):
                        if is_first:
                            LOGGER.warning("%s is of other weights, in spite of its key: it is computed again", path)
                        part = None
                if part is None:
                    part = _measure_part(len(indices), engine, make_loader(dataset, source, indices), measure)
                    if is_first:
                        _save(path, part)
                found.append(part)
        ids, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if is_first:
            _save(run_folder / _FILE, (ids, values))
        return cls(ids, values, device=engine.root_device)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of samples, [B, K']; NaN of a sample that is not in the table."""
        places = torch.searchsorted(self._ids, ids).clamp(max=len(self._ids) - 1)  # [B]
        is_known = self._ids[places] == ids
        return torch.where(is_known[:, None], self._values[places], torch.nan)


_Part = tuple[NDArray[np.int64], NDArray[np.float32]]  # ids [N], log-probabilities [N, K']


def _measure_part(
    num_samples: int, engine: Engine, loader: Iterable[Any], measure: Callable[[Any], tuple[Tensor, Tensor]]
) -> _Part:
    """Return ids and log-probabilities of N samples, of which rank r has every `data_size`-th from r on. Collective."""
    ids, values = (torch.cat(parts) for parts in zip(*map(measure, loader), strict=True))  # [n], [n, K']
    every_id = engine.gather_over_data_ranks(ids)  # [ranks n]
    every_value = engine.gather_over_data_ranks(values.float())  # [ranks n, K']
    in_order = torch.arange(len(every_id), device=ids.device).view(engine.data_size, -1).T.flatten()[:num_samples]
    return every_id[in_order].cpu().numpy(), every_value[in_order].cpu().numpy()


def _agree(cached: _Part, fresh: _Part, tolerance: float) -> bool:
    """Return whether the beginning of a cached part has the ids and values that were just computed."""
    number = len(fresh[0])
    values = cached[1][:number]
    return np.array_equal(cached[0][:number], fresh[0]) and np.allclose(values, fresh[1], tolerance, tolerance)


def _read(path: Path) -> _Part | None:
    """Return a part from its file; None if there is none, or it is damaged."""
    try:
        with np.load(path) as saved:
            return saved["ids"], saved["values"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        LOGGER.warning("%s cannot be read (%s): it is computed again", path, error)
        return None


def _save(path: Path, part: _Part) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, ids=part[0], values=part[1])
