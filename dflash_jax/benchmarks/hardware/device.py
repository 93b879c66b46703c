"""The device, what is installed, and the two ceilings: the bandwidth of its memory and the rate of its products."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.infer.engine.graphs import driver_version
from dflash_jax.version import __version__

PACKAGES = "jax", "jaxlib", "flax", "transformers", "torch", "libtpu"


def described() -> Figures:
    """What runs the report: two reports with the same of it can be one."""
    device = jax.devices()[0]
    figures: Figures = {"device": device.device_kind, "devices": jax.device_count(), "cpus": os.cpu_count()}
    figures |= {"dflash_jax": __version__, "python": sys.version.split()[0], "system": platform.platform()}
    figures |= {name: version for name in PACKAGES if (version := _version(name))}
    if driver := driver_version():
        figures["driver"] = "CUDA {}.{}".format(*driver)
    figures["runtime"] = " ".join(device.client.platform_version.split())[:120]
    return figures


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ceilings(*, small: bool) -> Iterator[Figures]:
    """A copy in the device's memory, bytes read and written; a product of two square matrices of random numbers."""
    size = 1 << (22 if small else 32)
    if (stats := jax.devices()[0].memory_stats()) and (limit := stats.get("bytes_limit")):
        size = min(size, limit // 8)
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    seconds = timed(jax.jit(lambda x: -x), x)
    yield {"what": "copy", "GB": size / 1e9, "GB/s": 2 * size / seconds / 1e9}
    width, dtype = (256, jnp.float32) if small or jax.default_backend() == "cpu" else (8192, jnp.bfloat16)
    a, b = (jax.random.normal(jax.random.key(i), (width, width), dtype) for i in (1, 2))
    seconds = timed(jax.jit(jnp.matmul), a, b)
    yield {"what": f"product of {width}, {a.dtype}", "TFLOP/s": 2 * width**3 / seconds / 1e12}


def timed(program: Callable[..., Any], *arguments: Any, runs: int = 7, calls: int = 5) -> float:
    """Seconds of one call: the median of some runs of a few calls each."""
    out = jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        for _ in range(calls):
            out = program(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return sorted(times)[runs // 2]
