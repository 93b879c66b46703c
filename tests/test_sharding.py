"""Several devices: the same answers and the same losses on every mesh, and nothing large gathered."""

import dataclasses
import math
import re
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax import Engine, generate, load_drafter, load_target, replay, spec_generate
from dflash_jax.benchmarks.compiled import collectives
from dflash_jax.benchmarks.step_times import StepTimes
from dflash_jax.benchmarks.topologies import compiling_for
from dflash_jax.checkpoint import Reader, leaves
from dflash_jax.decoding.state import init_state
from dflash_jax.decoding.step import speculative_step, step_functions
from dflash_jax.drafters import KINDS, drafter_config, kind_of
from dflash_jax.infer.engine import timing
from dflash_jax.infer.engine.prompts import modelled
from dflash_jax.mesh import entered, make_mesh, parse_mesh
from dflash_jax.models import FAMILIES, target_config
from dflash_jax.sharding import auto_mesh, check_layout, lookup, pin, spec
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example
from dflash_jax.train.drafters import new_drafter
from dflash_jax.train.features import FeatureCache, write_features
from dflash_jax.train.opening import open_run
from tests import tiny
from tests.chips import topology

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [4] * 40, [9, 9]]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 30}


def mesh(text):
    devices = jax.devices()[: math.prod(int(n) for n in re.findall(r"\d+", text))]
    return make_mesh(parse_mesh(text, devices), devices)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    tiny.write_target(directory / "target", tiny.target_config(**SHAPE, tie_word_embeddings=False))
    tiny.write_drafter(directory / "drafter", tiny.drafter_config(**SHAPE, attention_bias=True))
    return directory


def answers(directory, mesh, **settings):
    pair = load_target(directory / "target", mesh=mesh), load_drafter(directory / "drafter", mesh=mesh)
    return spec_generate(*pair, PROMPTS, max_new_tokens=20, stop_token_ids=[], **settings)


@pytest.fixture(scope="module")
def alone(directory):
    return {"greedy": answers(directory, None), "sampled": answers(directory, None, **SAMPLED)}


# Query heads split; key-value heads split, and copied; rows split; all of it; weights gathered where they are used.
@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize(
    "axes",
    [
        "data=2,model=4",
        *(pytest.param(axes, marks=pytest.mark.slow) for axes in ("model=8", "fsdp=2,model=2")),
        *(pytest.param(axes, marks=pytest.mark.exhaustive) for axes in ("model=2", "data=4")),
    ],
)
def test_every_mesh_gives_the_same_answers(directory, alone, axes, how):
    got = answers(directory, mesh(axes), **(SAMPLED if how == "sampled" else {}))
    assert got == alone[how]


@pytest.mark.slow
def test_requests_with_everything_on_a_mesh(directory):
    """Penalties, log-probabilities and copied prompts, on rows and heads that are split."""
    head = [i % 50 + 1 for i in range(16)]
    asked = [tiny.ask([*head, i], 12, 0.5 * (i % 2), id=str(i), repetition_penalty=1.3, logprobs=3) for i in range(6)]

    def answers(where):
        target = load_target(directory / "target", mesh=where)
        drafter = load_drafter(directory / "drafter", mesh=where)
        engine = Engine(target, drafter, slots=2, max_length=64, prefill_chunk=8, prefix_chunks=4, logprobs=3)
        return engine.generate(asked), engine.stats.prefix_tokens

    (alone, copied), (split, copied_there) = answers(None), answers(mesh("data=2,model=4"))
    assert copied == copied_there >= 5 * 16
    for a, b in zip(alone, split, strict=True):
        assert (a.token_ids, a.acceptance_lengths) == (b.token_ids, b.acceptance_lengths)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        for one, other in zip(a.top_logprobs, b.top_logprobs, strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]


@pytest.mark.slow
def test_each_part_of_the_rows_reads_its_own_prompts(directory, monkeypatch):
    """Not every device every prompt: a program reads as many prompts at once as rows are split into parts."""
    by_model = lambda slots, shape, *, brief: modelled(shape)
    monkeypatch.setattr(timing, "prefill_cost", by_model)  # a count that no clock decides
    asked = [tiny.ask([(5 * i + j) % 60 for j in range(200 - i)], 6, id=str(i)) for i in range(8)]
    asked += [tiny.ask([i, 7, 9], 6, 0.8, id=f"short {i}") for i in range(4)]
    found = {}
    for axes in ("data=1", "data=2", "data=4", "data=2,model=2"):
        where = None if axes == "data=1" else mesh(axes)
        target = load_target(directory / "target", mesh=where)
        engine = Engine(target, load_drafter(directory / "drafter", mesh=where), slots=4, max_length=256)
        found[axes] = [answer.token_ids for answer in engine.generate(asked)], engine.stats.prompt_programs
    answers, programs = found.pop("data=1")
    for axes, (split, fewer) in found.items():
        assert split == answers
        assert fewer <= (programs + 1) // 2 + 1, axes


