"""The site builds without a warning or a network, and its pages work in a browser, wide and narrow, light and dark."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import PROGRAM, Tab
from support import ROOT

SCREENS = [(1280, False), (390, True)]
# each with something of its own: wide tables, a diagram, pictures, signatures
SHOWN = [
    "index.html",
    "reference/settings.html",
    "how/step.html",
    "measurements/spikes.html",
    "reference/callbacks.html",
]
# what a browser loads by itself; a link in the text is followed by a reader only
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does; strict: a dead link or anchor is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 40
    assert {page.name: found for page in pages if (found := _LOADED.findall(page.read_text()))} == {}


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
@pytest.mark.parametrize(("width", "dark"), SCREENS)
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_fits_the_screen_and_logs_nothing(tab: Tab, site: Path, page: str, width: int, dark: bool) -> None:
    tab.open(site / page, width=width, dark=dark)
    if "mermaid" in (site / page).read_text().partition("<article")[2].partition("</article>")[0]:
        # the theme draws into a closed shadow root: what is left of the source is an empty box of some height
        tab.wait("[...document.querySelectorAll('.mermaid')].every(d => d.tagName == 'DIV' && d.offsetHeight > 80)")
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value("document.body.getAttribute('data-md-color-scheme')") == ("slate" if dark else "default")
    assert tab.console == []


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
def test_the_search_finds_a_setting_without_a_server(tab: Tab, site: Path) -> None:
    tab.open(site / "index.html", width=1280)
    tab.value("document.querySelector('[data-md-toggle=search]').click()")
    tab.value(
        "(() => { const box = document.querySelector('[data-md-component=search-query]'); box.focus();"
        " box.value = 'quarantine_steps'; box.dispatchEvent(new Event('input', {bubbles: true}));"
        " box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true, key: 's'})); })()"
    )
    tab.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    assert "settings" in tab.value("document.querySelector('.md-search-result__list').innerHTML")
    assert tab.console == []
