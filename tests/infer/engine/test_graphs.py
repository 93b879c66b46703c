"""All steps of a call as one CUDA graph: where, and what becomes of a check that fails or hangs. CPU stands in."""

import json
import threading
import warnings

import jax
import pytest

from dflash_jax.infer.engine import graphs
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.graphs import GRAPH_OPTIONS, graph_options
from dflash_jax.kernels import verdicts


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """As on a machine with a GPU and a new driver."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(graphs, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(graphs.compiler_options, "unknown", lambda options: False)
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path)
    graphs._works.cache_clear()
    yield tmp_path
    graphs._works.cache_clear()


def test_elsewhere_there_are_none():
    assert all(graph_options(policy) == {} for policy in ("auto", "on", "off"))
    with pytest.raises(ValueError, match="gpu_graphs must be one of auto, on, off; got 'yes'"):
        EngineConfig(gpu_graphs="yes")  # type: ignore[arg-type]


def test_the_small_program_is_right():
    assert graphs.trouble({}) is None
    assert "Error" in (graphs.trouble({"xla_no_such_option": "1"}) or "")


def test_auto_checks_once_and_on_never(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(graphs, "trouble", lambda options: asked.append(options))
    assert graph_options("on") == GRAPH_OPTIONS
    assert graph_options("off") == {}
    assert graph_options("auto", devices=2) == {}
    assert asked == []
    for _ in range(2):
        assert graph_options("auto") == GRAPH_OPTIONS
        graphs._works.cache_clear()  # as another process
    assert asked == [GRAPH_OPTIONS]


@pytest.mark.parametrize("driver", [None, (12, 3)])
def test_auto_is_off_with_an_old_driver(gpu, monkeypatch, driver):
    monkeypatch.setattr(graphs, "driver_version", lambda: driver)
    monkeypatch.setattr(graphs, "trouble", lambda options: pytest.fail("asked"))
    assert graph_options("auto") == {}


def test_auto_is_off_where_the_check_fails(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "trouble", lambda options: "its results differ")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="steps do not run as one CUDA graph: its results differ"):
            assert graph_options("auto") == {}
        graphs._works.cache_clear()


def test_a_check_that_hangs_is_left_to_nobody(gpu, monkeypatch):
    """This process says so; its mark stays when it ends, and the next one goes without."""
    released = threading.Event()
    monkeypatch.setattr(graphs, "PATIENCE", 0.05)
    monkeypatch.setattr(graphs, "trouble", lambda options: released.wait(10) and None)
    with pytest.raises(RuntimeError, match="has not ended after 0 seconds. Start again"):
        graph_options("auto")
    (mark,) = gpu.glob("*.json")
    found = json.loads(mark.read_text())
    found["begun"][1] = 2**22 + 1  # the process has ended
    mark.write_text(json.dumps(found))
    with pytest.warns(RuntimeWarning, match="a process ended while it was checked"):
        assert graph_options("auto") == {}
    released.set()


def test_an_interrupt_is_no_verdict(gpu, monkeypatch):
    released = threading.Event()

    def interrupted(self, seconds):
        while not list(gpu.glob("*.json")):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(graphs, "trouble", lambda options: released.wait(10) and None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graph_options("auto")
    assert list(gpu.glob("*.json")) == []
    released.set()


def test_the_driver_is_asked_for_without_failing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.driver_version() is None or graphs.driver_version() > (10, 0)
