"""Damaged checkpoints of a run are noticed, whatever the damage, and the newest whole one is taken."""

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.checkpoints import CHECKSUMS, Checkpoints, _Quiet
from dflash_jax.train.step import TrainState


def state(step, size=500):
    return TrainState(jnp.asarray(step), {"a": jnp.full(size, step, "float32")}, {"count": jnp.asarray(step)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(place)
    for step in (2, 4):
        checkpoints.save(state(step))
    checkpoints.close()
    return place


@pytest.fixture
def place(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restored(place, step=None):
    checkpoints = Checkpoints(place)
    size = checkpoints.restore_params(step)["a"].size if step else 500
    found = checkpoints.restore(state(0, size), step)
    assert np.array_equal(found.params["a"], state(int(found.step), size).params["a"])
    assert int(found.optimizer["count"]) == int(found.step)
    checkpoints.close()
    return int(found.step)


def flip(path, at):
    data = bytearray(path.read_bytes())
    if data:
        data[int(at * (len(data) - 1))] ^= 0x40
    path.write_bytes(data or b"x")


DAMAGE = {
    "first byte": lambda path: flip(path, 0),
    "a byte in the middle": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9] or b"x"),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_of_any_file_is_noticed(place, how, caplog):
    files = [path.relative_to(place) for path in (place / "4").rglob("*") if path.is_file()]
    assert len(files) > 5
    whole = shutil.copytree(place, place.with_name("whole"))
    for file in files:
        if file.name == CHECKSUMS and how == "gone":
            continue  # as it is with checkpoints that were written before there were any
        shutil.rmtree(place)
        shutil.copytree(whole, place)
        DAMAGE[how](place / file)
        caplog.clear()
        assert restored(place) == 2, file
        assert "the checkpoint of step 4 cannot be read" in caplog.text
        assert "step 2 is taken" in caplog.text
        assert str(place / "4") in caplog.text


def test_a_damaged_checkpoint_gives_its_step_back(place):
    flip(place / "4" / "_CHECKPOINT_METADATA", 0.5)
    checkpoints = Checkpoints(place)
    assert int(checkpoints.restore(state(0)).step) == 2
    assert (place / "4.damaged").is_dir()
    assert checkpoints.steps == [2]
    for step in (4, 6):
        checkpoints.save(state(step))
    checkpoints.finish()
    assert checkpoints.steps == [4, 6]
    checkpoints.close()
    assert restored(place) == 6


def test_only_to_look_changes_nothing(place, caplog):
    flip(place / "4" / "_CHECKPOINT_METADATA", 0.5)
    checkpoints = Checkpoints(place)
    assert np.array_equal(checkpoints.restore_params()["a"], state(2).params["a"])
    assert checkpoints.steps == [2, 4]
    with pytest.raises(ValueError, match="step 4: .*_CHECKPOINT_METADATA has changed"):
        checkpoints.restore_params(4)
    checkpoints.close()
    assert "step 2 is taken" in caplog.text


def test_checkpoints_without_checksums_are_read(place):
    for step in (2, 4):
        (place / str(step) / CHECKSUMS).unlink()
    assert restored(place) == 4
    shutil.rmtree(place / "4" / "default" / "ocdbt.process_0")
    shutil.rmtree(place / "4" / "default" / "d")
    assert restored(place) == 2


def test_without_any_that_is_whole_the_error_names_the_directory(place):
    for step in (2, 4):
        os.truncate(place / str(step) / "default" / "_METADATA", 9)
    with pytest.raises(ValueError, match="no checkpoint that can be read: step 4: .*; step 2: ") as failed:
        restored(place)
    assert str(place) in str(failed.value)
    assert sorted(os.listdir(place)) == ["2", "4"]
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; steps on disk: \[2, 4\]"):
        restored(place, 3)


def test_one_of_another_model_is_not_taken_for_damaged(place):
    checkpoints = Checkpoints(place)
    with pytest.raises(ValueError, match="does not fit this run") as failed:
        checkpoints.restore(state(0).replace(params={"b": jnp.zeros(3)}))
    assert str(failed.value).isprintable()
    assert checkpoints.steps == [2, 4]
    checkpoints.close()


def test_a_failure_is_reported_once(tmp_path, monkeypatch, capsys):
    """What threads of orbax say of it, each with a traceback, came before the error and after it."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    logs = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for log in logs:
        monkeypatch.setattr(log, "filters", list(log.filters))

    def shout():
        sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
        for log in logs:
            log.error("_SignalingThread.run() raised an exception")

    def shout_and_fail(*_, **__):
        in_a_thread(shout)
        raise ValueError("RESOURCE_EXHAUSTED:\nno space left")

    checkpoints, before = Checkpoints(tmp_path), (sys.excepthook, [list(log.filters) for log in logs])
    checkpoints.save(state(1))
    checkpoints.finish()
    assert before == (sys.excepthook, [log.filters for log in logs])
    monkeypatch.setattr(checkpoints._manager, "save", shout_and_fail)
    with pytest.raises(OSError, match="step 2 could not be written.*no space left") as failed:
        checkpoints.save(state(2))
    in_a_thread(shout)
    assert str(failed.value).isprintable()
    assert capsys.readouterr().err == ""


def test_a_state_is_copied_before_it_is_written(tmp_path):
    """The next step is given its buffers, while it is still being written."""
    checkpoints, change = (
        Checkpoints(tmp_path, keep=3),
        jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0),
    )
    now = state(1, size=5_000_000)
    for _ in range(3):
        checkpoints.save(now)
        now = change(now)
    checkpoints.close()
    assert [restored(tmp_path, step) for step in (1, 2, 3)] == [1, 2, 3]


def test_a_write_that_fails_later_is_reported_at_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    checkpoints = Checkpoints(tmp_path)
    complete = checkpoints._complete

    def fail(step):
        complete(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_complete", fail)
    checkpoints.save(state(1))
    monkeypatch.setattr(checkpoints, "_complete", complete)
    with pytest.raises(OSError, match="the checkpoint of step 1 could not be written.*No space left"):
        checkpoints.save(state(2))
    checkpoints.close()
    assert restored(tmp_path, 2) == 2  # it is written all the same


def test_checksums_follow_at_once(tmp_path):
    """Nobody waits for the next checkpoint, before which a run may be killed or a file damaged."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1))
    for _ in range(600):
        if (tmp_path / "1" / CHECKSUMS).exists():
            break
        time.sleep(0.1)
    flip(tmp_path / "1" / "_CHECKPOINT_METADATA", 0.5)
    checkpoints.close()
    with pytest.raises(ValueError, match="step 1: .*_CHECKPOINT_METADATA has changed"):
        Checkpoints(tmp_path).restore(state(0), 1)


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("hook", ["excepthook", "unraisablehook"])
def test_a_callback_that_comes_after_its_event_loop_has_ended_prints_nothing(hook, monkeypatch):
    """As tensorstore's do once a write has failed: by either hook, also in the main thread. All else is shown."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda what: shown.append(what.exc_value))
    loop = asyncio.new_event_loop()
    loop.close()
    for call in (lambda: loop.call_soon_threadsafe(print), lambda: [][0]):
        with _Quiet(), pytest.raises((RuntimeError, IndexError)) as raised:
            call()
        with _Quiet():
            if hook == "excepthook":
                sys.excepthook(raised.type, raised.value, raised.tb)
            else:
                sys.unraisablehook(SimpleNamespace(exc_value=raised.value))
    assert [type(error) for error in shown] == [IndexError]
