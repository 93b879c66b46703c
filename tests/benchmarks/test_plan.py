"""The plan of a step: by the compiler where there is one for the chip, else by arithmetic."""

import json
from functools import partial

import pytest

from dflash_jax import plan
from dflash_jax.benchmarks import planning, presets, topologies, training_plan
from dflash_jax.benchmarks.compiled import collectives, memory_bytes
from dflash_jax.benchmarks.topologies import compiling_for
from dflash_jax.chips import CHIPS
from dflash_jax.mesh import make_mesh, parse_mesh
from tests.chips import topology

LIST = """
  %a = f32[8,16,4096]{2,1,0} all-reduce(%x), channel_id=1
  %b = (f32[8,16]{1,0}, bf16[8,16,64]{2,1,0:T(8,128)(2,1)}) all-reduce(%x, %y), channel_id=2
  %c = f32[8,16,4096]{2,1,0} all-reduce(%z), channel_id=3
  %d = bf16[4,64]{1,0} all-gather(%z), dimensions={0}
  %f = f32[8,16,4096]{2,1,0} all-reduce(%z), channel_id=3, the_same="begun and ended"
  %e = f32[4]{0} add(%p, %q)
"""


def cut(depth):
    """Qwen3-8B and its drafter with few layers."""
    target, drafter = presets.PAIRS["qwen3-8b"]
    nested = drafter["dflash_config"] | {"target_layer_ids": [0]}
    drafter = drafter | {"num_hidden_layers": 1, "num_target_layers": depth, "dflash_config": nested}
    return target | {"num_hidden_layers": depth}, drafter


def test_collectives_are_read_from_a_program():
    found = collectives(LIST)
    assert [(c["kind"], c["bytes"], c["count"]) for c in found] == [
        ("all-reduce", 8 * 16 * 4096 * 4, 2),
        ("all-reduce", 8 * 16 * 4 + 8 * 16 * 64 * 2, 1),
        ("all-gather", 4 * 64 * 2, 1),
    ]


