"""Readers of the fields of a `quantization_config`."""

import re
from collections.abc import Mapping

Fields = Mapping[str, object]


def named(pattern: str) -> str:
    """compressed-tensors' names, which after `re:` are regular expressions of a name's beginning."""
    return f"(?:{pattern[3:]}).*" if pattern.startswith("re:") else re.escape(pattern)


def strings(given: Fields, name: str) -> list[str]:
    """A list of names or patterns; empty if it is missing or null."""
    found = given.get(name)
    found = [] if found is None else found
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise ValueError(f"config.json: {name} must be a list of names or patterns, got {found!r:.200}")
    return found


def mapping(given: Fields, name: str) -> Mapping[str, object]:
    """An object; empty if it is missing or null."""
    found = given.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"config.json: {name} must be an object, got {found!r:.200}")
    return found


def size_of(group: object) -> int:
    """The size of a group; raises ValueError if it is none."""
    if not isinstance(group, int) or isinstance(group, bool) or not 0 < group < 2**20:
        raise ValueError(f"config.json: group_size must be a positive number, got {group!r:.80}")
    return group
