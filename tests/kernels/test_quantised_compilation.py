"""Decoding steps with quantized weights, by real compilers: no array of a dequantized weight is written."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks import planning, topologies
from dflash_jax.benchmarks.compiled import collectives, memory_bytes, text_of
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.kernels.active_experts import multiply
from dflash_jax.kernels.linear import linear
from dflash_jax.mesh import make_mesh
from dflash_jax.models.experts import apply_experts
from dflash_jax.quantised import EightBit, FourBit, Quantised
from tests.chips import topology

EVERYTHING = {"target": "int8", "drafter": "int8", "head": "int8"}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def pair(name, changes, quantize, layers=2):
    """The first layers of a published pair."""
    target, drafter = PAIRS[name]
    nested = drafter["dflash_config"] | {"target_layer_ids": [0]}
    drafter = drafter | {"num_target_layers": layers, "num_hidden_layers": 1, "dflash_config": nested}
    return target | changes | {"num_hidden_layers": layers}, drafter, quantize


_VIEWS = "parameter", "bitcast", "get-tuple-element"


def written(text):
    """Numbers and text of every wide array that an instruction outside of fusions writes to a device's own memory.

    What a TPU keeps on the chip is marked S(1).
    """
    computation = ""
    for line in text.splitlines():
        if begun := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = begun[1]
        found = re.match(r"\s*(?:ROOT )?%\S+ = (?:bf16|f32|f16)\[([\d,]+)\](\S*) ([\w\-]+)\(", line)
        inside = re.match(r"fused_|wrapped_|gemm_fusion", computation)
        if found and not inside and "S(1)" not in found[2] and found[3] not in _VIEWS:
            yield math.prod(map(int, found[1].split(","))), line.strip()[:160]


CHIPS = ["h100", "v5e:2x2", *(pytest.param(chip, marks=pytest.mark.exhaustive) for chip in ("b200", "a100", "v6e:2x2"))]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("name", "changes", "quantize"),
    [
        ("qwen3-8b", {}, EVERYTHING),
        ("qwen3-4b", {}, EVERYTHING),
        ("qwen3-8b", FP8, {}),
        ("qwen3-8b-awq", {}, {}),
        ("qwen3-8b", {}, {"target": "int4", "drafter": "int8", "head": "int8"}),
    ],
    ids=["int8", "int8 with a tied head", "FP8 blocks", "AWQ", "int4"],
)
def test_steps_write_no_dequantised_weight(name, changes, quantize, chip):
    if chip == "a100" and changes:
        pytest.skip("before Ada, XLA widens E4M3 first")
    four_bits = name == "qwen3-8b-awq" or "int4" in quantize.values()
    raws, device = pair(name, changes, quantize), topology(chip)[:1]
    mesh = make_mesh(dict.fromkeys(("data", "fsdp", "model", "expert"), 1), device)
    parts = planning.shapes(raws, None, 1, 1024)[:2]
    leaves = jax.tree.leaves([part.params for part in parts], is_leaf=lambda x: isinstance(x, Quantised))
    sizes = {math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, Quantised)}
    assert len(sizes) >= 4
    with topologies.compiling_for(chip):
        for block_size in (0, None) if kernel_for(chip) or reads_four_bits() or not four_bits else (0,):
            program = planning.compile_step(raws, mesh, 1, 1024, block_size)
            if (text := text_of(program)) is not None:  # libtpu 0.0.52 cannot write down those for v6e
                assert not [line for size, line in written(text) if size in sizes]
            if block_size == 0 and chip == "h100" and name != "qwen3-4b":  # whose table would count twice
                stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts[0].params))
                assert stored < memory_bytes(text) < 1.02 * stored
            logits = 4 * (16 + 15) * raws[0]["vocab_size"]  # of target and drafter
            assert program.memory_analysis().temp_size_in_bytes < 4 * logits


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100:2", "v5e:2x2", pytest.param("a100:2", marks=pytest.mark.exhaustive)])
def test_devices_that_share_a_model_write_no_dequantised_weight(chip):
    """Each runs the kernel on its part of a weight; there is none for an A100. In a plain step no table is gathered,
    either."""
    if not (kernel_for(chip) or reads_four_bits()):
        pytest.skip("XLA multiplies numbers of four bits from jax 0.12 on")
    raws, devices = pair("qwen3-8b-awq", {}, {}), topology(chip)
    mesh = make_mesh({"data": 1, "fsdp": 1, "model": len(devices), "expert": 1}, devices)
    params = planning.shapes(raws, None, 1, 1024)[0].params
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    sizes = {math.prod(leaf.shape) // len(devices) for leaf in leaves if isinstance(leaf, Quantised)}
    attention, products = raws[0]["num_hidden_layers"], 4 * raws[0]["num_hidden_layers"]
    with topologies.compiling_for(chip):
        for block_size in (0, None):
            program = planning.compile_step(raws, mesh, 1, 1024, block_size)
            text, logits = program.as_text(), 4 * (16 + 15) * raws[0]["vocab_size"]
            assert not [line for size, line in written(text) if size in sizes]
            assert max(c["bytes"] for c in collectives(text)) < 2**20
            if kernel_for(chip):
                kernel = "tpu_custom_call" if chip.startswith("v") else "mosaic_gpu"
                assert text.count(f'custom_call_target="{kernel}') >= attention + products
            assert program.memory_analysis().temp_size_in_bytes < (2 if kernel_for(chip) else 4) * logits


def kernel_for(chip):
    """Whether this package has a kernel for products with four bits there."""
    return not chip.startswith("h100") or jax.__version_info__ >= (0, 11) if chip[0] in "vh" else False


def reads_four_bits():
    """Whether XLA:GPU multiplies by them; else a block is dequantized first where there is no kernel."""
    return jax.__version_info__ >= (0, 12)


FORMATS = {  # inputs that share a scale, if not all of an output, and the type of zero points or offsets
    "int4 with zero points": ("int4", 128, "float16", "uint8"),
    "int4": ("int4", 32, "bfloat16", None),
    "int4 with offsets": ("int4", 32, "float32", "float32"),
    "MXFP4": ("e2m1", 32, "uint8", None),
    "NVFP4": ("e2m1", 16, "float8_e4m3fn", None),
    "int8": ("int8", None, "float32", None),
    "int8 in groups of 32": ("int8", 32, "float16", None),
    "int8 in groups of 16": ("int8", 16, "float32", None),
    "bfloat16": ("bfloat16", None, "", None),
}


def spec(shape, dtype):
    place = SingleDeviceSharding(topology("h100")[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def stored(name, *shape):
    """What stands for a weight in one of these formats."""
    code, group, scale, less = FORMATS[name]
    groups = shape[:-1] if group is None else (*shape[:-1], shape[-1] // group)
    if code == "bfloat16":
        return spec(shape, code)
    if code == "int8":
        return EightBit(spec(shape, code), spec(groups, scale), block=group and (1, group))
    subtracted = {} if less is None else {"zero" if less == "uint8" else "offset": spec(groups, less)}
    return FourBit(spec((*shape[:-1], shape[-1] // 2), jnp.uint8), spec(groups, scale), code=code, **subtracted)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_registers_hold_what_the_kernel_for_hopper_needs(name, rows, monkeypatch, capfd):
    """At the widths of real weights: matrices in groups, and experts of gpt-oss-20b, whose inputs are an odd number of
    tiles."""
    if not kernel_for("h100"):
        pytest.skip("the kernel needs jax 0.11")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    group, programs = FORMATS[name][1], []
    if group is None and rows > 64:
        pytest.skip("experts of so many tokens are sorted")
    with topologies.compiling_for("h100"):
        for outputs, inputs in ((4096, 12288), (5760, 2880)):
            if group and inputs % group == 0:
                x = spec((1, rows, inputs), jnp.bfloat16)
                call = jax.jit(partial(linear, implementation="gpu"))
                programs.append(call.lower(x, stored(name, outputs, inputs)))
        if rows <= 64 and group != 128:
            x, slots = spec((32, rows, 2880), jnp.bfloat16), spec((33,), jnp.int32)
            call = jax.jit(partial(multiply, implementation="gpu"))
            programs.append(call.lower(x, stored(name, 32, 2880, 2880), slots))
        for program in programs:
            program.compile()
    said = "".join(capfd.readouterr())
    assert said.count("bytes spill stores") == len(programs)
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@pytest.mark.parametrize("tokens", [24, 64])
@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_experts_of_few_tokens_are_not_copied(name, tokens, monkeypatch, capfd):
    """Those of Qwen3-Coder-30B-A3B: two kernels read them as they are, and nothing is sorted."""
    if not kernel_for("h100"):
        pytest.skip("the kernel needs jax 0.11")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    E, k, D, inner = 128, 8, 2048, 768
    gate_up, down = stored(name, E, 2 * inner, D), stored(name, E, D, inner)
    each = spec((1, tokens, k), jnp.float32), spec((1, tokens, k), jnp.int32)
    run = lambda x, weights, chosen, gate_up, down: apply_experts(x, weights, chosen, gate_up, None, down, None)
    with topologies.compiling_for("h100"):
        program = jax.jit(run).lower(spec((1, tokens, D), jnp.bfloat16), *each, gate_up, down).compile()
    text = program.as_text()
    assert re.findall(r"(\d+) bytes spill", "".join(capfd.readouterr())) == ["0"] * 4  # stores and loads of each
    assert text.count('custom_call_target="mosaic_gpu') == 2
    assert not re.search(r" sort\(|xla\.gpu\.triton", text)
    sizes = {math.prod(shape) // n for shape in (gate_up.shape, down.shape) for n in (1, E)}
    assert not [line for size, line in written(text) if size in sizes]
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4 * E * tokens * (2 * inner + D)  # sums of every expert


def test_what_is_written_is_found():
    text = "ENTRY %main (p: f32[4]) -> f32[8,4] {\n  %p = f32[4]{0} parameter(0)\n  %b = f32[8,4]{1,0} broadcast(%p)\n}"
    assert [size for size, _ in written(text)] == [32]
    assert not list(written(text.replace("ENTRY %main", "%fused_computation")))
