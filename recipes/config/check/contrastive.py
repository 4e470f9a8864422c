"""Check runs that compare random views of images: that the data has them, and that there is something to compare."""

from collections.abc import Iterator

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.errors import ConfigError


def check_views(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that task, loss and transform agree on the number of views, and that a batch has two images."""
    config, choices = run.config, run.choices
    needed = run.task.num_views
    task, loss = (f"{section}={choices.get(section, '…')}" for section in ("task", "loss"))
    reads_views = find_signature(config["loss"]["_target_"]).constants.get("reads") == "views"
    if reads_views and needed == 1:
        reason = "it compares two views of each image, and this task reads one"
        yield ConfigError(f"{loss} {task}", reason, "recipe=simclr, or another loss")
    if needed > 1 and not reads_views:
        yield ConfigError(f"{loss} {task}", "it does not compare the views of an image", "loss=nt_xent")
    transform = config.get("transform") or {}
    made = transform.get("views")
    if isinstance(made, int) and made != needed and "transform" in config["data"]:
        reason = f"the task reads {needed} of each image"
        fix = "transform=simclr, or transform.views=2" if needed > 1 else "transform.views=1, or recipe=simclr"
        yield ConfigError(f"transform.views={made} {task}", reason, fix)
    if needed > 1 and run.global_batch_size == 1:
        reason = "an image is compared with the others of its global batch"
        yield ConfigError("global_batch_size=1", reason, "global_batch_size=256, or more")
