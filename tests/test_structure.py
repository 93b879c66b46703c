"""The layers of the code, as docs/design.md has them."""

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def rows():
    """The row of every module of the package, the lowest is 0."""
    page = (ROOT / "docs" / "design.md").read_text()
    table = re.search(r"## Layers of the code.*?```\n(.*?)```", page, re.S)[1].splitlines()
    columns = [re.split(r"\s{2,}", line.strip()) for line in table]
    return {name: -i for i, (_, names, *_) in enumerate(columns) for name in names.split(", ")}


def modules():
    """Name and file of every module."""
    for directory, _, names in os.walk(ROOT / "dflash_jax", followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(directory) / name
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imported(module, path):
    """What a module imports at its top."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module]
            yield from (".".join([*base, alias.name]).replace("..", ".") for alias in node.names)


def test_modules_import_from_their_row_and_below():
    row, seen = rows(), set()
    for module, path in modules():
        if module == "dflash_jax":
            continue
        own = module.split(".")[1]
        for name in imported(module, path):
            if name.startswith("dflash_jax."):
                other = name.split(".")[1]
                assert row[other] <= row[own], f"{module} imports {name}"
                seen.add((own, other))
    assert {own for own, _ in seen} <= row.keys()
    assert len(seen) > 50


def test_params_are_the_only_collection():
    """What a module has to say is its result."""
    for module, path in modules():
        found = re.search(r"\bmutable=|\.sow\(|self\.variable\(|is_mutable_collection", path.read_text())
        assert not found, f"{module} has {found[0]}"
