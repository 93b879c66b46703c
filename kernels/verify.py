"""Whether a Pallas kernel gives what XLA gives on the device at hand. It is asked once of every shape.

A kernel that was never run on some chip may fail to compile there, or compute something else. So the first time a shape
is met, the kernel and the XLA implementation run a small case of it. A kernel that fails is replaced, with a warning.
What was found is kept on disk (`verdicts`), for the next process. A device whose memory is full says nothing about the
kernel: it is replaced this time, and asked again the next.
"""

import re
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from . import verdicts

TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 0.02}  # of the largest value
# What XLA says of a kernel that asks for more of a core's own memory than there is, however empty the device is.
OWN_MEMORY = re.compile(r"vmem|smem|shared memory", re.IGNORECASE)
Call = Callable[..., Any]  # the function of a kernel's `api`
_known: dict[Hashable, str | None] = {}
_undecided: set[Hashable] = set()  # trials that this process had no memory for
_asking: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)  # one for each check
_ahead = threading.local()  # `asked`: the checks that wait to be made side by side


class Finding(NamedTuple):
    """What a trial says of a kernel.

    Attributes:
        trouble: what is wrong, or None.
        lasting: whether another trial would find the same.
    """

    trouble: str | None
    lasting: bool = True


@runtime_checkable
class AnyTrial(Hashable, Protocol):
    """A small case of one call: the shapes, types and options that make a kernel the program that it is.

    Equal trials are run once. What is printed of one goes into the warning.
    """

    @property
    def tolerance(self) -> float:
        """By how much results may differ, as a part of the largest value."""
        ...

    def run(self, call: Call, /) -> Any:
        """What the function gives for the small case, a pytree of arrays; it has its implementation bound."""
        ...


def trouble(name: str, kernel: ModuleType, trial: AnyTrial, call: Call, *, alone: bool = True) -> str | None:
    """What is wrong with the implementation of this name of `call`, or None; it may be asked while a program is traced.

    The answer is kept, for this kind of device, this kernel and this trial, unless the device had no memory for the
    trial. Of several processes all must ask, in the same order, and the first decides for all: they run one program.
    The first to know of trouble warns.
    """
    key = jax.local_devices()[0].device_kind, kernel, trial
    if (asked := getattr(_ahead, "asked", None)) is not None and key not in _known:
        asked[key] = name, kernel, trial, call
        return None
    with _asking[None if jax.process_count() > 1 else key]:  # of several processes all make them in one order
        if key in _known:
            return _known[key]
        # In a thread of its own there is no program being traced, and no mesh.
        with ThreadPoolExecutor(1) as apart:
            found = apart.submit(_agreed, partial(_looked_up, name, kernel, trial, call, alone)).result()
        if found.lasting:
            _known[key] = found.trouble
        else:
            _undecided.add(key)
        if found.trouble and jax.process_index() == 0:
            called = ".".join(kernel.__name__.split(".")[-2:])
            warnings.warn(
                f"the kernel {called} is not used for {trial}, which XLA runs instead: {found.trouble}",
                RuntimeWarning,
                stacklevel=2,
            )
        return found.trouble


def side_by_side(traces: Iterable[Callable[[], object]]) -> None:
    """Makes the checks that these ask for, while they trace programs, all at a time instead of one after the other.

    Until then every kernel is taken to be right, so of what was traced nothing is kept if one is not.
    """
    _ahead.asked = asked = dict[Hashable, tuple[str, ModuleType, AnyTrial, Call]]()
    right = False
    try:
        try:
            for trace in traces:
                trace()
        finally:
            del _ahead.asked
        # What was going on when a process ended is looked at alone: it may have been any of several.
        suspect = [check for check in asked.values() if _verdict(*check[1:]).is_suspect()]
        found = [trouble(*check) for check in suspect]
        with ThreadPoolExecutor(1 if jax.process_count() > 1 else len(asked) or 1) as pool:
            found += pool.map(lambda check: trouble(*check, alone=False), asked.values())
        right = not any(found)
    finally:
        if asked and not right:
            jax.clear_caches()


def replaced() -> bool:
    """Whether some kernel was replaced in this process, which another may use: where its verdict is removed, say."""
    return bool(_undecided) or any(_known.values())


def _agreed(compared: Callable[[], Finding]) -> Finding:
    """What the first process finds, in every process."""
    found = compared() if jax.process_index() == 0 else Finding(None)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        said = np.asarray([found.trouble is not None, found.lasting], np.int32)
        fails, lasting = map(bool, multihost_utils.broadcast_one_to_all(said))
        found = Finding((found.trouble or "the first process found it to fail") if fails else None, lasting)
    return found


def _verdict(kernel: ModuleType, trial: AnyTrial, call: Call) -> verdicts.Verdict:
    """It rests on the kernel, what calls it, and what all kernels share."""
    folders = (sys.modules[name] for name in (call.__module__, __name__))
    return verdicts.Verdict(f"{kernel.__name__} {trial}", kernel, *folders)


def _looked_up(name: str, kernel: ModuleType, trial: AnyTrial, call: Call, alone: bool) -> Finding:
    """The verdict on disk; where there is none, what a trial finds, which then is there."""
    verdict = _verdict(kernel, trial, call)
    there, trouble = verdict.known()
    if there:
        return Finding(trouble)
    with verdict.checking(alone=alone):
        found = _compared(name, trial, call)
    if found.lasting:
        verdict.keep(found.trouble)
    return found


def _compared(name: str, trial: AnyTrial, call: Call) -> Finding:
    try:
        with jax.debug_nans(False):  # a trial holds NaN where nothing may be read
            calls = [partial(call, implementation=which) for which in (name, "xla")]
            results = [jax.tree.leaves(jax.device_get(trial.run(bound))) for bound in calls]
    except Exception as error:  # a compiler raises whatever it likes
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
        if "RESOURCE_EXHAUSTED" in str(error) and not OWN_MEMORY.search(str(error)):
            return Finding(f"no memory for its trial, which the next program repeats ({text})", lasting=False)
        return Finding(text)
    for got, expected in zip(*results, strict=True):
        got, expected = (np.asarray(x, np.float64) for x in (got, expected))
        apart = np.max(np.abs(got - expected)) / (np.max(np.abs(expected)) or 1)
        if not apart <= trial.tolerance:  # nor may it be NaN
            return Finding(f"results differ by {apart:.2g} of the largest value, and may by {trial.tolerance:g}")
    return Finding(None)
