"""What lets mkdocs build the pages as they stand: Markdown whose links also work in a checkout or on a code host.

Pages outside of `docs/` that `extra.repository_pages` names become pages of the site, and so do the notebooks of
`colab/`, which can be downloaded there, too. A link to any other file of the repository becomes its path, since the
site does not have the file. A link to a file that does not exist is a warning, which `--strict` makes an error.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import textwrap
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_log = logging.getLogger("mkdocs.plugins.repository")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\\.)+)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.S | re.M)
DOWNLOAD = "download:"  # begins a link to a notebook itself, not to its page
_source = tempfile.TemporaryDirectory()  # of the package, for as long as the build takes


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Gives mkdocstrings a copy of the package in which every folder has an `__init__.py`: its parser passes over
    folders without one, as `infer`, `kernels` and `train` are."""
    copy = Path(_source.name) / "dflash_jax"
    shutil.copytree(_root(config) / "dflash_jax", copy, ignore=_other_than_python, dirs_exist_ok=True)
    for directory, _, _ in os.walk(copy):
        (Path(directory) / "__init__.py").touch()
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_source.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of `docs/`, under their paths in the repository."""
    for name in config.extra["repository_pages"]:
        files.append(File.generated(config, name, abs_src_path=str(_root(config) / name)))
    for notebook in sorted((_root(config) / "colab").glob("*.ipynb")):
        name = f"colab/{notebook.name}"
        files.append(File.generated(config, name, abs_src_path=str(notebook)))
        files.append(File.generated(config, _page_of(name), content=_shown(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links between files of the repository at pages of the site; code in fences stays as it is. Pages for
    developers, notebooks and docstrings come later in the results of a search."""
    if page.file.src_uri.startswith(tuple(config.extra["search_last"])):
        page.meta["search"] = {"boost": 0.3}
    rewritten = lambda text: _LINK.sub(lambda link: _rewritten(link, page, config, files), text)
    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += rewritten(markdown[end : fence.start()]), fence[0]
        end = fence.end()
    return "".join([*pieces, rewritten(markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps short pieces of code on one line: a browser would break `--http` after its dashes. Pages that docstrings
    name become links."""
    if page.file.src_uri.startswith("api/"):
        html = re.sub(r"(?<![/\w])docs/(\w+)\.md", r'<a href="../../\1/">\1</a>', html)
    return re.sub(r"<code>([^<\s]{1,28})</code>", r'<code class="short">\1</code>', html)


def _page_of(notebook: str) -> str:
    return notebook.removesuffix(".ipynb") + ".md"


def _shown(notebook: Path) -> str:
    """A notebook as Markdown. The cell that installs the package is folded."""
    title, *cells = json.loads(notebook.read_text())["cells"]
    pieces = ["".join(title["source"]), f"[Download the notebook]({DOWNLOAD}{notebook.name})"]
    for cell in cells:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "code":
            source = f"```python\n{source}\n```"
        if source.startswith("```python\nSOURCE = "):
            source = '??? note "The cell that installs the package"\n\n' + textwrap.indent(source, "    ")
        pieces.append(source)
    return "\n\n".join(pieces) + "\n"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _other_than_python(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(directory, name).is_dir())]


def _rewritten(link: re.Match[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link as the site can follow it."""
    image, text, target = link.groups()
    if target.startswith(DOWNLOAD):
        return f"[{text}]({target.removeprefix(DOWNLOAD)})"
    path, sign, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return link[0]
    source = page.file.abs_src_path or _root(config) / page.file.src_uri  # a notebook's page has no file of its own
    found = Path(os.path.normpath(Path(source).parent / path))
    if not found.exists():
        _log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
    base = Path(config.docs_dir) if found.is_relative_to(config.docs_dir) else _root(config)
    name = Path(os.path.relpath(found, base)).as_posix()
    name = _page_of(name) if name.endswith(".ipynb") else name
    if files.get_file_from_path(name):
        here = Path(os.path.relpath(name, Path(page.file.src_uri).parent)).as_posix()
        return f"{image}[{text}]({here}{sign}{anchor})"
    named = text.strip("`").replace("\\", "").rstrip("/")  # a text that is the file's own name is not said twice
    return f"`{name}`" if name.endswith(named) else f"{text} (`{name}`)"