def test_quantised_weights_are_planned_as_they_are_stored(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    (target, drafter), paths = cut(2), (tmp_path / "target.json", tmp_path / "drafter.json")
    for path, raw in zip(paths, (target, drafter), strict=True):
        path.write_text(json.dumps(raw))
    layers = 2 * (6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096) + 4096 * 12288 + 2048 * 4096 + 2 * 4096 * 4096
    layers += 3 * 12288 * 4096 - 4096 * 12288  # of the drafter: its queries, output, keys and values, and MLP
    vocabulary, fusion = 151936 * 4096, 4096 * 4096
    found = {}
    for how in ("none", "int8"):
        given = ["--quantize", f"target={how},drafter={how},head={how}", "--topology", "h100", "--batch-size", "1"]
        files = ["--target", str(paths[0]), "--drafter", str(paths[1]), "--json", str(tmp_path / "f.json")]
        assert plan.main([*files, *given, "--max-length", "1024"]) == 0
        found[how] = json.loads((tmp_path / "f.json").read_text())
    assert "target in int8   drafter in int8   head in int8" in capsys.readouterr().out
    assert found["none"]["weight_bytes"] == pytest.approx(2 * (layers + 2 * vocabulary + fusion), rel=0.01)
    assert found["int8"]["weight_bytes"] == pytest.approx(layers + 3 * vocabulary + 2 * fusion, rel=0.01)
    read = {how: figures["bytes_accessed"] for how, figures in found.items()}
    assert read["none"] - read["int8"] == pytest.approx(layers + 2 * vocabulary, rel=0.02)  # two heads, and no table
    assert plan.main([*files, *given, "--max-length", "1024", "--cache-dtype", "int8"]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    numbers = 2 * 2 * 8 * 1024 * 128  # keys and values of two layers
    assert read["int8"] - figures["bytes_accessed"] == pytest.approx(numbers, rel=0.02)


def test_how_many_requests_of_what_length(monkeypatch, capsys, tmp_path):
    """As many as the caches and logits of each leave room for, beside the weights and what programs need."""
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    arguments = ["--target", "qwen3-8b", "--topology", "h100:2", "--mesh", "data=2", "--json", str(tmp_path / "f.json")]
    assert plan.main(arguments) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    free = 0.85 * 80 * 2**30 - figures["weight_bytes"]
    keys, logits = (36 + 5) * 2 * 8 * 128 * 2, 4 * 4 * (4 * 16) * 151936  # bytes of a token, of a request
    for length, found in figures["requests_by_length"].items():
        row = keys * int(length) + logits
        assert found % 2 == 0
        assert found / 2 * row * 0.99 < free < (found / 2 + 1) * row * 1.01
    assert list(figures["requests_by_length"]) == ["4096", "8192", "32768"]  # the trained context is 40,960
    assert 70e6 < figures["constraint_bytes"] < 80e6
    assert "of 4,096, " in capsys.readouterr().out


def test_names_of_a_cloud_are_understood():
    names = {
        "v5e-4": "v5e:2x2",
        "v5litepod-8": "v5e:2x4",
        "v6e-16": "v6e:4x4",
        "v5p-8": "v5p:2x2x1",
        "h100:4": "h100:4",
    }
    assert {name: topologies.full_name(name) for name in names} == names
    with pytest.raises(ValueError, match="there are v5e-1, v5e-4, v5e-8"):
        topologies.full_name("v5e-5")
    assert topologies.parse_topology(topologies.full_name("H100:4")) == ("h100", 4)
    for number, shape in topologies._CUBES.items():  # two cores in each chip
        assert 2 * topologies.parse_topology(f"v4:{shape}")[1] == number


@pytest.mark.slow
def test_a_gpu_by_arithmetic(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    arguments = ["--target", "qwen3-8b", "--topology", "h100:4", "--max-length", "1024", "--batch-size", "1"]
    assert plan.main([*arguments, "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    weights = 8.19e9 + 1.05e9  # as the two are known to be
    assert figures["weight_bytes"] == pytest.approx(2 * weights / 4, rel=0.01)
    keys = 2 * 8 // 4 * 128 * 2  # bytes of a token in a layer
    assert figures["cache_bytes"] == (36 + 5) * 1024 * keys
    out = capsys.readouterr().out
    assert "h100:4   4 devices   model 4" in out
    assert "fits" in out
    assert plan.main(["--target", "qwen3-32b", "--topology", "h100", "--max-length", "40000", "--batch-size", "8"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "qwen3-8b", "--topology", "x9:4"], "--topology must be CHIP:SHAPE, like v5e:2x2"),
        (["--target", "nowhere", "--topology", "h100"], "no drafter given: pass --drafter, or a --target of qwen3-4b"),
        (["--target", "qwen3-8b", "--topology", "h100:4", "--mesh", "model=3"], "there are 4 devices"),
        (
            ["--target", "qwen3-8b", "--topology", "h100:2", "--mesh", "data=2", "--batch-size", "3"],
            "multiple of the 2 data-parallel parts",
        ),
        (["--target", "qwen3-8b", "--topology", "h100:2", "--training"], "choose a TPU topology"),
        (["--target", "qwen3-8b", "--topology", "h100:1", "--parts"], "--parts needs the CUDA compiler"),
        (
            ["--target", "qwen3-8b", "--topology", "h100", "--batch-size", "1", "--prefill-budget", "64"],
            "--prefill-budget needs rows that decode beside prompts: --batch-size of 2 or more",
        ),
        (
            ["--target", "qwen3-8b", "--topology", "h100", "--parts", "--prefill-budget", "64"],
            "--prefill-budget is for a whole decoding step; leave it, --training and --parts out",
        ),
        (
            ["--target", "qwen3-8b", "--topology", "h100", "--prefill-budget", "-1"],
            "--prefill-budget must be at least 1",
        ),
    ],
)
def test_what_cannot_be_planned(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    assert plan.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_prompts_beside_rows_that_decode_are_counted(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(topologies, "has_compiler", lambda topology: False)
    found = {}
    for budget in (0, 64, 256):
        file = tmp_path / f"{budget}.json"
        arguments = f"--target qwen3-8b --topology h100 --batch-size 32 --max-length 1024 --prefill-budget {budget}"
        assert plan.main([*arguments.split(), "--json", str(file)]) == 0
        found[budget] = json.loads(file.read_text())
    assert "256 tokens, read beside the rows that decode" in capsys.readouterr().out
    more = [found[budget]["flops"] - found[0]["flops"] for budget in (64, 256)]
    products = 2 * 6.9e9  # operations a token of the layers' weights; the head reads the last of each prompt alone
    assert 64 * products < more[0] < 1.5 * 64 * products
    assert 3.5 < more[1] / more[0] < 5
    assert found[256]["least_step_seconds"] > found[0]["least_step_seconds"]


def test_pages_are_counted(capsys, monkeypatch, tmp_path):
    """Caches take what their pages do, however long a row may be; the drafter's and the target's alike."""
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    found = []
    for more in (["--max-length", "2048"], ["--max-length", "32768", "--cache-tokens", str(8 * 2048)]):
        arguments = [
            "--target",
            "qwen3-4b",
            "--topology",
            "h100:1",
            "--batch-size",
            "8",
            "--json",
            f"{tmp_path}/f.json",
        ]
        assert plan.main([*arguments, *more]) == 0
        found.append(json.loads((tmp_path / "f.json").read_text()))
    assert "KV cache pages       128 of 128 positions: 16384 tokens" in capsys.readouterr().out
    assert found[1]["cache_bytes"] == pytest.approx(found[0]["cache_bytes"] * 129 / 128, rel=1e-4)  # and nobody's page
    assert found[1]["bytes_accessed"] == pytest.approx(found[0]["bytes_accessed"], rel=0.01)
    assert plan.main(["--target", "qwen3-4b", "--topology", "h100:1", "--training", "--cache-tokens", "9999"]) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_training_step_by_its_compiler():
    """Weights are gathered, not rows; the target takes whole rows by splash attention."""
    pytest.importorskip("libtpu")
    devices = topology("v5e:4x4")
    mesh = make_mesh(parse_mesh("fsdp=8,model=2", devices), devices)
    with compiling_for("v5e:4x4"):
        compiled = training_plan.compile_training(cut(2), mesh, 8, 1024, 64)
    text, figures = compiled.as_text(), planning.measured(compiled)
    assert "splash_mha_fwd" in text
    assert max(c["bytes"] for c in figures["collectives"]) <= 1.01 * 151936 * 4096 * 2 / 2  # half of the head
    assert figures["temporary_bytes"] < 3 * 2**30


@pytest.mark.slow
def test_four_chips_by_their_compiler(monkeypatch, capsys, tmp_path):
    pytest.importorskip("libtpu")
    monkeypatch.setitem(presets.PAIRS, "cut", cut(2))
    arguments = ["--target", "cut", "--topology", "v5e:2x2", "--batch-size", "4", "--max-length", "2048"]
    assert plan.main([*arguments, "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["mesh"] == {"data": 1, "fsdp": 1, "expert": 1, "model": 4}
    parts = figures["parts"]
    held = parts["weight_bytes"] + parts["cache_bytes"]  # by arithmetic; norms are not split
    assert figures["argument_bytes"] == pytest.approx(held, rel=0.01)
    assert figures["updated_in_place_bytes"] >= parts["cache_bytes"]
    hidden = 4 * 16 * 4096 * 4
    assert max(c["bytes"] for c in figures["collectives"]) <= 1.1 * hidden
    assert not [c for c in figures["collectives"] if c["kind"] == "all-gather" and c["bytes"] > hidden / 4]
    assert figures["fits"]


PROGRAM = """
%fused (p: bf16[512,1024]) -> bf16[512,1024] {
  %inside = bf16[512,1024]{1,0} negate(%p)
}

%nothing (p: s8[1024]) -> s8[1024] {
  ROOT %p = s8[1024]{0} parameter(0)
}

%filter (p.1: s8[1024]) -> s8[1024] {
  %p.1 = s8[1024]{0} parameter(0)
  ROOT %filtered = s8[1024]{0} negate(%p.1)
}

%body (p.2: s8[1024]) -> s8[1024] {
  %p.2 = s8[1024]{0} parameter(0)
  ROOT %again = s8[1024]{0} conditional(%p.2, %p.2, %p.2), branch_computations={%filter, %nothing}
}

ENTRY %main (a: bf16[512,1024], cache: f32[8,128], s: s8[1024]) -> (bf16[512,1024], f32[8,128]) {
  %a = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %cache = f32[8,128]{1,0:T(8,128)} parameter(1)
  %begun = (bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0}, u32[]{:S(2)}) slice-start(%a), slice={[0:256]}
  %near = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} slice-done(%begun)
  %out = bf16[512,1024]{1,0:T(8,128)(2,1)} fusion(%near, %a), kind=kLoop, calls=%fused
  %kept = f32[8,128]{1,0:T(8,128)} custom-call(%cache), output_to_operand_aliasing={{}: (0, {})}
  %s = s8[1024]{0} parameter(2)
  %greedy = s8[1024]{0} conditional(%s, %s, %s), branch_computations={%nothing, %filter}
  %loop = s8[1024]{0} while(%greedy), condition=%fused, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %both = (bf16[512,1024]{1,0}, f32[8,128]{1,0}) tuple(%out, %kept)
}
"""


def test_memory_traffic_is_read_from_a_programs_text():
    """Half of an array is fetched, a product reads all of it and writes another, and a kernel writes in place. Of a
    condition the first branch counts, and the loop five times."""
    size = 2 * 512 * 1024
    assert memory_bytes(PROGRAM) == size // 2 + 2 * size + 5 * 2 * 1024
    assert memory_bytes(PROGRAM, lambda kind, _: kind == "f32") == 0


@pytest.mark.slow
def test_what_the_parts_of_a_step_move(monkeypatch, capsys, tmp_path):
    """A block reads what a single token does, each weight once, and little besides; commit writes a block's entries."""
    pytest.importorskip("libtpu")
    monkeypatch.setitem(presets.PAIRS, "cut", cut(2))
    arguments = ["--target", "cut", "--topology", "v5e:2x2", "--batch-size", "4", "--max-length", "2048", "--parts"]
    assert plan.main([*arguments, "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    moved = figures["part_bytes"]
    held = figures["parts"]["weight_bytes"]
    assert moved["verify of one token"] < held < moved["step"] == figures["memory_bytes"]  # the drafter's, too
    assert moved["verify"] == pytest.approx(moved["verify of one token"], rel=0.05)
    assert moved["commit"] < 0.03 * moved["verify"]
    # With the chip's own kernels, in the parts as in the step.
    assert moved["step"] == pytest.approx(moved["draft"] + moved["verify"] + moved["commit"], rel=0.1)
    assert "moved by verify of one token" in capsys.readouterr().out
    assert plan.main([*arguments, "--training"]) == 2
    assert "--parts is for a decoding step" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("chips", ["v5e:1x1", "h100:1"])
@pytest.mark.parametrize(("nodes", "share"), [(15, 0.05), (63, 0.1)])
def test_what_choosing_and_walking_a_tree_moves(chips, nodes, share):
    """Beside a chain's draft and acceptance, of a step of Qwen3-4B; the drafter's layers are the same in both."""
    devices = topology(chips)
    raws, sizes = presets.PAIRS["qwen3-4b"], parse_mesh("data=1", devices)
    whole = planning.traced(raws, sizes, 1, 8192, 16)["bytes_accessed"]
    nested = raws[1]["dflash_config"] | {"target_layer_ids": [1]}
    cut = raws[0] | {"num_hidden_layers": 3}, raws[1] | {"num_hidden_layers": 1, "num_target_layers": 3}
    cut[1]["dflash_config"] = nested
    with compiling_for(chips):
        part_bytes = partial(planning.part_bytes, cut, make_mesh(sizes, devices), 1, 8192, 16, dtype="bfloat16")
        tree, chain = (part_bytes(n, names=("draft", "accept")) for n in (nodes, 0))
    assert 0 < sum(tree.values()) - sum(chain.values()) < share * whole


@pytest.mark.parametrize("fitting", [0, 1, 3, 5, 8, 40, 64, 1000])
def test_the_largest_that_fits(fitting):
    tried = []
    found = training_plan.largest(lambda n: tried.append(n) or n <= 4 * fitting, 4)
    most = 4 * min(fitting, 64)
    assert most * 8 / 9 <= found <= most
    assert fitting > 8 or found == most
    assert len(tried) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["v5e:2x2", "h100:1"])
def test_a_training_step_by_its_compiler_and_in_figures(chips, monkeypatch, capsys, tmp_path):
    """Its memory, operations and least time; more than half of the least time are products of the models."""
    topology(chips)
    monkeypatch.setitem(presets.PAIRS, "cut", cut(2))
    given = ["--target", "cut", "--topology", chips, "--training", "--batch-size", "4", "--max-length", "3072"]
    given += ["--row-anchors", "512", "--tokens", "1000000", "--json", str(tmp_path / "f.json")]
    assert plan.main(given) == 0
    shown, figures = capsys.readouterr().out, json.loads((tmp_path / "f.json").read_text())
    devices = figures["devices"]
    raw, draft = presets.PAIRS["cut"]
    width, inner, vocabulary = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    heads = (2 * raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) * raw["head_dim"]
    layer, tapped = width * (heads + 3 * inner), len(draft["dflash_config"]["target_layer_ids"]) * width**2
    trained = draft["num_hidden_layers"] * layer + tapped
    tokens, slots = 4 * 3072, 4 * 512 * 16
    asked = 2 * 2 * layer * tokens + 6 * trained * slots + 4 * width * vocabulary * 4 * 512 * 15
    assert figures["model_flops"] * devices == pytest.approx(asked, rel=1e-3)  # norms
    assert figures["model_flops"] < figures["flops"] < 1.4 * figures["model_flops"]
    assert figures["again"] is False
    assert figures["model_share"] > 0.6
    assert figures["least_step_seconds"] >= figures["flops"] / CHIPS[chips.split(":")[0]].flops
    assert figures["epoch_hours"] == pytest.approx(1e6 / tokens * figures["least_step_seconds"] / 3600)
    assert "layers computed again  no" in shown
    assert "an epoch" in shown
    assert figures["fits"]
