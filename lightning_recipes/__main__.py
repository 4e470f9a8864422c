"""`python -m lightning_recipes …`: the command `lightning-recipes` of this Python, wherever its scripts are."""

from importlib import import_module

if __name__ == "__main__":
    import_module("lightning_recipes.recipes.entry.installed").main("python -m lightning_recipes")
