"""Which implementation of a kernel runs.

A kernel is a folder with an implementation per file: `reference` in plain XLA for every platform and case, and Pallas
kernels that may decline a case, by a function `declines(*arrays) -> str | None` that says why.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import jax

Name = Literal["xla", "tpu", "gpu"]
# Preferred on a platform; where it declines or there is none, XLA runs.
PREFERRED: dict[str, Name] = {"tpu": "tpu", "gpu": "gpu"}
_named, _platform = jax.make_user_context(None), jax.make_user_context(None)  # parts of every jit cache key


@contextmanager
def using(implementation: Name | None, platform: str | None = None) -> Iterator[None]:
    """Within, every kernel takes this implementation where it serves the case and the call names none.

    What is compiled for another platform than the one at hand is compiled under its implementation's name, and its own.
    None goes back to what the platform prefers, and to the platform at hand.
    """
    with _named(implementation), _platform(platform):
        yield


def platform() -> str:
    """What is compiled for: "cpu", "gpu" or "tpu"."""
    return _platform.value or jax.default_backend()


def choose(implementations: Mapping[str, ModuleType], *arrays: jax.Array, implementation: Name | None) -> ModuleType:
    """The implementation that serves a call with these arrays.

    Raises:
        ValueError: it was named in the call and declines, or is none of them; the message says why.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation must be one of {', '.join(implementations)}, got {implementation!r}")
        if why := implementations[implementation].declines(*arrays):
            raise ValueError(f"implementation {implementation!r} does not serve this case: {why}")
        return implementations[implementation]
    preferred = _named.value or PREFERRED.get(jax.default_backend(), "xla")
    serves = preferred in implementations and not implementations[preferred].declines(*arrays)
    return implementations[preferred if serves else "xla"]
