"""The pages for people: their links, the examples of the API page, and the site that is built from them."""

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax
from dflash_jax.benchmarks.arguments import CompareOptions, JobsOptions, SweepOptions
from dflash_jax.benchmarks.pictures import terminal_picture
from dflash_jax.parsing import ALIASES, flags
from dflash_jax.serve import ServeOptions

ROOT = Path(__file__).parents[1]
API = [ROOT / "docs/api.md", *sorted((ROOT / "docs/api").glob("*.md"))]
PAGES = [
    *(ROOT / name for name in ("README.md", "benchmarks.md", "train/README.md", "dflash_jax/pair/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?! [^>]*rel="?canonical))\b[^>]*(?:src|href)="?(?:https?:)?//[^>]*>"""
)
FENCE = re.compile(r"^ *```(\w*).*?\n(.*?)^ *``` *$", re.S | re.M)


def anchors(page):
    """The anchors of a page's headings, as code hosts make them, and mkdocs by its configuration."""
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading)
        yield re.sub(r"[^\w -]", "", plain).lower().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^()\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(other), f"{target}: the page has no such heading"


def test_nothing_is_loaded_from_another_host():
    """So search and pictures work without the internet. Mermaid's diagrams would be drawn by a script from a CDN."""
    assert LOADED.search('<script src="https://unpkg.com/mermaid"></script>')
    for page in PAGES:
        assert "```mermaid" not in page.read_text(), f"{page.name}: draw it as an SVG in docs/figures"
        assert not re.search(r"!\[[^]]*\]\(https?:", page.read_text()), f"{page.name} shows a picture of another host"
    for figure in (ROOT / "docs/figures").glob("*.svg"):
        assert not re.search(r"""(?:href|src)=["'](?!#)|@import|url\((?!#)""", figure.read_text()), figure.name
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()  # otherwise the theme takes fonts of Google


def test_pictures_of_terminals_show_what_was_printed():
    for printed in (ROOT / "docs/figures").glob("*.txt"):
        assert terminal_picture(printed.read_text()) == printed.with_suffix(".svg").read_text()
    drawn = terminal_picture("$ a\n\n1 < 2")
    assert ">$ a</text>" in drawn
    assert ">1 &lt; 2</text>" in drawn


def test_every_page_is_reached_from_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        name = page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT).as_posix()
        assert re.search(rf": {re.escape(name)}$", listed, re.M), f"mkdocs.yml lacks {name}"


def examples(page):
    return "".join(code for language, code in FENCE.findall(page.read_text()) if language == "pycon")


def test_the_api_pages_have_every_public_name():
    """Each on one page, with an example on the same page."""
    for name in dflash_jax.__all__:
        documented = [page for page in API if f"::: dflash_jax.{name}\n" in page.read_text()]
        assert len(documented) == (name != "__version__"), f"docs/api has {name} on {len(documented)} pages"
        for page in documented or API[:1]:
            assert re.search(rf"dflash_jax\.{name}\b", examples(page)), f"docs/{page.name} has no example with {name}"
        assert f"`{name}`" in API[0].read_text() or f"`dflash_jax.{name}`" in API[0].read_text(), name
    assert sum(examples(page).count("\n>>> ") for page in API) > 30


@pytest.mark.slow
@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_the_examples_of_the_api_pages_run(page):
    test = doctest.DocTestParser().get_doctest(examples(page), {}, page.stem, str(page), 0)
    failed, tried = doctest.DocTestRunner().run(test)
    assert tried > 5
    assert not failed


def test_code_that_names_its_file_is_in_it():
    quoted = 0
    for page in PAGES:
        for name, code in re.findall(r'^```python title="(.+?)"\n(.*?)^```$', page.read_text(), re.S | re.M):
            lines = iter((ROOT / name).read_text().splitlines())  # in this order, indented or not
            for quote in filter(None, code.splitlines()):
                assert any(line.strip() == quote.strip() for line in lines), f"{page.name}: {name} lacks {quote!r}"
            quoted += 1
    assert quoted > 5


def test_the_options_that_replace_those_of_other_tools_exist():
    known = flags(ServeOptions).union(*map(flags, (CompareOptions, JobsOptions, SweepOptions)))
    page = (ROOT / "docs/migrating.md").read_text()
    aliases = dict(re.findall(r"`(--[a-z-]+)` for\s+`(--[a-z-]+)`", page))
    assert len(aliases) > 5
    assert aliases.items() <= ALIASES.items()
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page, re.M)
    ours = [
        name for _, here in rows for code in re.findall("`([^`]+)`", here) for name in re.findall("--[a-z-]+", code)
    ]
    assert len(ours) > 40
    assert set(ours) <= known, set(ours) - known


def test_the_messages_of_the_troubleshooting_page_are_in_the_code():
    files = [file for top in ("dflash_jax", "infer", "kernels", "train") for file in (ROOT / top).rglob("*.py")]
    code = re.sub(r'"\n\s*f?"', "", "\n".join(file.read_text() for file in files))  # a string over several lines
    messages = re.findall(r"^\| `([^`]+…[^`]*|--[^`]+ [^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(messages) > 30
    for message in messages:
        for piece in re.split(r"\W*…\W*", message):
            assert piece in code, f"no message has {piece!r}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    for name in ("api", "api/engine", "colab/quickstart", "benchmarks", "train", "dflash_jax/pair"):
        assert (tmp_path / "site" / name / "index.html").is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        assert not LOADED.findall(page.read_text()), f"{page} loads something from another host"