@pytest.mark.slow
def test_what_measures_and_trains_works_on_a_mesh(directory, alone, tmp_path):
    """Replay, step times and cached features: what is no engine, and uses the models of a mesh, too."""
    on = mesh("data=2,model=2")
    target, drafter = load_target(directory / "target", mesh=on), load_drafter(directory / "drafter", mesh=on)
    prompts = zip(PROMPTS, alone["greedy"].tokens, strict=True)
    assert [replay(target, prompt, tokens).mismatches for prompt, tokens in prompts] == [0] * len(PROMPTS)
    engines = [Engine(target, None, slots=2, max_length=64), Engine(target, drafter, slots=2, max_length=64)]
    times = StepTimes(*engines, 8, loops=1)
    times.sample()
    assert all(seconds > 0 for seconds in times.seconds().values())
    examples = [Example(np.arange(1, 20, dtype=np.int32) % 50, np.arange(19) > 4)] * 2
    found = []
    for model, name in ((target, "mesh"), (load_target(directory / "target"), "one")):
        list(write_features(tmp_path / name, model, drafter.taps, examples, 24))
        cache = FeatureCache(tmp_path / name, model, drafter.taps, examples, hidden=False)
        found.append(cache.rows([[0], [1]], 24)[0])
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.slow
def test_without_a_drafter(directory, alone):
    target = load_target(directory / "target", mesh=mesh("data=2,model=2"))
    got = generate(target, PROMPTS, max_new_tokens=20, stop_token_ids=[])
    assert got.tokens == alone["greedy"].tokens


