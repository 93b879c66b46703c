"""Files that appear whole or not at all."""

import json
from pathlib import Path
from typing import Any


def replace(path: Path, data: bytes) -> None:
    """Puts a file into the place of whatever is there. What is no file, such as `/dev/stdout`, is written to."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    beside = path.with_name(path.name + ".writing")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # the one that the user knows of
        raise


def write_text(path: Path, text: str) -> None:
    """`replace`, unless the file has this text already."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        replace(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")
