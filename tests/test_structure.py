"""The layers of the code, as docs/design.md has them; that there are no circles; how long files are; open types."""

import ast
import dataclasses
import os
import pkgutil
import re
import statistics
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from dflash_jax import drafters

ROOT = Path(__file__).parents[1]
LONGEST, MEDIAN = 400, 130  # lines of a file
OPEN_TYPES = 315  # uses of `Any`; it only falls


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


SOURCES = {module.removeprefix("dflash_jax").lstrip("."): path for module, path in modules()}
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imported(module, nodes):
    """The modules of the package that these nodes of a module import."""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["dflash_jax", *package][: len(package) + 2 - node.level] if node.level else []
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("dflash_jax."):
                name = name.removeprefix("dflash_jax.")
                yield name if name in SOURCES else name.rpartition(".")[0]


def test_modules_import_from_their_row_and_below():
    row, seen = rows(), set()
    for module, tree in TREES.items():
        if not module:
            continue
        room = module.split(".")[0]
        for name in imported(module, tree.body):
            if name:
                other = name.split(".")[0]
                assert row[other] <= row[room], f"{module} imports {name}"
                seen.add((room, other))
    assert {room for room, _ in seen} <= row.keys()
    assert len(seen) > 50


def circle(edges, room):
    """A circle among what lies in a room, its files and the rooms inside it, or None."""
    inside, graph = (f"{room}." if room else ""), {}
    part = lambda module: module.removeprefix(inside).split(".")[0] if module != room else "__init__"
    for module, other in edges:
        if all(f"{name}.".startswith(inside) for name in (module, other)) and part(module) != part(other):
            graph.setdefault(part(module), set()).add(part(other))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]


def test_there_are_no_circles():
    """Imports inside functions and those for types count."""
    edges = {(module, name) for module, tree in TREES.items() for name in imported(module, ast.walk(tree))}
    assert len(edges) > 500
    for room in {"", *(module.rpartition(".")[0] for module in SOURCES)}:
        found = circle(edges, room)
        assert not found, f"in dflash_jax.{room}, what is imported leads back: {' <- '.join(found)}"


@pytest.mark.parametrize(
    ("edges", "room", "found"),
    [
        ([("a", "b"), ("b", "a")], "", True),
        ([("a.x", "b"), ("b", "a.y")], "", True),  # of rooms, though not of files
        ([("a.x", "b"), ("b", "a.y")], "a", False),
        ([("a.x", "a.b.y"), ("a.b.z", "a.x")], "a", True),
        ([("a", "a.x"), ("a.x", "a")], "a", True),
        ([("a", "a.x"), ("a.x", "b")], "a", False),
        ([("ab", "a"), ("a", "c"), ("c", "a.x")], "a", False),
    ],
)
def test_circles_are_found(edges, room, found):
    assert bool(circle(edges, room)) == found


def test_files_are_short():
    lengths = {module: len(path.read_text().splitlines()) for module, path in SOURCES.items()}
    assert not {module: n for module, n in lengths.items() if n > LONGEST}
    assert statistics.median(lengths.values()) <= MEDIAN


def test_few_types_are_left_open():
    uses = {
        module: sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
        for module, tree in TREES.items()
    }
    assert sum(uses.values()) <= OPEN_TYPES, sorted(uses.items(), key=lambda use: -use[1])[:10]


def test_params_are_the_only_collection():
    """What a module has to say is its result."""
    for module, path in modules():
        found = re.search(r"\bmutable=|\.sow\(|self\.variable\(|is_mutable_collection", path.read_text())
        assert not found, f"{module} has {found[0]}"


def test_a_kind_of_drafter_is_named_in_its_own_file():
    """And so are its hyper-parameters. The kind that the package is named after is the default of new ones."""
    registered = [kind for kind in drafters.KINDS.values() if kind.name != "dflash"]
    names = {kind.name for kind in registered}
    names |= {field.name for kind in registered for field in dataclasses.fields(kind.settings)}
    for module, tree in TREES.items():
        if not module.startswith("drafters."):
            literals = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            names_used = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            found = names & {value for value in (*literals, *names_used) if isinstance(value, str)}
            assert not found, f"dflash_jax.{module} names {found}"
    own = {f"drafters.{name}" for name in names}
    assert len(own & TREES.keys()) == len(registered) == 5


def test_slow_tests_exist():
    """What `slow_tests.txt` names, but for the parameters."""
    ids = [line for line in (ROOT / "tests" / "slow_tests.txt").read_text().splitlines() if not line.startswith("#")]
    assert ids == sorted(set(ids))
    for name in ids:
        file, test = name.split("[")[0].split("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(), name


def test_names_that_tests_replace_exist():
    """Tests replace names of the package by their path, some of them in tests that rarely run."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        found.update(re.findall(r'setattr\(\s*"(dflash_jax\.[\w.]+)"', path.read_text()))
    assert found
    for name in found:
        pkgutil.resolve_name(name)  # raises an error if there is no such name