@pytest.mark.slow
def test_each_program_is_compiled_once(directory):
    """Though what one gives may name its layouts otherwise than what the next one was compiled for."""
    where, compiled = mesh("data=2"), []

    def listen(event, seconds, fun_name="", **about):
        if event.endswith("backend_compile_duration") and fun_name in ("jit(decode)", "jit(prefill)"):
            compiled.append(fun_name)

    target, drafter = load_target(directory / "target", mesh=where), load_drafter(directory / "drafter", mesh=where)
    engine = Engine(target, drafter, slots=2, max_length=64, prefill_chunk=32, block_size=[8], plain=True)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine.warm_up()
        engine.generate([tiny.ask([5, 9, 11], 12)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == len(engine.batch.calls.names) > 1


def test_every_parameter_matches_one_rule():
    for name, changes in tiny.FAMILIES.items():
        for tied in (True, False):
            config = target_config(tiny.target_config(model_type=name, tie_word_embeddings=tied, **changes))
            for path, leaf in leaves(FAMILIES[name].tensors(config)):
                assert len(spec(path, len(leaf.shape))) <= len(leaf.shape)
    assert set(tiny.FAMILIES) == set(FAMILIES)
    for raw in (*tiny.kinds().values(), tiny.drafter_config(attention_bias=True)):
        for path, leaf in leaves(KINDS[kind_of(raw)].tensors(drafter_config(raw))):
            assert len(spec(path, len(leaf.shape))) <= len(leaf.shape)
    # A rule is for a number of dimensions: experts that are stacked do not pass for a plain weight.
    for path, rank in (("layers_0/mlp/gate", 2), ("norm", 1), ("layers_0/mlp/experts/gate_up_proj/weight", 3)):
        with pytest.raises(ValueError, match=f"0 sharding rules match parameter {path} of {rank} dimensions"):
            spec(path, rank)


def test_meshes_by_name():
    devices = range(8)
    assert parse_mesh("data=2,model=4", devices) == {"data": 2, "fsdp": 1, "expert": 1, "model": 4}
    assert parse_mesh("model=2, data=-1", devices) == {"data": 4, "fsdp": 1, "expert": 1, "model": 2}
    for text in ("tensor=8", "model", "model=0", "model=x"):
        with pytest.raises(ValueError, match="--mesh must be like data=2,model=4"):
            parse_mesh(text, devices)
    for text in ("model=3", "model=16", "model=3,data=-1", "model=-1,data=-1"):
        with pytest.raises(ValueError, match="there are 8 devices"):
            parse_mesh(text, devices)
    config = target_config(tiny.target_config(**SHAPE))
    assert auto_mesh([config], 8, 8) == {"data": 1, "fsdp": 1, "expert": 1, "model": 8}
    assert auto_mesh([config], 32, 4) == {"data": 8, "fsdp": 1, "expert": 1, "model": 4}  # hosts of four
    few = target_config(tiny.target_config(num_attention_heads=6, num_key_value_heads=3))
    assert auto_mesh([config, few], 8, 8) == {"data": 8, "fsdp": 1, "expert": 1, "model": 1}
    even = target_config(tiny.target_config(num_attention_heads=6, num_key_value_heads=2))
    assert auto_mesh([config, even], 8, 8) == {"data": 4, "fsdp": 1, "expert": 1, "model": 2}
    with pytest.raises(ValueError, match="a model axis of 8 does not divide 6 query heads"):
        check_layout(few, mesh("model=8"))


def test_the_mesh_of_experts():
    """Parts of experts that fill a tile, else whole experts."""

    def chosen(inner, experts, devices):
        changes = {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": 2}
        raw = tiny.target_config(**SHAPE, **changes, model_type="qwen3_moe", norm_topk_prob=True)
        return auto_mesh([target_config(raw)], devices, devices)

    assert chosen(768, 128, 2) == {"data": 1, "fsdp": 1, "expert": 1, "model": 2}
    assert chosen(768, 128, 4) == {"data": 1, "fsdp": 1, "expert": 4, "model": 1}
    assert chosen(768, 6, 4) == {"data": 1, "fsdp": 1, "expert": 1, "model": 4}  # as well as it can
    raw = tiny.target_config(**SHAPE, **tiny.FAMILIES["qwen3_moe"], model_type="qwen3_moe")
    with pytest.raises(ValueError, match="an expert axis of 8 with a model axis of 1 does not divide 4 experts"):
        check_layout(target_config(raw), mesh("expert=8"))


def test_a_shard_reads_its_rows_alone(directory, monkeypatch):
    """From the file to the shards: no tensor is read whole that is split, and shards hold what they should."""
    read = []
    whole = Reader.read

    def spy(self, name, index):
        rows = whole(self, name, index)
        read.append((name, rows.shape))
        return rows

    monkeypatch.setattr(Reader, "read", spy)
    target = load_target(directory / "target", mesh=mesh("model=4"))
    inner, keys = SHAPE["intermediate_size"], SHAPE["num_key_value_heads"] * 16
    assert {shape for name, shape in read if name.endswith("gate_proj.weight")} == {(inner // 4, 32)}
    assert {shape for name, shape in read if name.endswith("k_proj.weight")} == {(keys // 2, 32)}  # a head, twice each
    assert {shape for name, shape in read if name.endswith("down_proj.weight")} == {(32, inner // 4)}
    params = target.params["layers_0"]
    assert params["mlp"]["gate_up_proj"]["weight"].addressable_shards[0].data.shape == (2 * inner // 4, 32)
    assert params["self_attn"]["o_proj"]["weight"].addressable_shards[0].data.shape == (32, 8 * 16 // 4)
    # The first shard's rows are its queries, then its keys and values.
    shard = np.asarray(params["self_attn"]["qkv_proj"]["weight"].addressable_shards[0].data)
    plain = np.asarray(load_target(directory / "target").params["layers_0"]["self_attn"]["qkv_proj"]["weight"])
    np.testing.assert_array_equal(shard, plain[[*range(32), *range(128, 144), *range(160, 176)]])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [pytest.param("data=8", marks=pytest.mark.exhaustive), "fsdp=4,model=2"])
def test_training_is_the_same_on_every_mesh(directory, axes, tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(12, 30, 24)
    examples = [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) > 3) for n in sizes]
    config = TrainConfig(
        block_size=4, num_layers=1, length=32, anchors=8, row_anchors=8, batch_size=8, learning_rate=1e-3, max_steps=4
    )
    config = dataclasses.replace(config, log_every=1, save_every=2, loss_chunk=16)

    def run(where, mesh, stop=None):
        target = load_target(directory / "target", mesh=mesh)
        made = open_run(tmp_path / where, target, *new_drafter(target, config, tiny.MASK), examples, config)
        losses = []

        def note(step, metrics):
            losses.append(metrics["loss"])
            if step == stop:
                raise SystemExit

        if stop:
            with pytest.raises(SystemExit):
                made.fit(note)
        else:
            made.fit(note)
        return losses, made

    alone, one = run("alone", None)
    spread, many = run("spread", mesh(axes))
    np.testing.assert_allclose(spread, alone, rtol=2e-5)
    leaf = many.state.params["layers_0"]["mlp"]["gate_up_proj"]["weight"]
    moments = [x for x in jax.tree.leaves(many.state.optimizer) if x.shape == leaf.shape]
    parts = math.prod(many.mesh.shape[axis] for axis in ("fsdp", "model"))
    for x in (leaf, *moments):
        assert x.addressable_shards[0].data.size == x.size // parts
    # A checkpoint of one mesh is continued on another, and on none.
    before, _ = run("moved", mesh(axes), stop=3)
    after, moved = run("moved", None)
    np.testing.assert_allclose([*before[:2], *after], alone, rtol=2e-5)
    for a, b in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(moved.state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_nothing_large_is_gathered(directory):
    """The collectives of a step: sums of hidden states, and maxima and counts over the vocabulary; never logits."""
    where = mesh("model=4")
    target, drafter = load_target(directory / "target", mesh=where), load_drafter(directory / "drafter", mesh=where)
    with jax.set_mesh(where):
        state = jax.jit(lambda: pin(init_state(target, drafter, 4, 64, 8)))()
        step = jax.jit(lambda *pair: speculative_step(step_functions(*pair[:2], 8), pair[2], logprobs=3))
        found = collectives(step.lower(target, drafter, state).compile().as_text())
    hidden = 4 * 8 * 32 * 4  # rows, block, width, bytes
    assert {c["kind"] for c in found} >= {"all-reduce"}
    assert max(c["bytes"] for c in found) <= 2 * hidden
    vocabulary = [c for c in found if str(tiny.VOCAB) in re.findall(r"\d+", c["shape"].split("[")[1])]
    assert not vocabulary
    # Two sums in every layer, for attention and MLP; of the target's layers, and of the drafter's.
    sums = sum(c["count"] for c in found if c["kind"] == "all-reduce" and c["bytes"] >= hidden)
    assert 2 * (4 + 2) <= sums <= 2 * (4 + 2) + 4


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["model=4", "fsdp=4"])
@pytest.mark.parametrize("chip", ["h100:4", "v5e:2x2"])
def test_the_row_of_one_token_gathers_no_table(chip, axes):
    """As a plain step of a single sequence looks it up, by real compilers."""
    devices = topology(chip)
    where = make_mesh(parse_mesh(axes, devices), devices)
    split = {"sharding": NamedSharding(where, spec("embed_tokens", 2))}
    table = jax.ShapeDtypeStruct((4096, 512), np.float32, **split)
    with compiling_for(chip), entered(where):
        tokens = jax.ShapeDtypeStruct((1, 1), np.int32, sharding=NamedSharding(where, P()))
        found = collectives(jax.jit(lookup).lower(table, tokens).compile().as_text())
    assert max(c["bytes"] for c in found) <= 2 * 512 * 4


def test_a_mesh_holds_nothing_twice(tmp_path):
    """On CPU shards are host memory, and may be the very buffers they were read into, so the weights may count once."""
    raw = tiny.target_config(hidden_size=256, intermediate_size=256, num_hidden_layers=12)
    tiny.write_target(tmp_path, raw)
    load_target(tmp_path, mesh=mesh("fsdp=4,model=2"))  # imports and caches
    tracemalloc.start()
    target = load_target(tmp_path, mesh=mesh("fsdp=4,model=2"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    leaves = jax.tree.leaves(target.params)
    shards = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    assert peak < shards + 2 * max(leaf.nbytes for leaf in leaves) + 1_000_000
    assert shards < 1.1 * sum(leaf.nbytes for leaf in leaves)  # next to nothing is on every device


@pytest.mark.slow
def test_muon_on_a_mesh(directory, tmp_path):
    """Each step makes a matrix orthogonal, whatever its singular values, so rounding weighs more than with Adam."""
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) > 3) for n in rng.integers(12, 30, 24)]
    config = TrainConfig(block_size=4, num_layers=1, length=32, anchors=8, row_anchors=8, batch_size=8, max_steps=3)
    config = dataclasses.replace(config, log_every=1, optimizer="muon", learning_rate=1e-3, moments="bfloat16")
    losses = {}
    for where in (None, "fsdp=4,model=2"):
        target = load_target(directory / "target", mesh=mesh(where) if where else None)
        made = open_run(tmp_path / str(where), target, *new_drafter(target, config, tiny.MASK), examples, config)
        losses[where] = []
        made.fit(lambda step, metrics, where=where: losses[where].append(metrics["loss"]))
    np.testing.assert_allclose(*losses.values(), rtol=1e-3)
    np.testing.assert_allclose(*(found[0] for found in losses.values()), rtol=2e-5)
