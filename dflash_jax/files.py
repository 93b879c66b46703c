"""Text files that appear whole or not at all."""

import json
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and only if it says something new."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    beside = path.with_name(path.name + ".writing")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")
