"""Prepare documents with datatrove: its filters, or its MinHash deduplication in four stages.

python datatrove_prepare.py filters|copies <folder of JSONL files> <output folder>
"""

import sys
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import HashConfig, MinhashConfig
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

# the bands and rows of mode.near_copies=0.8; its xxhash takes no text (datatrove 0.10.1 with xxhash 4)
CONFIG = MinhashConfig(
    n_grams=5, num_buckets=18, hashes_per_bucket=6, hash_config=HashConfig(precision=64, hash_fc="sha1")
)


def run(name: str, steps: list[Any], output: Path, *, tasks: int) -> None:
    """Run the steps of one stage."""
    LocalPipelineExecutor(
        pipeline=steps, tasks=tasks, workers=2, logging_dir=str(output / "logs" / name), skip_completed=False
    ).run()


def main() -> None:
    what, source, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    num_files = len(list(Path(source).glob("*.jsonl")))
    kept = JsonlWriter(str(output / "kept"), compression=None)
    if what == "filters":
        filters = [
            GopherRepetitionFilter(),
            GopherQualityFilter(),
            C4QualityFilter(filter_no_terminal_punct=False),
            FineWebQualityFilter(),
        ]
        run("filters", [JsonlReader(source), *filters, kept], output, tasks=num_files)
        return
    signatures, buckets, removed = (str(output / name) for name in ("signatures", "buckets", "removed"))
    run("1", [JsonlReader(source), MinhashDedupSignature(signatures, config=CONFIG)], output, tasks=num_files)
    run("2", [MinhashDedupBuckets(signatures, buckets, config=CONFIG)], output, tasks=CONFIG.num_buckets)
    run("3", [MinhashDedupCluster(buckets, removed, config=CONFIG)], output, tasks=1)
    run("4", [JsonlReader(source), MinhashDedupFilter(removed), kept], output, tasks=num_files)


if __name__ == "__main__":
    main()
