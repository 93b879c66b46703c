"""Programs of an engine as they were traced, kept on disk for the next process.

To trace a program and write it down for the compiler is work in Python: half a second for a small pair, several for a
large one, at every start. What is written down follows from the sources of this package and of jax, their settings, and
the shapes and configurations of the arguments. So it is kept under a name that all of these make, and a process that
finds it goes on from there. The compiled program is in jax's own cache.
"""

import contextlib
import hashlib
import inspect
import io
import logging
import os
import pickle
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.stages import Wrapped

import dflash_jax
from dflash_jax import files, models
from dflash_jax.decoding.state import TargetModel
from dflash_jax.infer.engine.compiler_options import Options
from dflash_jax.kernels import dispatch, verdicts, verify

_log = logging.getLogger("dflash_jax")
VERSIONS = "flax", "numpy"  # besides those of jax
OWN = "dflash_jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins", "collections"
UNSTABLE = "__gpu$xla.gpu.triton"  # kernels of which jax promises nothing for other versions; here it is the same one


class Traced(NamedTuple):
    """A function of flat arguments, and the structure of what it returns."""

    function: export.Exported
    returns: Any


class Call(NamedTuple):
    """A jitted function and its arguments: the third, the state, is donated, and the last `static` are static."""

    program: Wrapped
    arguments: tuple
    static: int

    @property
    def given(self) -> tuple:
        """The arguments without static ones."""
        return self.arguments[: -self.static]


def kept() -> bool:
    """Whether this process keeps programs: where jax does."""
    settings = jax.config.values
    caches = settings["jax_compilation_cache_dir"] is not None and settings["jax_enable_compilation_cache"]
    return caches and jax.process_count() == 1


def is_on_disk(call: Call) -> bool:
    """Whether `from_disk` needs to trace nothing."""
    path = _path(call)
    return path is not None and path.exists()


def from_disk(call: Call, options: Options | None = None) -> Wrapped | None:
    """The jitted function on disk that does the same for `call.given`; it is put there first, if it is not there.

    None where none is kept: without jax's own cache, on several devices, and for classes from outside of this package.

    Args:
        options: the compiler's.
    """
    if (path := _path(call)) is None:
        return None
    try:
        traced = _read(path) or _written(path, call)
    except Exception as error:  # whatever is wrong with the program itself is said when it is traced again
        _log.debug("a program is not kept", exc_info=error)
        return None

    def program(target, drafter, state, *rest):
        return jax.tree.unflatten(
            traced.returns, traced.function.call(*jax.tree.leaves((target, drafter, state, *rest)))
        )

    return jax.jit(program, donate_argnames="state", compiler_options=dict(options) if options else None)


def _path(call: Call) -> Path | None:
    """Where the program is or will be; None if it is not to be kept."""
    try:
        return _named(call, sources) if kept() and (sources := _sources()) else None
    except Exception as error:  # a class of a function, which no name leads to; no home
        _log.debug("a program is not kept", exc_info=error)
        return None


def _named(call: Call, sources: str) -> Path | None:
    leaves, tree = jax.tree.flatten(call.given)
    split = any(len(x.sharding.device_set) > 1 for x in leaves if isinstance(x, jax.Array))
    if split or not _all_own(tree, call.arguments[0]):
        return None
    shapes = [(x.shape, x.dtype.name, getattr(x, "weak_type", False)) for x in leaves]
    with np.printoptions(threshold=2**31):  # or an array in a configuration is cut short
        text = [inspect.unwrap(call.program).__qualname__, str(tree), str(shapes), repr(call.arguments[-call.static :])]
    settings = str(sorted(jax.config.values.items()))
    rests_on = [*verdicts.machine(), *map(metadata.version, VERSIONS), sources, settings, dispatch.state(), *text]
    return files.cache_directory() / "traced" / hashlib.sha256("\0".join(rests_on).encode()).hexdigest()[:32]


class _Modules(pickle.Pickler):
    """Collects the modules of all classes and functions that an object is made with."""

    def __init__(self):
        super().__init__(io.BytesIO())
        self.found = set[str]()

    def reducer_override(self, obj):
        if module := getattr(obj, "__module__", None):
            self.found.add(module)
        return NotImplemented


def _all_own(tree: object, target: TargetModel) -> bool:
    """Whether the code of arguments of this structure is in the sources that a name is made of: a family or drafter
    that a notebook registers is not."""
    modules = _Modules()
    modules.dump(tree)
    modules.found.add(models.family(target.config.model_type).__name__)
    return all(name.partition(".")[0] in OWN for name in modules.found)


@cache
def _sources() -> str | None:
    """A digest of this package's sources; None if one was written after this process began, which may have read it
    before."""
    digest, newest = hashlib.sha256(), 0.0
    for root, folders, names in os.walk(Path(dflash_jax.__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(root, name)
                newest = max(newest, path.stat().st_mtime)
                digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest() if newest < files.BEGAN else None


def _read(path: Path) -> Traced | None:
    try:
        written, tree = pickle.loads(path.read_bytes())
        return Traced(export.deserialize(bytearray(written)), tree)
    except Exception:  # there is none, or half of one
        return None


def _written(path: Path, call: Call) -> Traced:
    """Traces a program and keeps it, if nothing that may be different next time went into it."""
    leaves, tree = jax.tree.flatten(call.given)
    trees = []

    def flat(*leaves):
        returned, structure = jax.tree.flatten(
            inspect.unwrap(call.program)(*jax.tree.unflatten(tree, leaves), *call.arguments[-call.static :])
        )
        trees.append(structure)
        return returned

    checks = [export.DisabledSafetyCheck.custom_call(UNSTABLE)]
    traced = export.export(jax.jit(flat), disabled_checks=checks)(*leaves)
    if not verify.replaced():
        with contextlib.suppress(OSError):  # full, or only to be read
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, pickle.dumps((bytes(traced.serialize()), trees[0])))
    return Traced(traced, trees[0])
