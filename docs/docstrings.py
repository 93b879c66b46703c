"""How mkdocstrings reads the docstrings of the package, where they differ from what its parser expects."""

import re
from typing import Any

import griffe

_SHARED = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)$", re.M)


class SharedDescriptions(griffe.Extension):
    """`a, b: what both are`, under `Args` or `Attributes`, becomes a line for each name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _SHARED.sub(_one_by_one, obj.docstring.value)


def _one_by_one(shared: re.Match[str]) -> str:
    indent, names, description = shared.groups()
    return "\n".join(f"{indent}{name}{description}" for name in names.split(", "))
