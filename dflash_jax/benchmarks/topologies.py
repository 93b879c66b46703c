"""Accelerators as published, and their compilers, which need none of them at hand."""

import math
import os
import re
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, NamedTuple

from dflash_jax.chips import CHIPS


class Gpu(NamedTuple):
    """What the compiler asks of a GPU besides.

    Attributes:
        capability: compute capability. Before 8.0 there are no bfloat16 products.
        cores, lanes: streaming multiprocessors, and float32 lanes of each.
        shared: bytes of shared memory that a thread block may ask for.
        cache: bytes of the second level.
        clock: GHz.
        threads: of a multiprocessor, at most.
    """

    capability: float
    cores: int
    lanes: int
    shared: int
    cache: int
    clock: float
    threads: int = 2048


GPUS = {
    "t4": Gpu(7.5, 40, 64, 64 << 10, 4 << 20, 1.59, 1024),
    "l4": Gpu(8.9, 58, 128, 99 << 10, 48 << 20, 2.04, 1536),
    "a100": Gpu(8.0, 108, 64, 163 << 10, 40 << 20, 1.41),
    "h100": Gpu(9.0, 132, 128, 227 << 10, 50 << 20, 1.98),
    "h200": Gpu(9.0, 132, 128, 227 << 10, 50 << 20, 1.98),
    "b200": Gpu(10.0, 148, 128, 227 << 10, 126 << 20, 1.97),
}
# Slices by the number in the name that a cloud gives them.
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # chips
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}  # cores, two of each chip
# Fields of XLA's GpuTargetConfigProto. Without versions, it leaves kernels of others and conditions out of CUDA graphs.
_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {gpu.threads}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared}
  shared_memory_per_core: {per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {chip.bandwidth:.0f}
  device_memory_size: {chip.memory:.0f}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
"""


def dtype_for(chip: str) -> str:
    """The dtype of weights and caches there."""
    return "float16" if chip in GPUS and GPUS[chip].capability < 8 else "bfloat16"


def full_name(name: str) -> str:
    """A topology as compilers name it, of what a cloud calls it: v5e:2x2 of "v5e-4" or "v5litepod-4". A cloud counts
    the cores of v4 and v5p, two of each chip. Other names stay as they are."""
    name = name.lower()
    if not (found := re.fullmatch(r"(v4|v5e|v5litepod|v5p|v6e)-(\d+)", name)):
        return name
    chip, number = found[1].replace("litepod", "e"), int(found[2])
    shapes = _CUBES if chip in ("v4", "v5p") else _SQUARES
    if number not in shapes:
        raise ValueError(f"--topology {name}: there are {', '.join(f'{chip}-{n}' for n in shapes)}")
    return f"{chip}:{shapes[number]}"


def parse_topology(name: str) -> tuple[str, int]:
    """Chip and number of devices of "v5e:2x2" or "h100:4"; raises ValueError."""
    chip, _, shape = name.partition(":")
    if chip not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", shape or "1"):
        raise ValueError(
            f"--topology must be CHIP:SHAPE, like v5e:2x2 or h100:4, of {', '.join(CHIPS)}; or a cloud's name of a "
            f"slice of v4, v5e, v5p or v6e, like v5e-4; got {name}"
        )
    return chip, math.prod(map(int, (shape or "1").split("x")))


def compiling_for(name: str) -> AbstractContextManager[None]:
    """Within, programs are traced as on a device of this topology."""
    from dflash_jax.kernels import tensor_cores
    from dflash_jax.kernels.dispatch import using
    from dflash_jax.kernels.linear import xla_gpu

    chip, _ = parse_topology(name)
    if chip not in GPUS:
        return using("tpu", "tpu")
    if GPUS[chip].capability == tensor_cores.CAPABILITY:
        return using(("gpu", "xla_gpu"), "gpu")
    return using("xla_gpu" if GPUS[chip].capability >= xla_gpu.CAPABILITY else "xla", "gpu")


def has_compiler(name: str) -> bool:
    """Whether programs for this topology can be compiled here. A TPU's compiler is asked for by `topology`."""
    chip, _ = parse_topology(name)
    return chip not in GPUS or any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def topology(name: str) -> list[Any]:
    """Devices to compile for, described by their compiler without any being there.

    Raises:
        ImportError: the compiler is not installed.
        ValueError: it knows no such topology.
    """
    chip, count = parse_topology(name)
    if chip in GPUS:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # nothing runs, so no library is missed
        gpu = GPUS[chip]
        major, minor = str(gpu.capability).split(".")
        fields = {"gpu": gpu, "chip": CHIPS[chip], "per_core": gpu.shared + 1024, "major": major, "minor": minor}
        config = _TARGET.format(name=chip.upper(), **fields)
        options = {"platform": "cuda", "target_config": config, "topology": f"1x1x{count}"}
    else:
        import libtpu  # noqa: F401 (its absence is the user's to mend)

        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor a device to take from another process
        options = {"platform": "tpu"}
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology_name=name, **options).devices)
    except Exception as error:  # XLA's own type, whatever was wrong with the name
        raise ValueError(f"no topology {name}: {str(error).splitlines()[0]:.200}") from error
