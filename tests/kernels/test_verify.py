"""Kernels that nobody named run only where they give what XLA gives. CPU stands in for a platform with kernels."""

import os
import socket
import subprocess
import sys
import threading
import warnings
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.cache import KV
from dflash_jax.kernels import dispatch, verdicts, verify
from dflash_jax.kernels.block_attention import api, attend, reference
from dflash_jax.kernels.cache_update import api as update_api
from dflash_jax.kernels.cache_update import append
from dflash_jax.kernels.cache_update import reference as update_reference
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny


class Fake(ModuleType):
    """A kernel that gives `error` too much, and counts how often it was traced."""

    def __init__(self, error=0.0):
        super().__init__("dflash_jax.kernels.block_attention.fake")
        self.error, self.calls = error, 0

    def declines(self, *arrays):
        return None

    def attend(self, *arguments):
        self.calls += 1
        if isinstance(self.error, Exception):
            raise self.error
        return reference.attend(*arguments) + self.error


@pytest.fixture
def install(monkeypatch):
    """Makes a kernel the one that this platform prefers."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setitem(dispatch.PREFERRED, "cpu", ("tpu",))

    def install(kernel):
        monkeypatch.setitem(api.IMPLEMENTATIONS, "tpu", kernel)
        return kernel

    yield install
    dispatch.set_policy(None)


def arguments(B=2, T=3):
    draw = lambda i, *size: jax.random.normal(jax.random.key(i), size)
    cache = KV(draw(0, B, 2, 40, 8), draw(1, B, 2, 40, 8))
    lengths = jnp.arange(B) * 3
    positions = lengths[:, None] + jnp.arange(T)[None]
    return draw(2, B, T, 4, 8), positions, draw(3, B, 2, T, 8), draw(4, B, 2, T, 8), cache, lengths


def call(*block, **options):
    return attend(*block, visible="causal", **options)


def expected(*block):
    return call(*block, implementation="xla")


def in_a_loop(*block):
    return jax.lax.scan(lambda carry, _: (carry, call(*block)), None, length=2)[1][1]


def anew(transform, function):
    """Traced again in every call, for what was traced with another kernel is kept."""
    return lambda *block: transform(lambda *block: function(*block))(*block)


HOW = {
    "eager": call,
    "jit": anew(jax.jit, call),
    "loop": anew(jax.jit, in_a_loop),
    "checkpoint": anew(jax.checkpoint, call),
}


@pytest.mark.parametrize("how", HOW)
def test_a_kernel_that_is_right_runs(install, how):
    kernel, block = install(Fake(1e-7)), arguments()
    got = HOW[how](*block)
    assert kernel.calls >= 2  # in its trial, and in the program
    np.testing.assert_allclose(got, expected(*block), atol=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (0.01, r"results differ by 0\.\d+ of the largest value, and may by 2e-05"),
        pytest.param(float("nan"), "results differ by nan of the largest value", marks=pytest.mark.slow),
        (RuntimeError("no such tile\non this chip"), "RuntimeError: no such tile$"),
    ],
)
def test_a_kernel_that_is_wrong_is_replaced(install, how, error, why):
    kernel, block = install(Fake(error)), arguments()
    with pytest.warns(RuntimeWarning, match=r"block_attention\.fake is not used for Trial\(rows=2, T=16, .*" + why):
        got = HOW[how](*block)
    assert kernel.calls == 1
    np.testing.assert_allclose(got, expected(*block), atol=1e-6)


def test_a_kernel_without_memory_for_its_trial_is_tried_again(install):
    """Weights and caches may fill the device just then; that says nothing of the kernel."""
    kernel, block = install(Fake(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 65536 bytes"))), arguments()
    for calls in (1, 2):
        with pytest.warns(RuntimeWarning, match="no memory for its trial, which the next program repeats"):
            np.testing.assert_allclose(call(*block), expected(*block), atol=1e-6)
        assert kernel.calls == calls
    kernel.error = 1e-7
    np.testing.assert_allclose(call(*block), expected(*block), atol=1e-6)
    assert kernel.calls == 4  # in its trial, and in the program


@pytest.mark.parametrize("memory", ["Ran out of memory in memory space vmem", "Shared memory size limit exceeded"])
def test_a_kernel_that_asks_for_too_much_of_a_cores_memory_is_tried_once(install, memory):
    kernel, block = install(Fake(RuntimeError(f"RESOURCE_EXHAUSTED: {memory}"))), arguments()
    with pytest.warns(RuntimeWarning, match=f"is not used for .*RESOURCE_EXHAUSTED: {memory}"):
        call(*block)
    call(*block)
    assert kernel.calls == 1


def test_a_shape_is_tried_once(install):
    kernel = install(Fake())
    call(*arguments())
    assert kernel.calls == 2
    call(*arguments())
    HOW["jit"](*arguments())
    call(*arguments(B=5)[:4], KV(*(jnp.zeros((5, 2, 40, 8)) for _ in "kv")), jnp.zeros(5, jnp.int32))  # two rows do
    assert kernel.calls == 5
    call(*arguments(T=4))  # as 3 positions, it is tried as 16
    assert kernel.calls == 6
    call(*arguments(T=17))
    assert kernel.calls == 8
    call(*arguments(), window=3)
    assert kernel.calls == 10


def test_checks_are_made_side_by_side(install):
    """Each waits here for the other, which one after the other would be for ever."""
    kernel, meeting = install(Fake()), threading.Barrier(2)
    plain = kernel.attend

    def attend(*arguments):
        if threading.current_thread() is not threading.main_thread():
            meeting.wait(60)
        return plain(*arguments)

    kernel.attend = attend
    program = jax.jit(lambda *block: call(*block))
    verify.side_by_side(partial(program.trace, *arguments(T=T)) for T in (3, 17, 3))
    assert kernel.calls == 4  # two checks, and two programs; the third is the first
    program(*arguments(T=17))
    assert kernel.calls == 4  # which was traced already


def test_suspects_are_checked_one_after_the_other(install, monkeypatch):
    kernel, order = install(Fake()), []
    trouble = verify.trouble
    monkeypatch.setattr(verdicts.Verdict, "is_suspect", lambda verdict: "T=16," in verdict._case)
    monkeypatch.setattr(
        verify, "trouble", lambda *check, alone=True: order.append((check[2].T, alone)) or trouble(*check)
    )
    program = jax.jit(lambda *block: call(*block))
    verify.side_by_side(partial(program.trace, *arguments(T=T)) for T in (17, 3))
    assert order[0] == (16, True)
    assert set(order[1:]) == {(64, False), (16, False)}
    assert kernel.calls == 4  # nothing is checked twice


def test_what_was_traced_before_a_check_failed_is_not_kept(install):
    install(Fake(0.01))
    block, program = arguments(), jax.jit(lambda *block: call(*block))
    with pytest.warns(RuntimeWarning, match=r"block_attention\.fake is not used for Trial"):
        verify.side_by_side([partial(program.trace, *block)])
    np.testing.assert_allclose(program(*block), expected(*block), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("error", [pytest.param(1e-7, marks=pytest.mark.slow), 0.01])
def test_an_engine_checks_kernels_before_it_takes_memory(install, error, target, drafter, monkeypatch):
    ask = [tiny.ask([5, 9, 11], 12)]
    jax.clear_caches()  # of the other kernel
    with dispatch.using("xla"):
        plain = Engine(target, None, max_length=64).generate(ask)[0].token_ids
    kernel, update = install(Fake(error)), Fake()
    update.append = update_reference.append
    monkeypatch.setitem(update_api.IMPLEMENTATIONS, "tpu", update)
    made, ready = [], jax.block_until_ready  # the state, once there is one
    monkeypatch.setattr(jax, "block_until_ready", lambda x: made.append(kernel.calls) or ready(x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = Engine(target, drafter, max_length=64, plain=True)
    assert made[0] == kernel.calls > 0
    assert bool(told) == (error > 1e-6)
    engine.warm_up(first=True)
    checks = {key for key in verify._known if key[1] is kernel}
    assert engine.generate(ask)[0].token_ids == plain
    assert {key for key in verify._known if key[1] is kernel} == checks


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_within_a_mesh(install, error):
    """A trial has the shapes of a device's part."""
    mesh, block = make_mesh(parse_mesh("data=4,model=2")), arguments(B=8)
    kernel = install(Fake(error))
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = jax.jit(lambda *block: call(*block))(*block)
    assert kernel.calls == (2 if error == 0 else 1)
    assert [" N=2, K=1," in str(x.message) for x in told] == [True] * (error != 0)
    np.testing.assert_allclose(got, expected(*block), atol=1e-6)


