"""The GPU kernel and the speculative step through the real Mosaic, XLA:GPU and ptxas compilers, without a GPU."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks import planning, training_plan
from dflash_jax.benchmarks.compiled import collectives, launches
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.topologies import compiling_for, dtype_for
from dflash_jax.chips import CHIPS
from dflash_jax.decoding.selection import rank
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import BLOCK_OPTIONS, TRAINING_OPTIONS
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.graphs import GRAPH_OPTIONS
from dflash_jax.infer.engine.programs import decode_call
from dflash_jax.kernels.block_attention.reference import slots_at_once
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.chips import SERVED, compile_attention, topology

IN_PAGES = [("qwen3-8b verify", 128, rows) for rows in (4, 32)]
OF_CODES = [*IN_PAGES, ("gpt-oss decode", None, 4), ("llama-3.1-8b verify", None, 133)]


@pytest.mark.parametrize(
    ("name", "page", "rows", "codes"),
    [*((name, None, 4, False) for name in SERVED), *((*x, False) for x in IN_PAGES), *((*x, True) for x in OF_CODES)],
)
def test_hopper(name, page, rows, codes, monkeypatch, capfd):
    """It compiles, its registers hold what they have to, and no cache is copied."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    slots = 4096 + 512 * list(SERVED).index(name)  # its own: what was compiled before is not compiled again
    program = compile_attention("h100", "gpu", name, rows=rows, slots=slots, page=page, codes=codes)
    told = capfd.readouterr()
    assert set(re.findall(r"(\d+) bytes spill", told.out + told.err)) == {"0"}
    assert "mosaic_gpu" in program.as_text()
    shape = SERVED[name]
    assert " copy(" not in program.as_text()
    keys = rows * shape.K * slots * shape.H * (1 if codes else 2)
    assert program.memory_analysis().temp_size_in_bytes < (keys if shape.T < 64 else 2 * keys)


