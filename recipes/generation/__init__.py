"""Generate text with a language model: batched, with the log-probabilities of what was sampled. Torch only.

The contract, which the modes, the callbacks and the evaluator use through the task, and rollouts stand on:

- A row is one sample of one prompt. Its tokens depend on the model, its prompt, the sampling settings and its seed: not
  on the batch it is in, the rows that ended before, or how many ranks generate. Only the last bits of the logits depend
  on the number of rows in a matrix product, as they do for a forward pass.
- Samples of a prompt share its prefill. A row that has ended leaves the batch.
- Memory is allocated once: a new token costs one forward pass of one token per row.
- A completion has the log-probability of each token under the distribution that it was sampled from.

`row_seed` makes the seed of a row of a training run from (seed, step, prompt, sample).
"""

from recipes.generation.generate import Completion, generate
from recipes.generation.sampling import Sampling, row_seed
from recipes.generation.stop_strings import StopStrings

__all__ = ["Completion", "Sampling", "StopStrings", "generate", "row_seed"]
