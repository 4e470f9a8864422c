"""Write `lm_eval_results.json`: what lm-evaluation-harness computes by its own class for transformers.

It loads the exported models of `tests/scorer_cases.py`. Needs `pip install -e '.[eval]'`, which CI does not have:

    python tests/recipes/evaluator/make_lm_eval_results.py
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from scorer_cases import GENERATE_REQUESTS, ROLLING_TEXTS, SCORE_REQUESTS, make_case  # noqa: E402


def main() -> None:
    """Write the file."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    found: dict[str, Any] = {"lm_eval": version("lm_eval"), "transformers": transformers.__version__, "models": {}}
    for name in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            make_case(name).export(Path(folder))
            # without its cache of logits: of requests with the same input and another seam (0.4.13), it scores the
            # wrong positions of all but the one with the longest continuation
            reference = HFLM(
                pretrained=f"{folder}/model", device="cpu", dtype="float32", batch_size=3, logits_cache=False
            )
        ask = [
            [SimpleNamespace(args=request) for request in requests] for requests in (SCORE_REQUESTS, GENERATE_REQUESTS)
        ]
        rolled = [SimpleNamespace(args=(text,)) for text in ROLLING_TEXTS]
        found["models"][name] = {
            "scored": reference.loglikelihood(ask[0], disable_tqdm=True),
            "rolled": reference.loglikelihood_rolling(rolled, disable_tqdm=True),
            "generated": reference.generate_until(ask[1], disable_tqdm=True),
        }
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    Path(__file__).with_name("lm_eval_results.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