def test_codes_of_wide_heads_on_hopper(monkeypatch, capfd):
    """A thread has no registers left for what 256 entries need; a few of its numbers lie in memory."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compile_attention("h100", "gpu", "qwen3.5-9b verify", slots=4096 + 64, codes=True)
    told = capfd.readouterr()
    spilled = re.findall(r"(\d+) bytes spill", told.out + told.err)
    assert max(map(int, spilled)) <= 256
    assert " copy(" not in program.as_text()


def test_what_ptxas_says_is_seen(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_attention("h100", "gpu", "qwen3-8b verify", slots=1024)
    told = capfd.readouterr()
    assert "bytes spill stores" in told.out + told.err


def step(pair, chips, mesh, rows, slots, **more):
    devices = topology(chips)
    with compiling_for(chips):
        return planning.compile_step(pair, make_mesh(parse_mesh(mesh, devices), devices), rows, slots, **more)


def test_nothing_of_the_vocabularys_size_changes_places():
    """XLA:GPU had gathered the logits of all devices, at every condition on what some row asks for."""
    program = step(PAIRS["qwen3-4b"], "h100:4", "model=4", 4, 2048)
    found = collectives(program.as_text())
    assert {c["kind"] for c in found} <= {"all-reduce", "all-to-all"}
    assert max(c["bytes"] for c in found) <= 1.01 * 2 * (4 * 2560 * 4 * 16)  # two sums of hidden states at once


@pytest.mark.parametrize("nodes", [15, 63])
def test_no_tree_sorts_the_vocabulary(nodes):
    place, size = SingleDeviceSharding(topology("h100")[0]), 151_936
    choice = jax.eval_shape(lambda: tiny.choice_of(2, 15, size, 0.7).replace(nodes=nodes))
    scores = jax.ShapeDtypeStruct((2, 15, size), jnp.float32)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (choice, scores))
    text = jax.jit(lambda choice, scores: rank(choice, scores, slice(15))[0]).lower(*given).compile().as_text()
    assert "TopK" in text
    assert not re.findall(rf"\[[\d,]*{size}\]\S* sort\(|\[[\d,]*{size}\].* sort\(", text)


@pytest.mark.parametrize(
    ("name", "layers", "size", "most"),
    [
        ("qwen3-8b", 3, None, 97),
        ("qwen3-8b", 3, 0, 60),
        ("gpt-oss-20b", 3, None, 143),
        pytest.param("qwen3-8b", 36, None, 520, marks=pytest.mark.slow),
        pytest.param("qwen3-8b", 36, 0, 450, marks=pytest.mark.slow),
    ],
)
def test_what_a_step_starts(name, layers, size, most, tmp_path):
    """Few kernels, 11 in a dense layer, all in one CUDA graph; of the whole pair, and of one that is cut."""
    target, drafter = pair = PAIRS[name]
    if layers < target["num_hidden_layers"]:
        taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0, 1]}}
        pair = cut(target, layers), cut(drafter | taps, 1) | {"num_target_layers": layers}
    step(pair, "h100", "data=1", 1, 1024, block_size=size, dump=str(tmp_path))
    found = launches(tmp_path)
    assert found["kernels"] <= most
    assert (found["graphs"], found["host_decisions"]) == (1, 0)


@pytest.mark.parametrize(("rows", "cache", "most"), [*((n, None, 11) for n in (4, 8, 32)), (4, "int8", 16)])
@pytest.mark.slow
def test_what_a_layer_starts(rows, cache, most, tmp_path):
    """In a speculative step of several rows; `test_what_a_step_starts` has one row. Codes are made by five kernels."""
    target, drafter = PAIRS["qwen3-8b"]
    taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0, 1]}}
    found = []
    for layers in (3, 4):
        pair = cut(target, layers), cut(drafter | taps, 1) | {"num_target_layers": layers}
        kinds = () if cache is None else ({"cache": cache},)
        step((*pair, *kinds), "h100", "data=1", rows, 1024, dump=str(tmp_path / str(layers)))
        found.append(launches(tmp_path / str(layers))["kernels"])
    assert found[1] - found[0] <= most


@pytest.mark.parametrize("policy", [{}, GRAPH_OPTIONS], ids=["as XLA does", "with loops"])
def test_all_steps_of_a_call_are_one_graph(policy, tmp_path):
    """With loops in graphs; else the host decides for the loop and for conditions in every step."""
    target, drafter = PAIRS["qwen3-8b"]
    taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0]}}
    pair = cut(target, 2), cut(drafter | taps, 1) | {"num_target_layers": 2}
    devices = topology("h100")
    mesh = make_mesh(parse_mesh("data=1", devices), devices)
    options = BLOCK_OPTIONS["gpu"] | policy | {"xla_dump_to": str(tmp_path)}
    with compiling_for("h100"), jax.set_mesh(mesh):
        arguments = planning.placed_shapes(pair, mesh, 1, 1024)
        config = EngineConfig()
        call, given = decode_call(*arguments, 16, 0, Draft(16), config, options=options)
        call.lower(*given).compile()
    found = launches(tmp_path)
    assert (found["graphs"] == 1) is (found["host_decisions"] == 0) is bool(policy)


@pytest.mark.slow
def test_products_of_a_training_step_are_bfloat16():
    """As compiled, in both directions: no operand of one is float32. All are cuBLAS's."""
    target, drafter = PAIRS["qwen3-8b"]
    taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0]}}
    pair = cut(target, 2), cut(drafter | taps, 1) | {"num_target_layers": 2}
    devices = topology("h100")
    with compiling_for("h100"):
        mesh = make_mesh(parse_mesh("data=1", devices), devices)
        text = training_plan.compile_training(pair, mesh, 1, 3072, 512).as_text()
    kinds = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    products = r' custom-call\(([^)]*)\), custom_call_target="__cublas'
    operands = [names.split(", ") for names in re.findall(products, text)]
    assert " dot(" not in text
    assert len(operands) > 20
    assert {kinds[name.lstrip("%")] for names in operands for name in names} == {"bf16"}


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
@pytest.mark.slow
def test_a_training_step_on_a_gpu(name, tmp_path, monkeypatch):
    """With blocks of 16 and of 10: few kernels in a layer, one loop, whose length is known, and no array as wide as the
    vocabulary beyond a chunk."""
    target, drafter = PAIRS[name]
    found = {}
    for layers, depth in [(2, 1), (3, 1), (2, 2)]:
        dump = tmp_path / f"{layers} {depth}"
        monkeypatch.setitem(TRAINING_OPTIONS, "gpu", TRAINING_OPTIONS["gpu"] | {"xla_dump_to": str(dump)})
        taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [layers - 2]}}
        pair = cut(target, layers), cut(drafter | taps, depth) | {"num_target_layers": layers}
        devices = topology("h100")
        with compiling_for("h100"):
            mesh = make_mesh(parse_mesh("data=1", devices), devices)
            text = training_plan.compile_training(pair, mesh, 1, 3072, 1024, remat=False).as_text()
        found[layers, depth] = launches(dump)["kernels"]
        loops = [line for line in text.splitlines() if " while(" in line]
        assert len(loops) == 1
        assert '"known_trip_count":{' in loops[0]
        wide = {int(rows) for rows in re.findall(rf"f32\[(?:1,)?(\d+),{target['vocab_size']}\]", text)}
        assert wide == {2048}
    assert found[3, 1] - found[2, 1] <= 20  # a layer of the target
    assert found[2, 2] - found[2, 1] <= 120  # of the drafter, in both directions


