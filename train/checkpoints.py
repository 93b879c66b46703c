"""Resumable state of a run, by orbax. A checkpoint appears whole or not at all, with a checksum of every file in it."""

import contextlib
import hashlib
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dflash_jax.files import one_line, read_json, reading, said, write_json
from dflash_jax.train.step import TrainState

CHECKSUMS = "sha256.json"  # in the directory of a checkpoint: the hash of every other file in it
_log = logging.getLogger("dflash_jax")

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint is written while the run goes on. What is read, and what is written next, waits for it.

    Args:
        directory: of the run's checkpoints; made if it is missing.
        keep: how many to keep, the newest ones.

    Raises:
        ValueError: it is no directory of checkpoints.
        OSError: it cannot be read or made.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self._directory = Path(directory).resolve()
        self._step = 0  # of what was written last
        self._writing: Future | None = None  # what waits for it
        self._waiting = ThreadPoolExecutor(1, "checkpoint")
        self._quiet = contextlib.ExitStack()  # meanwhile
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        with reading(self._directory), _Quiet():
            self._manager = ocp.CheckpointManager(
                self._directory, item_handlers=ocp.StandardCheckpointHandler(), options=options
            )

    @property
    def steps(self) -> list[int]:
        """Steps that are on disk, in order."""
        names = (path.name for path in self._directory.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal() and name.isascii())

    def save(self, state: TrainState) -> None:
        """Begins to write the state under its step, after it has been copied from the device; `finish` waits for it.

        Raises:
            OSError: this one or the one before could not be written, as to a full disk; those before are as they were.
                This one is begun all the same.
        """
        try:
            self.finish()
        finally:
            self._begin(state)

    def _begin(self, state: TrainState) -> None:
        step = int(state.step)
        if step in self.steps:
            return
        if jax.default_backend() == "cpu":  # where a copy for the host is none, and the next step is given the buffers
            state = jax.tree.map(jax.numpy.copy, state)
        self._quiet.enter_context(_Quiet())
        self._step = step
        with self._explained():
            self._manager.save(step, args=ocp.args.StandardSave(state))
        self._writing = self._waiting.submit(self._complete, step)

    def _complete(self, step: int) -> None:
        """Waits for orbax, in a thread, and writes the hashes of what it has written."""
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            place = self._directory / str(step)
            write_json(place / CHECKSUMS, {"files": _checksums(place)})

    def finish(self) -> None:
        """Waits until what is being written is complete on disk.

        Raises:
            OSError: it could not be written.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with self._explained():
            writing.result()
        self._quiet.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Makes an OSError that names the step of what orbax raises while it writes."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for what the system refuses
            self._quiet.pop_all()  # it stays quiet, for threads may come late
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            so = "the same command continues from the one before"
            message = f"the checkpoint of step {self._step} could not be written; {so}: {one_line(error)}"
            raise OSError(message) from error

    def restore(self, like: Any, step: int | None = None) -> TrainState:
        """The newest state that is whole, or that of `step`, in the shapes of `like`. A damaged one is left out with a
        warning, and put aside as `STEP.damaged`, so that its step can be saved again.

        Raises:
            ValueError: there is none, all are damaged, or it is of another model or optimizer.
        """
        self.finish()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        read = lambda step: self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        restored, damaged = self._newest(read, step)
        for bad in damaged:
            self._put_aside(bad)
        return jax.tree.map(jax.numpy.array, restored)  # buffers of our own, which a step may be given

    def restore_params(self, step: int | None = None) -> Any:
        """The parameters of a checkpoint alone, as on disk; of the newest that is whole, or that of `step`.

        Raises:
            ValueError: there is none, or all are damaged.
        """
        self.finish()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # wherever it was saved
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

        def read(step: int) -> Any:
            like = jax.tree.map(shape, self._manager.item_metadata(step))
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))["params"]

        return self._newest(read, step)[0]

    def _newest(self, read: Callable[[int], T], step: int | None) -> tuple[T, list[int]]:
        """What `read` makes of the newest checkpoint that is whole, or of that of `step`; and newer steps, which are
        damaged. One without checksums, of a version before them, counts as damaged if it cannot be read."""
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            which = "" if step is None else f" of step {step}"
            raise ValueError(f"{self._directory} has no checkpoint{which}; steps on disk: {steps or 'none'}")
        damaged: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            place = self._directory / str(candidate)
            if wrong := _wrong(place):
                damaged[candidate] = wrong
                continue
            try:
                with _Quiet():
                    found = read(candidate)
            except Exception as error:  # whatever orbax and tensorstore raise
                why = one_line(f"{said(error):.300}")
                if (place / CHECKSUMS).exists():
                    raise ValueError(f"the checkpoint {place} does not fit this run: {why}") from error
                damaged[candidate] = f"it is damaged, or does not fit this run: {why}"
                continue
            for bad, why in damaged.items():
                _log.warning("the checkpoint of step %d cannot be read (%s); step %d is taken", bad, why, candidate)
            return found, list(damaged)
        listed = "; ".join(f"step {bad}: {why}" for bad, why in damaged.items())
        raise ValueError(f"{self._directory} has no checkpoint that can be read: {listed}")

    def _put_aside(self, step: int) -> None:
        place = self._directory / str(step)
        aside = place.with_name(f"{step}.damaged")
        if jax.process_index() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            place.rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"step {step} is put aside")
        with _Quiet():
            self._manager.reload()

    def close(self) -> None:
        """Waits for what is being written."""
        try:
            self.finish()
        finally:
            self._waiting.shutdown()
            self._manager.close()


def _checksums(place: Path) -> dict[str, str]:
    """The hash of every file of a checkpoint."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file() and path != place / CHECKSUMS:
            with path.open("rb") as file:
                found[path.relative_to(place).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _wrong(place: Path) -> str:
    """What is wrong with a checkpoint, by its checksums; nothing if it is as it was written, or has none."""
    path = place / CHECKSUMS
    if not path.exists():
        return ""
    try:
        with reading(path):
            expected, found = dict(read_json(path)["files"]), _checksums(place)
    except (OSError, ValueError) as error:
        return str(error)
    for name, digest in expected.items():
        if found.get(name) != digest:
            return one_line(f"{place / name} {'has changed' if name in found else 'is gone'} since it was written")
    return ""


class _Quiet:
    """Keeps the threads of orbax and tensorstore from printing errors: each would print a traceback of its own, beside
    the exception that is raised. They come through either of Python's hooks, and after a write has failed also in the
    main thread, from a callback of an event loop that has ended by then."""

    logs = logging.getLogger("absl"), logging.getLogger("asyncio")

    def __enter__(self) -> None:
        self._hook, self._unraisable = sys.excepthook, sys.unraisablehook
        sys.excepthook, sys.unraisablehook = self._show, self._show_unraisable
        for log in self.logs:
            log.addFilter(_no_error)

    def __exit__(self, *_: object) -> None:
        sys.excepthook, sys.unraisablehook = self._hook, self._unraisable
        for log in self.logs:
            log.removeFilter(_no_error)

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread() and not _from_an_ended_loop(error):
            self._hook(kind, error, trace)

    def _show_unraisable(self, what: Any) -> None:
        if not _from_an_ended_loop(what.exc_value):
            self._unraisable(what)


def _from_an_ended_loop(error: BaseException | None) -> bool:
    """Whether it says that a callback came to an event loop of asyncio that has ended."""
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
