"""The type checker of the import hook in `conftest`."""

import os
from collections.abc import Callable
from typing import Any, Self, get_args

from beartype import BeartypeConf, beartype

# A function inside another is made, and its checker with it, at every call: .ci/run checks these in one of its stages.
_NESTED = os.environ.get("DFLASH_TESTS_OPTIMISED") == "1"
_CONF = BeartypeConf(is_pep484_tower=True)  # an int is a float, as pyright has it


def checked(function: Callable) -> Callable:
    """`function` with its calls checked, except for constructors: `jax.eval_shape` and `jax.tree.map` fill a pytree's
    fields with shapes, None and anything else."""
    if function.__name__ == "__init__" or ("<locals>" in function.__qualname__ and not _NESTED):
        return function
    hints = function.__annotations__.items()
    function.__annotations__ = {name: hint if _checkable(hint) else Any for name, hint in hints}
    return beartype(conf=_CONF)(function)


def _checkable(hint: Any) -> bool:
    """Not what names `Self`, which only a checker of whole classes knows, or a protocol that only pyright checks."""
    protocol = getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False)
    return not protocol and hint is not Self and all(map(_checkable, get_args(hint)))