def cut(raw, layers):
    """The configuration of a model's first layers."""
    first = {name: value[:layers] for name, value in raw.items() if name == "layer_types"}
    return raw | first | {"num_hidden_layers": layers}


@pytest.mark.slow
def test_qwen3_8b_fits_one_gpu_and_copies_nothing():
    rows, slots = 1, 8192
    target, drafter = PAIRS["qwen3-8b"]
    program = step(PAIRS["qwen3-8b"], "h100", "data=1", rows, slots)
    text, figures = program.as_text(), planning.measured(program)
    layers = target["num_hidden_layers"] + drafter["num_hidden_layers"]
    assert text.count('custom_call_target="mosaic_gpu') == layers
    caches = 2 * layers * (2 * rows * 8 * slots * 128)
    assert figures["updated_in_place_bytes"] >= caches
    assert figures["temporary_bytes"] < caches / 10  # logits and noise, as they come
    assert f"bf16[{rows},8,{slots},128]{{3,2,1,0}} copy(" not in text
    for width in (6144, 24576, 12288):  # no weight is widened to float32
        assert f"f32[{width},4096]" not in text
        assert f"f32[4096,{width}]" not in text
    assert not re.search(r"= bf16\[(1,)?2048,4096\]\S* fusion", text)  # nor a draft layer's part of kv_proj copied
    assert figures["peak_bytes"] < 80e9


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["a100", pytest.param("b200", marks=pytest.mark.exhaustive)])
def test_gpus_without_its_tensor_cores_take_xla(chips):
    """Neither Ampere nor Blackwell has WGMMA, which the kernel is made of: asked for there, it does not compile."""
    program = step(PAIRS["qwen3-4b"], chips, "data=1", 1, 1024)
    assert "gemm_fusion" in program.as_text()
    with pytest.raises(jax.errors.JaxRuntimeError):  # of slots not compiled before, which would be taken as they are
        compile_attention(chips, "gpu", "qwen3-8b verify", slots=1536)


def made_of(text, shape):
    """What produces arrays of this shape in a compiled program, views and arguments left out."""
    found = Counter(re.findall(rf"= {re.escape(shape)}\S* ([a-z-]+)\(", text))
    return {kind: n for kind, n in found.items() if kind not in ("parameter", "get-tuple-element", "bitcast", "tuple")}


