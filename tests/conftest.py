"""Strict JAX for every test, and a tiny random pair written to disk and read by the real loader."""

import gc
import hashlib
import inspect
import math
import os
import re
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Hundreds of small programs are compiled and run once or twice: compile fast, not well, if .ci/run does not ask for it.
if os.environ.get("DFLASH_TESTS_OPTIMISED") != "1":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_llvm_disable_expensive_passes=true"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch and numpy: pytest's workers take all cores

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

if os.environ.get("DFLASH_TESTS_OPTIMISED") != "1" and version("jaxlib").startswith("0.10."):
    # The older emitters compile in half the time. Only this jaxlib has them, and whoever else reads the flags, like
    # the compiler for TPUs, ends at a name it does not know: so they are there only while jax reads them.
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = flags + " --xla_cpu_use_fusion_emitters=false"
    jax.devices()
    os.environ["XLA_FLAGS"] = flags

# Shapes and types of every annotated call of the package are checked, whenever a module is imported.
install_import_hook("dflash_jax", "tests.checks.checked")

import tests.checks  # noqa: F401
from dflash_jax import load_drafter, load_target, loading
from dflash_jax.kernels import verdicts
from tests import tiny


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """The compiled programs of a file serve the next ones, too. Not those of a file that patches what is compiled. And
    every program holds memory maps, of which a process may have some 65,000; then XLA crashes."""
    apart = _patches_modules(request.module)
    if apart:
        jax.clear_caches()
    yield
    if apart or _memory_maps() > 20_000:
        jax.clear_caches()


def _patches_modules(file):
    """Whether a test file sets attributes of modules of the package or of JAX."""
    named = re.findall(r"setattr\((\w+|\"[\w.]+\"),", inspect.getsource(file))
    modules = (name.strip('"') if name[0] == '"' else getattr(vars(file).get(name), "__name__", "") for name in named)
    return any(name.split(".")[0] in ("dflash_jax", "jax") for name in modules)


def _memory_maps():
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else math.inf


SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text().splitlines())


def pytest_itemcollected(item):
    if item.nodeid in SLOW:
        item.add_marker(pytest.mark.slow)


PARTS = 8  # of which .ci/run takes one


@pytest.hookimpl(trylast=True)  # of the tests that were asked for
def pytest_collection_modifyitems(config, items):
    """With DFLASH_TESTS_PART=N, one of `PARTS` parts of the tests, that of N modulo so many."""
    if not (part := os.environ.get("DFLASH_TESTS_PART")):
        return
    number = lambda item: int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4])
    kept = {item for item in items if number(item) % PARTS == int(part) % PARTS} or set(
        items[:1]
    )  # none would be an error
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def no_persistent_cache():
    """Commands run in a test, or in a fixture of many, leave no compiled programs and no verdicts in the user's
    cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "enable_compilation_cache", lambda: None)
        patch.setattr(verdicts, "directory", lambda: None)
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """The pair of `pair_directory` with a tokenizer, for the command lines."""
    directory = tmp_path_factory.mktemp("served")
    tiny.write_target(directory / "target", tiny.target_config())
    tiny.write_tokenizer(directory / "target")
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


@pytest.fixture(scope="session")
def pair_directory(tmp_path_factory):
    """A directory with `target` and `drafter`: random weights, 64 tokens, 4 and 2 layers."""
    directory = tmp_path_factory.mktemp("pair")
    tiny.write_target(directory / "target", tiny.target_config())
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


@pytest.fixture(scope="session")
def target(pair_directory):
    return load_target(pair_directory / "target")


@pytest.fixture(scope="session")
def drafter(pair_directory):
    return load_drafter(pair_directory / "drafter")
