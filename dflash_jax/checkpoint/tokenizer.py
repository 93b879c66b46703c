"""The token ids in a checkpoint's tokenizer files, read without building a tokenizer, which takes seconds."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from dflash_jax.files import read_json, reading, said

LONGEST_SPECIAL = 1000  # characters of a special token
MOST_UNLISTED = 1_000_000  # tokens that a file of another kind may hold, such as `tokenizer.model`


def listed_tokens(directory: Path) -> frozenset[int] | None:
    """Ids that `tokenizer.json` lists, and those that only `tokenizer_config.json` adds; None without the former.

    Raises:
        ValueError: a file is damaged, or an id cannot be one; names the file.
    """
    path, config = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    stat = path.stat()
    found = _of_tokenizer(path, stat.st_size, stat.st_mtime_ns)
    if not config.is_file():
        return found
    with reading(config):
        return found | _checked(map(int, read_json(config).get("added_tokens_decoder") or {}), len(found))


def check_tokenizer_files(directory: Path) -> None:
    """Raises ValueError naming the file if what is in it would bring down, or fill the memory of, the libraries that
    read it."""
    listed = listed_tokens(directory)
    known = MOST_UNLISTED if listed is None else len(listed)
    for name, others in (("vocab.json", 0), ("added_tokens.json", known)):
        if (path := directory / name).is_file():
            with reading(path):
                ids = read_json(path).values()
                _checked(ids, others + len(ids))
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := directory / name).is_file():
            with reading(path):
                raw = read_json(path)
                if not isinstance(longest := raw.get("model_max_length"), int | float | None):
                    raise ValueError(f"model_max_length must be a number, got {longest!r:.60}")
                _check_special(raw)


def _check_special(raw: Mapping[str, object]) -> None:
    """Raises ValueError for special tokens that are too long: to add one takes a time that grows with its square."""
    for name, value in raw.items():
        special = name.endswith(("_token", "_special_tokens")) or name.startswith("added_tokens")
        if special and any(len(text) > LONGEST_SPECIAL for text in _strings(value)):
            raise ValueError(f"{name} must have at most {LONGEST_SPECIAL} characters a token")


def _strings(value: object) -> Iterator[str]:
    """Every string inside."""
    if isinstance(value, str):
        yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for inner in inside:
        yield from _strings(inner)


@lru_cache(4)
def _of_tokenizer(path: Path, size: int, modified: int) -> frozenset[int]:
    """Ids of a `tokenizer.json`, kept as long as the file is the same: it may have many megabytes."""
    with reading(path):
        try:
            raw = read_json(path)
            _check_special(raw)
            vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or []
            ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
            return _checked([*ids, *(token["id"] for token in added)], len(ids) + len(added))
        except Exception as error:  # values of any other type
            why = said(error).removeprefix(f"{path} ")
            raise ValueError(f"{path} must hold a tokenizer that can be read: {why}") from error


def _checked(ids: Iterable[object], count: int) -> frozenset[int]:
    """The ids; raises ValueError for one that cannot be an id of so many tokens. Libraries list every id below the
    largest that has no token, so one far beyond the others would take minutes and all memory."""
    found: set[int] = set()
    for value in ids:
        if type(value) is not int or not 0 <= value < 4 * count + 10_000:
            raise ValueError(f"{value!r:.60} is not a plausible id of {count} tokens; ids are integers from 0")
        found.add(value)
    return frozenset(found)
