"""The rooms of `infer`: jobs and http stand on the engine and on what lies beside the rooms, not on each other."""

import ast
from pathlib import Path

import pytest

INFER = Path(__file__).parents[2] / "infer"
ABOVE = {"": ("http", "jobs"), "engine": ("http", "jobs"), "http": ("jobs",), "jobs": ("http",)}


@pytest.mark.parametrize("room", ABOVE)
def test_a_room_imports_what_lies_below_it(room):
    files = list((INFER / room).glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                above = [part for part in ABOVE[room] if f"{name}.".startswith(f"dflash_jax.infer.{part}.")]
                assert not above, f"{file.relative_to(INFER)} imports {name}"
