"""Compiled programs of an engine, kept on disk for the next process.

jax keeps what it compiled, but finds it by the program's text. To trace a program and to write it down is work in
Python: a third of a second for a small pair, several seconds for a large one, at every start. What comes out follows
from the sources of this package and of jax, their settings, the machine, the compiler's options, and the shapes and
configurations of the arguments. So the compiled program is kept under a name that all of these make, and a process that
finds it has only to read it.
"""

import contextlib
import hashlib
import inspect
import io
import logging
import os
import pickle
import threading
import time
import zlib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered, Wrapped

import dflash_jax
from dflash_jax import files, models
from dflash_jax.decoding.state import TargetModel
from dflash_jax.infer.engine.compiler_options import Options, processors
from dflash_jax.kernels import dispatch, verdicts, verify

_log = logging.getLogger("dflash_jax")
VERSIONS = "flax", "numpy"  # besides those of jax
UNUSED = 60 * 24 * 3600.0  # seconds after which a program that no start has read is removed
FOUND = "/jax/compilation_cache/cache_hits"  # event of jax
# Settings of jax that say where programs are kept and what is logged.
OF_NO_PROGRAM = (
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_enable_compilation_cache",
    "jax_log",
    "jax_explain",
)
OWN = "dflash_jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins", "collections"


class Call(NamedTuple):
    """A jitted function and its arguments: the third, the state, is donated, and the last `static` are static."""

    program: Wrapped
    arguments: tuple
    static: int

    @property
    def given(self) -> tuple:
        """The arguments without static ones."""
        return self.arguments[: -self.static]


def enabled() -> bool:
    """Whether this process keeps programs: where jax does."""
    settings = jax.config.values
    caches = settings["jax_compilation_cache_dir"] is not None and settings["jax_enable_compilation_cache"]
    return caches and jax.process_count() == 1


def path_of(call: Call, options: Options | None = None) -> Path | None:
    """Where the program is or will be kept; None if it is not to be kept: without jax's own cache, on several devices,
    for classes from outside of this package, and where nothing can be written.

    Args:
        options: the compiler's.
    """
    try:
        path = _path(call, options, sources) if enabled() and (sources := _sources()) else None
        return path if path is None or path.exists() or _writable(path.parent) else None
    except Exception as error:  # a class of a function, which no name leads to; no home
        _log.debug("a program is not kept", exc_info=error)
        return None


def _writable(directory: Path) -> bool:
    there = next(one for one in (directory, *directory.parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def load(path: Path, call: Call) -> Compiled | None:
    """The program for `call.given` that is kept there; None, and nothing there any more, if it cannot be used."""
    try:
        written, returns = pickle.loads(zlib.decompress(path.read_bytes()))
        takes = jax.tree.structure((call.given, {}))
        (device,) = _devices(call)
        found = serialize_executable.deserialize_and_load(written, takes, returns, execution_devices=[device])
    except Exception as error:  # half a file, or one that this machine cannot run
        _log.debug("a kept program cannot be used", exc_info=error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):  # of a cache that is only to be read
        os.utime(path)
    return found


def lower(path: Path, call: Call, options: Options | None = None, *, fresh: bool = False) -> Lowered:
    """The program that belongs there, to be compiled by `compiled`.

    Args:
        options: the compiler's.
        fresh: whether to give it a name that jax has never seen, so that it is not found in jax's own cache.
    """
    program, static = inspect.unwrap(call.program), call.arguments[-call.static :]

    def renamed(*given):
        return program(*given, *static)

    renamed.__name__ = f"{program.__name__}_{path.name[:8]}" + (f"_{time.time_ns():x}" if fresh else "")
    return jax.jit(renamed, donate_argnums=2, compiler_options=dict(options) if options else None).lower(*call.given)


def compiled(path: Path, program: Lowered, *, fresh: bool = False) -> Compiled | None:
    """Compiles a program and keeps it, unless something went into it that may be different next time.

    None if it is not `fresh`, and jax found it in its own cache: it must be compiled afresh. An executable that was
    itself read cannot be written again: on a CPU its functions would be missing. Where the device's programs cannot be
    written at all, or the disk has no room for one, that of jax is used.
    """
    found = _found_by_jax.count
    executable = program.compile()
    if verify.replaced():
        return executable
    try:
        written, _, returns = serialize_executable.serialize(executable)
        if (read := _found_by_jax.count > found) and fresh:
            return executable
        whole = zlib.compress(pickle.dumps((written, returns)), 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        if read:
            room = path.with_suffix(".room")  # about as much as it needs, or it would be compiled at every start
            files.replace(room, whole)
            room.unlink(missing_ok=True)
            return None
        files.replace(path, whole)
        _remove_unused(path.parent)
    except Exception as error:  # full, only to be read, or a platform whose programs cannot be written
        _log.debug("a program is not kept", exc_info=error)
    return executable


def _remove_unused(directory: Path) -> None:
    """Removes programs of other versions and settings, which would pile up."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - path.stat().st_mtime > UNUSED:
                path.unlink()


class _Count(threading.local):
    """Programs that jax found in its own cache, of a thread."""

    count = 0


_found_by_jax = _Count()


def _listen(event: str, **about: str | int | float) -> None:
    if event == FOUND:
        _found_by_jax.count += 1


jax.monitoring.register_event_listener(_listen)


def _devices(call: Call) -> set[jax.Device]:  # pyright: ignore[reportInvalidTypeForm] (a compiled class)
    leaves = [x for x in jax.tree.leaves(call.given) if isinstance(x, jax.Array)]
    return {device for x in leaves for device in x.sharding.device_set} or {jax.local_devices()[0]}


def _path(call: Call, options: Options | None, sources: str) -> Path | None:
    leaves, tree = jax.tree.flatten(call.given)
    devices = _devices(call)
    if len(devices) > 1 or not _all_own(tree, call.arguments[0]):
        return None
    shapes = [(x.shape, x.dtype.name, getattr(x, "weak_type", False)) for x in leaves]
    with np.printoptions(threshold=2**31):  # or an array in a configuration is cut short
        text = [inspect.unwrap(call.program).__qualname__, str(tree), str(shapes), repr(call.arguments[-call.static :])]
    settings = str(sorted((k, v) for k, v in jax.config.values.items() if not k.startswith(OF_NO_PROGRAM)))
    settings += f" {processors()} processors" if jax.default_backend() == "cpu" else ""
    how = str(sorted((options or {}).items())), str([device.id for device in devices])
    rests_on = [*verdicts.machine(), *map(metadata.version, VERSIONS), sources, settings, dispatch.state(), *how, *text]
    return files.cache_directory() / "programs" / hashlib.sha256("\0".join(rests_on).encode()).hexdigest()[:32]


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
    package = Path(dflash_jax.__file__).parent
    for root, folders, names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(root, name)
                newest = max(newest, path.stat().st_mtime)
                digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest() if newest < files.BEGAN else None
