"""What a check found is known to the next process; a crash is a finding; a directory that cannot be written is none."""

import json
import os
import stat
import subprocess
import sys

import pytest

from dflash_jax import files
from dflash_jax.kernels import verdicts, verify
from dflash_jax.kernels.block_attention import reference
from dflash_jax.kernels.verdicts import Verdict, directory

DEAD = [os.uname().nodename, 2**22 + 1, "1"]  # no process has this number


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path / "checks")
    return tmp_path / "checks"


def files_in(place):
    return sorted(place.glob("*")) if place.exists() else []


@pytest.mark.parametrize("trouble", [None, "results differ"])
def test_a_verdict_is_known_afterwards(place, trouble):
    verdict = Verdict("a case", reference)
    assert verdict.known() == (False, None)
    with verdict.checking():
        assert Verdict("a case", reference).known() == (False, None)  # this process is at it
        assert len(files_in(place)) == 1
    assert files_in(place) == []
    verdict.keep(trouble)
    assert Verdict("a case", reference).known() == (True, trouble)
    assert Verdict("another case", reference).known() == (False, None)
    (written,) = files_in(place)
    assert stat.S_IMODE(written.stat().st_mode) == 0o644
    assert json.loads(written.read_text())["case"] == "a case"


def test_it_rests_on_driver_flags_and_sources(place, monkeypatch, tmp_path):
    Verdict("a case", reference).keep(None)
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "DRIVER", tmp_path / "version")
        (tmp_path / "version").write_text("580.159.04\n")
        assert Verdict("a case", reference).known() == (False, None)
    assert Verdict("a case", reference).known() == (True, None)
    assert Verdict("a case", verify).known() == (False, None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_something")
    assert Verdict("a case", reference).known() == (False, None)


def test_of_several_checks_any_may_have_ended_the_process(place):
    """Each is made again, alone; what then ends a process is trouble."""
    verdict = Verdict("a case", reference)
    assert not verdict.is_suspect()
    with verdict.checking(alone=False):
        assert not Verdict("a case", reference).is_suspect()  # this process is at it
        (mark,) = files_in(place)
        written = json.loads(mark.read_text())
    mark.write_text(json.dumps(written | {"begun": DEAD}))
    assert Verdict("a case", reference).known() == (False, None)
    assert Verdict("a case", reference).is_suspect()
    mark.write_text(json.dumps(written | {"begun": DEAD, "alone": True}))
    assert Verdict("a case", reference).known()[0]
    assert not Verdict("a case", reference).is_suspect()


def test_what_ended_the_process_is_trouble(place):
    """A child ends in the middle of a check, as from a fault in a driver."""
    code = (
        "import os, pathlib, sys\nfrom dflash_jax.kernels import verdicts\n"
        "from dflash_jax.kernels.block_attention import reference\n"
        "verdicts.directory = lambda: pathlib.Path(sys.argv[1])\n"
        "with verdicts.Verdict('a case', reference).checking():\n    os._exit(9)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", code, str(place)], env=environment, check=False)
    assert ended.returncode == 9
    (mark,) = files_in(place)
    there, trouble = Verdict("a case", reference).known()
    assert there
    assert trouble == f"a process ended while it was checked; remove {mark} to have it checked again"
    mark.unlink()
    assert Verdict("a case", reference).known() == (False, None)


def test_an_interrupt_is_no_verdict(place):
    verdict = Verdict("a case", reference)
    with pytest.raises(KeyboardInterrupt), verdict.checking():
        raise KeyboardInterrupt
    assert verdict.known() == (False, None)
    assert files_in(place) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"begun": 7}', '{"begun": ["x"]}', "null", "\0"])
def test_damaged_files_are_no_approval(place, text):
    verdict = Verdict("a case", reference)
    verdict.keep(None)
    (written,) = files_in(place)
    written.write_text(text)
    there, trouble = verdict.known()
    assert not there or trouble


def test_marks_of_other_processes(place):
    verdict = Verdict("a case", reference)
    verdict.keep(None)
    (written,) = files_in(place)
    for begun, there in ((DEAD, True), (["elsewhere", 1, ""], False), ([DEAD[0], os.getpid(), "0"], True)):
        written.write_text(json.dumps({"begun": begun}))
        assert verdict.known()[0] is there, begun


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path / "file" / "checks")
    verdict = Verdict("a case", reference)
    with verdict.checking():
        pass
    verdict.keep("trouble")
    assert verdict.known() == (False, None)


def test_a_kernel_is_tried_once_on_a_machine(place, monkeypatch):
    """Another process asks the directory; what is in memory is forgotten here instead."""
    from dflash_jax.kernels import dispatch
    from dflash_jax.kernels.block_attention import api
    from tests.kernels.test_verify import Fake, arguments, call

    kernel = Fake(0.01)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setitem(dispatch.PREFERRED, "cpu", ("tpu",))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "tpu", kernel)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="is not used for"):
            call(*arguments())
        assert kernel.calls == 1
        verify._known.clear()


def test_a_user_without_a_home(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(files, "cache_directory", nowhere)
    assert directory() is None
