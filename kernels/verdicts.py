"""What the checks at first use have found, kept on disk, so that one machine makes each check once.

A verdict is a small file in `checks` of the package's cache directory. Its name follows from everything that a finding
rests on: the device, its driver, jax, the compiler's flags, the sources of what is checked, and the case. Where the
directory cannot be written, verdicts are kept for the process alone.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax

from dflash_jax import files

DRIVER = Path("/sys/module/nvidia/version")
PROCESSORS = Path("/proc/cpuinfo")
FEATURES = re.compile(r"^(?:model name|flags|Features)\s*:(.*)$", re.MULTILINE)  # of a processor, on x86 and on Arm
FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"  # of the compiler, in the environment


def directory() -> Path | None:
    """Where verdicts lie; None keeps none, as for a user without a home."""
    try:
        return files.cache_directory() / "checks"
    except RuntimeError:
        return None


def machine() -> list[str]:
    """The device, its driver, the versions of jax and the compiler's flags."""
    device = jax.local_devices()[0]
    versions = jax.__version__, metadata.version("jaxlib"), device.client.platform_version
    kind = _processor() if device.platform == "cpu" else device.device_kind
    return [kind, _driver(), *versions, *(os.environ.get(name, "") for name in FLAGS)]


class Verdict:
    """The file of one check.

    Args:
        sources: modules whose folders hold the code that is checked.
        case: what is checked, in words that differ from those of every other check.
    """

    def __init__(self, case: str, *sources: ModuleType):
        rests_on = [*machine(), *map(_digest, sources), case]
        self._case, root = case, directory()
        name = hashlib.sha256("\0".join(rests_on).encode()).hexdigest()[:32]
        self._path = None if root is None else root / f"{name}.json"

    def known(self) -> tuple[bool, str | None]:
        """Whether there is a verdict, and what trouble it names, if any.

        A check that another process began and did not live to end is trouble, too. One that is going on is no verdict.
        """
        if not (found := self._read()):
            return False, None
        if (process := found.get("begun")) is not None:
            if _alive(process) or not found.get("alone", True):
                return False, None
            return True, f"a process ended while it was checked; remove {self._path} to have it checked again"
        trouble = found.get("trouble")
        return True, trouble if trouble is None else str(trouble)

    def _read(self) -> files.Json:
        """What the file holds; nothing where there is none."""
        try:
            found = json.loads(self._path.read_text()) if self._path else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_suspect(self) -> bool:
        """Whether a process ended while it made this check, and others at the same time."""
        found = self._read()
        return found.get("alone") is False and not _alive(found.get("begun"))

    @contextlib.contextmanager
    def checking(self, *, alone: bool = True):
        """Within, a mark says that the check goes on; what ends the process leaves it.

        Args:
            alone: whether no other check goes on, which may be what ends the process.
        """
        self._write({"begun": _this_process(), "alone": alone})
        try:
            yield
        finally:  # an exception, such as an interrupt, is no verdict
            self.drop()

    def drop(self) -> None:
        """Removes what is there."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def keep(self, trouble: str | None) -> None:
        """Writes what was found."""
        self._write({"trouble": trouble})

    def _write(self, finding: files.Json) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # full, or only to be read
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finding | {"case": self._case, "at": time.strftime("%Y-%m-%d %H:%M:%S")}, indent=2)
            files.replace(self._path, text.encode())
            self._path.chmod(0o644)


def _driver() -> str:
    """The version of NVIDIA's driver, where there is one; a TPU's is a part of jax's runtime."""
    try:
        return DRIVER.read_text().strip()
    except OSError:
        return ""


@cache
def _processor() -> str:
    """Which one it is and what it can do: what is compiled or measured on one may not hold on another that has the same
    home directory."""
    try:
        found = dict.fromkeys(FEATURES.findall(PROCESSORS.read_text()))
    except OSError:
        found = ()
    return " ".join([platform.machine(), *(found or [platform.processor()])])


@cache
def _digest(module: ModuleType) -> str:
    """Of the sources in a module's folder; of its name, if it has none."""
    if not (file := getattr(module, "__file__", None)):
        return module.__name__
    sources = sorted(Path(file).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def _this_process() -> list[int | str]:
    return [os.uname().nodename, os.getpid(), _began(os.getpid())]


def _began(process: int) -> str:
    """When a process began, in ticks since the machine did; nothing where it cannot be known."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _alive(process: object) -> bool:
    """Whether a process that wrote a mark may still be at work; one of another machine is taken to be."""
    match process:
        case [str(host), int(number), str(began)]:
            if host != os.uname().nodename:
                return True
            try:
                os.kill(number, 0)
            except ProcessLookupError:
                return False
            except OSError:
                pass
            return _began(number) == began
    return False
