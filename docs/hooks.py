"""Hooks of mkdocs: nothing that a reader's browser loads comes from the network."""

from typing import Any

_REMOTE = "https://unpkg.com/iframe-worker/shim"  # of the theme's offline plugin: search in pages opened from a disk

_LOCAL = "assets/iframe_worker.js"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page that loads the copy in assets/ instead."""
    to_root = "../" * page.url.count("/")
    return output.replace(_REMOTE, f"{to_root}{_LOCAL}")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Return a page without a source of its own, such as 404.html."""
    return output_content.replace(_REMOTE, f"/{_LOCAL}")
