"""Training recipes from Python: compose a run, train it, load its weights, read what it wrote.

    import lightning_recipes as lr

    run = lr.compose("recipe=single_fp32", "model=llama_nano", "trainer.max_steps=100").fit()
    model = lr.load(run.folder)

The functions take the overrides of the command line, and a run started here leaves the folder that the command leaves.
`lightning_recipes.callbacks` are those of any Lightning project; importing them imports none of the recipes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .one_name import ROOT, install

if TYPE_CHECKING:
    from .runs import ComposedRun as ComposedRun
    from .runs import InvalidConfigError as InvalidConfigError
    from .runs import Plan as Plan
    from .runs import RecordedRun as RecordedRun
    from .runs import RunError as RunError
    from .runs import compose as compose
    from .runs import load as load
    from .runs import plan as plan
    from .runs import read as read

__all__ = [
    "ComposedRun",
    "InvalidConfigError",
    "Plan",
    "RecordedRun",
    "RunError",
    "compose",
    "load",
    "plan",
    "read",
]

# what people look for -> what does it
_INSTEAD = {
    **dict.fromkeys(("fit", "train", "run"), 'lr.compose("model=gpt2", …).fit()'),
    "resume": 'lr.compose("resume=<run folder>").fit()',
    **dict.fromkeys(("load_model", "from_pretrained"), 'lr.load("<run folder>")'),
}

if str(ROOT) not in __path__:  # a clone, where recipes/ and callbacks/ lie beside this folder
    __path__.append(str(ROOT))
install()


def __getattr__(name: str) -> object:
    if name not in __all__:
        instead = f"; type: {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    import_module(f"{__name__}.recipes")  # from here on, `recipes` can be imported
    return getattr(import_module(f"{__name__}.runs"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
