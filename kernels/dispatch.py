"""Which implementation of a kernel runs.

A kernel is a folder with an implementation per file: `reference` in plain XLA for every platform and case, and others
that may decline a case, by a function `declines(*arrays) -> str | None` that says why: Pallas kernels, and forms in XLA
that are good on one platform alone.

The policy says how far these others are trusted. "xla": not at all. "pallas": they run wherever they serve the case.
"auto": they do where they give what `reference` gives on a small case of the same shape, tried the first time that the
shape is met (see `verify`). It is what `set_policy` said, else the environment variable DFLASH_KERNELS, else "auto".
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, get_args

import jax

from .verify import AnyTrial, Call, trouble

Name = Literal["xla", "tpu", "gpu", "xla_gpu"]
Policy = Literal["auto", "xla", "pallas"]
VARIABLE = "DFLASH_KERNELS"
# Preferred on a platform, the best one first; where all decline or there is none, XLA runs.
PREFERRED: dict[str, tuple[Name, ...]] = {"tpu": ("tpu",), "gpu": ("gpu", "xla_gpu")}
_named, _platform = jax.make_user_context(None), jax.make_user_context(None)  # parts of every jit cache key
_policy = jax.make_user_context(None)


@contextmanager
def using(implementation: Name | tuple[Name, ...] | None, platform: str | None = None) -> Iterator[None]:
    """Within, calls that name no implementation take this one, or the first of these, where it serves the case.

    What is compiled for another platform than the one at hand is compiled under its implementation's name, and its own.
    None goes back to what the platform and the policy prefer, and to the platform at hand. What is named is not tried.
    """
    with _named((implementation,) if isinstance(implementation, str) else implementation), _platform(platform):
        yield


def platform() -> str:
    """What is compiled for: "cpu", "gpu" or "tpu"."""
    return _platform.value or jax.default_backend()


def set_policy(policy: str | None) -> None:
    """Sets the policy of this process; None goes back to the environment variable.

    Raises:
        ValueError: there is no such policy.
    """
    _policy.set_global(policy and _checked(policy, "the policy"))


def policy() -> Policy:
    """The policy in force.

    Raises:
        ValueError: the environment variable holds none.
    """
    return _policy.value or _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)


def state() -> str:
    """All that the choice among kernels rests on besides the arrays, in words."""
    return f"{policy()} {_named.value} {platform()}"


def checks() -> bool:
    """Whether kernels are checked at their first use: where there are some, and nobody has decided for them."""
    return platform() in PREFERRED and _named.value is None and policy() == "auto"


def prefers(name: Name) -> bool:
    """Whether kernels of this name run where they serve a case, unless they fail a trial."""
    if _named.value is not None:
        return name in _named.value
    return name in PREFERRED.get(platform(), ()) and policy() != "xla"


def _checked(text: str, what: str) -> Policy:
    if text not in get_args(Policy):
        raise ValueError(f"{what} must be one of {', '.join(get_args(Policy))}, got {text!r}")
    return text  # type: ignore[return-value]


def choose(
    implementations: Mapping[str, ModuleType],
    *arrays: Any,
    implementation: Name | None,
    trial: AnyTrial,
    call: Call,
) -> ModuleType:
    """The implementation that serves a call with these arrays, or pytrees of them.

    Args:
        trial: a small case of the call.
        call: the function that was called, which runs the trial.

    Raises:
        ValueError: it was named in the call and declines, or is none of them; the message says why.
    """
    declines = lambda name: None if name == "xla" else implementations[name].declines(*arrays)
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation must be one of {', '.join(implementations)}, got {implementation!r}")
        if why := declines(implementation):
            raise ValueError(f"implementation {implementation!r} does not support this case: {why}")
        return implementations[implementation]
    for name in PREFERRED.get(platform(), ()) if _named.value is None else _named.value:
        if name not in implementations or declines(name):
            continue
        if _named.value is not None or _allowed(name, implementations[name], trial, call):
            return implementations[name]
    return implementations["xla"]


def _allowed(name: Name, kernel: ModuleType, trial: AnyTrial, call: Call) -> bool:
    """Whether a kernel that nobody named may run."""
    if policy() != "auto":
        return policy() == "pallas"
    return platform() != jax.default_backend() or not trouble(name, kernel, trial, call)  # tried where it is at hand