def test_policies(install, monkeypatch):
    kernel, block = install(Fake(1.0)), arguments()
    wrong, right = expected(*block) + 1.0, expected(*block)
    program = jax.jit(lambda *block: call(*block))
    dispatch.set_policy("pallas")
    np.testing.assert_array_equal(call(*block), wrong)
    np.testing.assert_allclose(program(*block), wrong, atol=1e-6)
    dispatch.set_policy("xla")
    np.testing.assert_array_equal(call(*block), right)
    np.testing.assert_allclose(program(*block), right, atol=1e-6)  # a policy is part of what a program is
    dispatch.set_policy(None)
    monkeypatch.setenv("DFLASH_KERNELS", "pallas")
    np.testing.assert_array_equal(call(*block), wrong)
    monkeypatch.setenv("DFLASH_KERNELS", "xla")
    np.testing.assert_array_equal(call(*block), right)
    dispatch.set_policy("pallas")  # goes before the variable
    np.testing.assert_array_equal(call(*block), wrong)
    assert kernel.calls == 4  # and none of them a trial


def test_policies_that_there_are_not(install, monkeypatch):
    install(Fake())
    with pytest.raises(ValueError, match="the policy must be one of auto, xla, pallas, got 'fast'"):
        dispatch.set_policy("fast")
    monkeypatch.setenv("DFLASH_KERNELS", "fast")
    with pytest.raises(ValueError, match="DFLASH_KERNELS must be one of auto, xla, pallas, got 'fast'"):
        call(*arguments())


