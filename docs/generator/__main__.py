"""Write every generated page and table: `python -m docs.generator`; `--check` lists those that are out of date."""

import sys
from pathlib import Path

from docs.generator.measurements import fill_tables
from docs.generator.recipes import make_recipes_page
from docs.generator.settings import make_settings_page

DOCS = Path(__file__).parents[1]


def make_pages() -> dict[Path, str]:
    """Return the expected content of each generated page, or page with generated tables."""
    pages = {
        DOCS / "reference/recipes.md": make_recipes_page(),
        DOCS / "reference/settings.md": make_settings_page(),
    }
    for path in sorted([*(path for path in DOCS.rglob("*.md") if path not in pages), DOCS.parent / "README.md"]):
        pages[path] = fill_tables(path.read_text(encoding="utf-8"))
    return pages


def main() -> None:
    behind = [path for path, text in make_pages().items() if not path.is_file() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{path} is behind: python -m docs.generator" for path in behind) if behind else 0)
    for path, text in make_pages().items():
        path.write_text(text, encoding="utf-8")
    print("\n".join(f"written: {path.relative_to(DOCS.parent)}" for path in behind) or "every page is up to date")


if __name__ == "__main__":
    main()
