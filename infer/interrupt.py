"""How a command ends: exit status and message. The first signal asks it to stop, a second one stops it at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from dflash_jax.files import one_line

GOOGLE = "0x1ae0"  # vendor of TPUs on the PCI bus
INTERRUPTED = 130  # status of a command that a signal ended


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects interrupt and termination signals in a list, to be looked at where there is something whole to keep; a
    second one raises KeyboardInterrupt at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # signals reach the main thread only
        return

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, catch) for name in names]
    try:
        yield caught
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def exit_status(work: Callable[[], int], *, interrupted: str = "interrupted", packages: str | None = None) -> int:
    """Runs the work of a command; what ends it is said on stderr, in one line.

    Args:
        interrupted: what to say of an interrupt.
        packages: how to install what may be missing; None lets an ImportError pass.

    Returns:
        What `work` returns; 2 for unusable arguments, files or a missing package; 130 for an interrupt.
    """
    silence_libraries()
    try:
        return work()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        of_a_file = error.filename is not None and error.strerror
        _say(f"{error.filename}: {error.strerror}" if of_a_file else error)
    except ValueError as error:
        _say(error)
    except ImportError as error:
        if packages is None:
            raise
        _say(f"{error}; {packages}")
    return 2


def silence_libraries() -> None:
    """Keeps libraries from printing what no user of a command can act on. For processes that have not imported jax."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # without torch it warns, but needs none here
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() == GOOGLE for vendor in vendors):
        # libtpu is installed for `plan`, or with a container: it looks for a TPU host and complains at length.
        known = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
        for name, value in known.items():
            os.environ.setdefault(name, value)


def _say(error: object) -> None:
    print(f"error: {one_line(error)}", file=sys.stderr)


def exit_quietly(status: int) -> NoReturn:
    """Ends the command. A further signal, while Python takes itself apart, changes nothing any more.

    An interrupted command ends at once, and so does one that still compiles: Python would wait for its threads, and
    nothing can stop one that compiles.
    """
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    if status == INTERRUPTED or any(thread.name.startswith("compile") for thread in threading.enumerate()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