def test_what_is_named_is_not_tried(install):
    kernel, block = install(Fake(1.0)), arguments()
    wrong = expected(*block) + 1.0
    np.testing.assert_array_equal(call(*block, implementation="tpu"), wrong)
    dispatch.set_policy("xla")
    np.testing.assert_array_equal(call(*block, implementation="tpu"), wrong)
    with dispatch.using("tpu"):
        np.testing.assert_array_equal(call(*block), wrong)
    assert kernel.calls == 3


@pytest.mark.parametrize("why", ["it declines", "it fails its trial"])
def test_the_next_one_that_a_platform_prefers(install, monkeypatch, why):
    """It is tried, too."""
    first, second, block = install(Fake(1.0)), Fake(1e-7), arguments(T=4)
    monkeypatch.setitem(dispatch.PREFERRED, "cpu", ("tpu", "xla_gpu"))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "xla_gpu", second)
    second.__name__ += "_in_xla"
    if why == "it declines":
        first.declines = lambda *arrays: why
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        np.testing.assert_allclose(call(*block), expected(*block), atol=1e-6)
    assert second.calls == 2  # the trial, and the call
    assert [len(said), first.calls] == ([0, 0] if why == "it declines" else [1, 1])
    with dispatch.using(("tpu", "xla_gpu")):
        found = call(*block)
    np.testing.assert_allclose(found, expected(*block) + (0 if why == "it declines" else 1), atol=1e-6)


def test_nothing_is_tried_for_a_platform_that_is_not_at_hand(install):
    kernel, block = install(Fake(1.0)), arguments()
    with dispatch.using(None, "tpu"):
        np.testing.assert_array_equal(call(*block), expected(*block) + 1.0)
    assert kernel.calls == 1


def test_xla_is_never_tried(monkeypatch):
    """Nor on a CPU, which has no kernels."""
    monkeypatch.setattr(dispatch, "trouble", None)
    call(*arguments())


def test_the_cache_update(install, monkeypatch):
    """It copies, and may not be wrong by anything."""
    kernel = Fake()
    kernel.append = lambda caches, *rest: caches
    monkeypatch.setitem(update_api.IMPLEMENTATIONS, "tpu", kernel)
    _, _, k, v, cache, lengths = arguments()
    with pytest.warns(RuntimeWarning, match=r"fake is not used for Trial\(rows=2, T=3, K=2, .*and may by 0$"):
        got = jax.jit(append)((cache.k, cache.v), (k, v), lengths, jnp.full(2, 3))
    np.testing.assert_array_equal(got[0][1, :, 3:6], k[1])


PROCESS = """
import sys, warnings
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, index, bad = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, 2, index)
from dflash_jax.kernels import dispatch
from tests.kernels.test_verify import Fake, api, arguments, call
dispatch.PREFERRED["cpu"] = ("tpu",)
kernel = api.IMPLEMENTATIONS["tpu"] = Fake(0.5 if index == bad else 0.0)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    jax.jit(call).trace(*arguments())
print("tries", kernel.calls, "warnings", sum("is not used" in str(x.message) for x in told))
"""


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        # The kernel is in neither program.
        pytest.param(0, ["tries 1 warnings 1", "tries 0 warnings 0"], marks=pytest.mark.slow),
        (1, ["tries 2 warnings 0", "tries 1 warnings 0"]),  # here it is in both
    ],
)
def test_the_first_process_decides_for_all(bad, said, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.getcwd()}
    environment |= {"XDG_CACHE_HOME": str(tmp_path)}  # where no earlier check is known
    run = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index), str(bad)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        told = [process.communicate(timeout=600)[0] for process in run]
    finally:  # one that waits for the other would wait for ever
        for process in run:
            process.kill()
            process.wait()
            process.stdout.close()
    assert [x.strip().splitlines()[-1] for x in told] == said, told