def test_a_copy_of_a_cache_is_seen():
    place = SingleDeviceSharding(topology("a100")[0])
    spec = jax.ShapeDtypeStruct((4, 8, 4096, 128), jnp.bfloat16, sharding=place)
    write = lambda cache: cache.at[:, :, 5].set(1)
    for donated, found in ((0, {}), ((), {"copy": 1})):
        text = jax.jit(write, donate_argnums=donated).lower(spec).compile().as_text()
        assert {kind: n for kind, n in made_of(text, "bf16[4,8,4096,128]").items() if kind == "copy"} == found


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["t4", "a100", "l4", "b200"])
def test_a_step_without_the_kernel_copies_nothing(chips):
    """On sm_75, sm_80, sm_89 and sm_100: caches are only written in place, and no weight is widened to float32."""
    rows, slots, layers = 4, 4096, 4 + 2
    target, drafter = PAIRS["qwen3-4b"]
    taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0, 2]}}
    target, drafter = target | {"num_hidden_layers": 4}, drafter | taps | {"num_hidden_layers": 2}
    program = step((target, drafter | {"num_target_layers": 4}), chips, "data=1", rows, slots, dtype=dtype_for(chips))
    text, kind = program.as_text(), "f16" if chips == "t4" else "bf16"
    # A layer's keys, and its values, are scattered to by one fusion each, of which that is the result.
    assert made_of(text, f"{kind}[{rows},8,{slots},128]") == {"fusion": 2 * layers, "scatter": 2 * layers}
    caches = 2 * layers * (2 * rows * 8 * slots * 128)
    assert planning.measured(program)["updated_in_place_bytes"] >= caches
    assert planning.measured(program)["temporary_bytes"] < caches / 2  # logits and noise, as they come
    shapes = lambda kind: set(re.findall(rf"\b{kind}\[(\d{{4,}},\d{{4,}})\]", text))
    assert {"19456,2560", "2560,9728", "6144,2560", "2560,4096", "151936,2560"} <= shapes(kind)
    assert not shapes(kind) & shapes("f32")


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["t4", pytest.param("l4", marks=pytest.mark.exhaustive)])
def test_small_gpus(chips):
    """Neither has the kernel; a T4 has no bfloat16 either, and none may be left in its programs."""
    devices = topology(chips)
    with compiling_for(chips):
        mesh = make_mesh(parse_mesh("data=1", devices), devices)
        program = planning.compile_step(PAIRS["qwen3-4b"], mesh, 1, 4096, dtype=dtype_for(chips))
    text, figures = program.as_text(), planning.measured(program)
    assert ("bf16[" in text) == (chips == "l4")
    layers = sum(config["num_hidden_layers"] for config in PAIRS["qwen3-4b"])
    assert figures["updated_in_place_bytes"] >= 2 * layers * (2 * 8 * 4096 * 128)
    assert figures["peak_bytes"] < CHIPS[chips].memory


def test_attention_without_the_kernel_takes_few_steps():
    """A loop asks the host before every iteration: with 8 rows of 8,192 slots it has 8 iterations, not 64."""
    with compiling_for("a100"):
        text = compile_attention("a100", "xla", "qwen3-8b verify", rows=8, slots=8192).as_text()
        assert "bf16[8,8,1024,128]" in text
        assert slots_at_once(8 * 8 * 256 * 2, 8 * 32 * 16) == 1024
        assert slots_at_once(1 * 8 * 256 * 2, 1 * 32 * 16) == 8192
        assert slots_at_once(64 * 8 * 256 * 2, 64 * 32 * 16) == 128
        assert slots_at_once(1 * 8 * 256 * 2, 1 * 32 * 512) == 2048  # scores of a prompt's chunk must fit, too
    assert slots_at_once(1, 1) == 128
