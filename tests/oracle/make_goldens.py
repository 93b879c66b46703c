"""Writes what the drafters of other packages compute, for tests/drafters/test_golden_drafters.py.
It runs once, by hand, in an environment for each package, from the root of the repository:

    pip install torch==2.13.0 transformers==5.15.0 safetensors
    pip install --no-deps specforge==0.2.0 && python -m tests.oracle.make_goldens specforge
    pip install --no-deps angelslim==0.5.0 && python -m tests.oracle.make_goldens angelslim
    pip install --no-deps dflash==0.1.0 && python -m tests.oracle.make_goldens dflash
    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv \
        && python -m tests.oracle.make_goldens speculators
    pip install --no-deps dflash==0.1.0 sglang==0.5.23 && python -m tests.oracle.make_goldens sglang

Nothing of a package is written down but numbers it computes and the config.json it saves. Weights follow from a seed
(tests/oracle/seeded.py).
"""

import importlib
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.oracle import seeded

PLACE = Path(__file__).parents[1] / "golden" / "drafters"
SEED, POSITIONS, BLOCK, WINDOW, STEPS, REDUCED = 3, 13, 7, 6, 3, 40
SHAPE: dict[str, Any] = {
    "vocab_size": seeded.VOCAB,
    "hidden_size": seeded.HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
LAYERS = {"num_target_layers": 8, "block_size": BLOCK}
TAPPED = {"mask_token_id": seeded.MASK, "target_layer_ids": [1, 5]}
Case = tuple[str, torch.nn.Module, dict[str, Any]]  # name, model with its weights, what it computes


def weighted(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights that follow from the seed."""
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made = {name: torch.from_numpy(np.array(value)) for name, value in seeded.tensors(state, SEED).items()}
    model.load_state_dict(made)
    return model.float().eval()


def qwen3(**changes: Any) -> Any:
    config = transformers.Qwen3Config(**SHAPE | LAYERS | {"dflash_config": TAPPED} | changes)
    config._attn_implementation = "eager"
    return config


def block(model: Any, *, causal: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of all slots of a block, [b, H], and the target's head, [V, H]."""
    tokens, features = seeded.inputs(POSITIONS, len(TAPPED["target_layer_ids"]), SEED)
    embedding, head = (torch.from_numpy(x) for x in seeded.target(SEED))
    slots = torch.full((1, BLOCK), seeded.MASK)
    slots[0, 0] = int(tokens[POSITIONS])
    positions = torch.arange(POSITIONS + BLOCK)[None]
    given = {} if causal is None else {"attention_mask": causal}
    hidden = model(
        position_ids=positions, noise_embedding=embedding[slots], target_hidden=torch.from_numpy(features), **given
    )
    return hidden[0], head


def masks(window: int | None) -> torch.Tensor:
    """What slots see of the context and of each other, as SpecForge's trainer masks it (`create_dflash_sdpa_mask`)."""
    slot, key = torch.arange(BLOCK)[:, None] + POSITIONS, torch.arange(POSITIONS + BLOCK)[None]
    seen = torch.ones(BLOCK, POSITIONS + BLOCK, dtype=torch.bool)
    if window is not None:
        seen = (slot - key < window) & (key <= slot)
    return seen[None, None]


def rounded(x: torch.Tensor) -> list:
    return np.round(x.detach().numpy().astype(np.float64), 6).tolist()


def dflash() -> Iterator[Case]:
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    slides = {"use_sliding_window": True, "sliding_window": WINDOW}
    cases: dict[str, tuple[type, dict[str, Any]]] = {
        "full": (DFlashDraftModel, {}),
        "windows of the second layer on": (DFlashDraftModel, slides | {"max_window_layers": 1}),
        "windows of all layers": (DFlashDraftModel, slides | {"max_window_layers": 0}),
        "windows that are not causal": (DFlashDraftModel, slides | {"max_window_layers": 0, "is_causal": False}),
        "windows that begin behind the layers": (DFlashDraftModel, slides),
        "two": (DFlash2DraftModel, {}),
    }
    selector = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    for name, (kind, changes) in cases.items():
        two = kind is DFlash2DraftModel
        config = qwen3(**changes, **({"dflash_config": TAPPED | selector} if two else {}))
        config.architectures = [kind.__name__]
        model: Any = weighted(kind(config))
        hidden, head = block(model)
        found = {"hidden": rounded(hidden[1:]), "logits": rounded(hidden[1:] @ head.T)}
        if two:
            anchor = torch.tensor([int(seeded.inputs(POSITIONS, 2, SEED)[0][POSITIONS])])
            found["tokens"] = model.candidate_selector.select(hidden[None, 1:], (hidden[1:] @ head.T)[None], anchor, 0)[
                0
            ][0].tolist()
        written = {} if "layer_types" in changes or two else {"layer_types": None}
        yield name, model, found | {"config": written}


def specforge() -> Iterator[Case]:
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = qwen3(architectures=["DFlashDraftModel"])
    model: Any = weighted(DFlashDraftModel(config))
    hidden, head = block(model, causal=masks(None))
    yield "dflash", model, {"hidden": rounded(hidden[1:]), "logits": rounded(hidden[1:] @ head.T)}
    for kind in ("vanilla", "gated", "rnn"):
        own = {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": kind, "attention_mode": "gqa"}
        own |= {"confidence_head_alpha": 1.0, "confidence_head_with_markov": kind != "gated"}
        model = weighted(DSparkDraftModel(qwen3(dflash_config=TAPPED | own, architectures=["DSparkDraftModel"])))
        hidden, head = block(model, causal=masks(None))
        anchor = torch.tensor([int(seeded.inputs(POSITIONS, 2, SEED)[0][POSITIONS])])
        base = (hidden @ head.T)[None]
        base[..., seeded.MASK] = -1e9  # ours never proposes it
        chosen, logits = model.markov_head.sample_block_tokens(
            base, first_prev_token_ids=anchor, hidden_states=hidden[None]
        )
        logits[..., seeded.MASK] = 0
        found = {"hidden": rounded(hidden), "corrected": rounded(logits[0]), "tokens": chosen[0].tolist()}
        yield f"dspark {kind}", model, found
    for name, changes in {"eagle3": {}, "eagle3 with norms of taps": {"fc_norm": True}}.items():
        own = SHAPE | {"num_hidden_layers": 1, "draft_vocab_size": REDUCED, "pad_token_id": 0, "decoder_sparse_step": 1}
        config = transformers.LlamaConfig(**own, **changes, architectures=["LlamaForCausalLMEagle3"])
        model = weighted(LlamaForCausalLMEagle3(config))
        yield name, model, eagle(model.project_hidden_states, model.embed_input_ids, model.d2t, _specforge_steps(model))


def _specforge_steps(model: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from specforge.modeling.draft.llama3_eagle import prepare_decoder_attention_mask

    def step(embedded: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = known.shape[1]
        mask = prepare_decoder_attention_mask(torch.ones(1, length, dtype=torch.bool), (1, length), known, 0)
        out = model.backbone(embedded, known, None, mask, torch.arange(length)[None])
        return out, model.compute_logits(out)

    return step


def eagle(
    fuse: Callable[[torch.Tensor], torch.Tensor],
    embed: Callable[[torch.Tensor], torch.Tensor],
    d2t: torch.Tensor,
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    """Logits and greedy tokens of a chain: every pass reads all pairs again.

    Args:
        step: embeddings of tokens and what is known before them, to what is known after them, and the logits.
    """
    tokens, features = seeded.inputs(POSITIONS, 3, SEED)
    known, text = fuse(torch.from_numpy(features)), torch.from_numpy(tokens[1:].copy())[None]
    logits, chosen = [], []
    for _ in range(STEPS):
        out, found = step(embed(text), known)
        logits.append(found[0, -1])
        best = int(found[0, -1].argmax())
        chosen.append(best + int(d2t[best]))
        known, text = torch.cat([known, out[:, -1:]], dim=1), torch.cat([text, torch.tensor([chosen[-1:]])], dim=1)
    return {"logits": rounded(torch.stack(logits)), "tokens": chosen}


def angelslim() -> Iterator[Case]:
    # The wheel lacks a package that `angelslim.compressor` imports at once; the models do not need it.
    spec = importlib.util.find_spec("angelslim")
    assert spec is not None
    assert spec.submodule_search_locations
    root, inside = Path(spec.submodule_search_locations[0]), "angelslim.compressor.speculative.train.models"
    parts = inside.split(".")
    for i in range(len(parts)):
        stub = types.ModuleType(".".join(parts[: i + 1]))
        stub.__path__ = [str(root.joinpath(*parts[1 : i + 1]))]
        sys.modules[stub.__name__] = stub
    blocks = importlib.import_module(f"{inside}.draft.qwen_dflash")
    eagles = importlib.import_module(f"{inside}.draft.llama_eagle3")

    config = qwen3(architectures=["QwenDFlashDraftModel"], attention_backend="eager", target_model_type="qwen3")
    model: Any = weighted(blocks.QwenDFlashDraftModel(config))
    hidden, head = block(model)
    yield "dflash", model, {"hidden": rounded(hidden[1:]), "logits": rounded(hidden[1:] @ head.T)}
    own = SHAPE | {"num_hidden_layers": 1, "draft_vocab_size": REDUCED, "pad_token_id": 0, "pretraining_tp": 1}
    config = transformers.LlamaConfig(**own, target_model_type="qwen3", architectures=["Eagle3LlamaForCausalLM"])
    config.rope_scaling, config.rope_theta = None, SHAPE["rope_theta"]  # as transformers 4 has them
    model = weighted(eagles.Eagle3LlamaForCausalLM(config))

    def step(embedded: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = known.shape[1]
        mask = model.prepare_decoder_attention_mask(torch.ones(1, length, dtype=torch.bool), (1, length), known, 0)
        out, _ = model.encode_layers(embedded, known, [[], []], mask, torch.arange(length)[None], False)
        return out, model.compute_logits(out)

    yield "eagle3", model, eagle(model.combine_hidden_states, model.embed_input_ids, model.d2t, step)


def speculators() -> Iterator[Case]:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    cases: dict[str, dict[str, Any]] = {
        "dflash": {},
        "dspark": {"markov_rank": 6},
        "dspark of masks": {"markov_rank": 6, "sample_from_anchor": False},
    }
    for name, own in cases.items():
        method = GreedyTokenProposalConfig(speculative_tokens=BLOCK)
        verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
        about = {"algorithm": name.split()[0], "proposal_methods": [method], "default_proposal_method": "greedy"}
        layers = transformers.Qwen3Config(**SHAPE)
        layers._attn_implementation = "eager"
        fields: dict[str, Any] = {
            "transformer_layer_config": layers,
            "speculators_config": SpeculatorsConfig(**about, verifier=verifier),
            "draft_vocab_size": seeded.VOCAB,
            "block_size": BLOCK,
            "mask_token_id": seeded.MASK,
            "aux_hidden_state_layer_ids": [2, 6],
        }
        kind, config = (DSparkDraftModel, DSparkSpeculatorConfig) if own else (DFlashDraftModel, DFlashSpeculatorConfig)
        model: Any = weighted(kind(config(**fields, **own)))
        embedding, head = seeded.target(SEED)
        with torch.no_grad():
            model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
            model.lm_head.weight.copy_(torch.from_numpy(head))
        tokens, features = seeded.inputs(POSITIONS, 2, SEED)
        length = POSITIONS + BLOCK + 2  # an anchor too near the end of the row is dropped
        text = torch.zeros(1, length, dtype=torch.long)
        text[0, : POSITIONS + 1] = torch.from_numpy(tokens)
        seen = torch.zeros(1, length, features.shape[-1])
        seen[0, :POSITIONS] = torch.from_numpy(features[0])
        anchors = torch.zeros(1, length)
        anchors[0, POSITIONS] = 1
        given = seen, text, anchors, torch.zeros(1, length, seeded.HIDDEN), torch.zeros(1, length, dtype=torch.long)
        hidden, logits = model._backbone_forward(*given, max_anchors=1)[:2]
        predicts = slice(0 if model.config.sample_from_anchor else 1, None)
        yield name, model, {"hidden": rounded(hidden[0, predicts]), "logits": rounded(logits[0, predicts])}


class _Linear(torch.nn.Linear):
    """SGLang's linear layers, on one device: they return a bias beside the product."""

    def __init__(self, inputs: int, outputs: int, **_: Any):
        super().__init__(inputs, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def _sglang_heads() -> Any:
    """SGLang's `models/lilicorr.py`, whose layers of the server are plain ones here."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    nothing = dict.fromkeys(
        ("get_fp4_gemm_runner_backend", "ModelOptFp4LinearMethod", "ModelOptNvFp4A16LinearMethod", "get_parallel")
    )
    given: dict[str, Any] = {"RMSNorm": torch.nn.RMSNorm, "ReplicatedLinear": _Linear, "LinearBase": _Linear, **nothing}
    given |= {"DFlashDraftModel": torch.nn.Module, "LiLiCorrConfig": object, "parse_lilicorr_draft_config": None}
    given |= {"lilicorr_sample_path": None, "add_prefix": lambda name, prefix: f"{prefix}.{name}"}
    stubs = """
        kernels.ops.speculative.lilicorr srt.layers.layernorm srt.layers.linear srt.layers.quantization.fp4_utils
        srt.layers.quantization.modelopt_quant srt.models.dflash srt.runtime_context srt.speculative.lilicorr_utils
        srt.utils
    """
    for name in stubs.split():
        stub = types.ModuleType(f"sglang.{name}")
        stub.__dict__.update(given)
        sys.modules[stub.__name__] = stub
    path = Path(spec.submodule_search_locations[0]) / "srt" / "models" / "lilicorr.py"
    found = importlib.util.spec_from_file_location("lilicorr", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def sglang() -> Iterator[Case]:
    """LiLiCorr: layers of the official package, and SGLang's head."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    own = {"candidate_topk": 4, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 12}
    own |= {"vector_eps": 1e-4, "logit_scale": 8.0}
    convolved = {"conv_kernel_size": 2, "conv_group_size": 8}
    cases = {"lilicorr": (0, {}), "lilicorr with convolutions": (24, convolved)}
    for name, (width, conv) in cases.items():
        selector = {"selector_rank": 6, "selector_top_k": 4} if conv else {}
        kind = DFlash2DraftModel if conv else DFlashDraftModel
        model: Any = kind(qwen3(dflash_config=TAPPED | conv | selector))
        if conv:
            del model.candidate_selector
        fields = own | {"hidden_size": width}
        shape = types.SimpleNamespace(
            **fields, resolve_hidden_size=lambda model_hidden_size, w=width: w or model_hidden_size
        )
        given = {"model_hidden_size": seeded.HIDDEN, "block_size": BLOCK, "rms_norm_eps": SHAPE["rms_norm_eps"]}
        model.lilicorr = _sglang_heads().LiLiCorrHead(**given, config=shape)
        model.config.dflash_config = TAPPED | conv | {"projector_type": "lilicorr", "lilicorr_enabled": True}
        model.config.dflash_config |= {f"lilicorr_{field}": value for field, value in fields.items()}
        hidden, head = block(weighted(model))
        logits = hidden[1:] @ head.T
        likely = torch.log_softmax(logits, dim=-1)
        likely[:, seeded.MASK] = -torch.inf  # ours never proposes it
        likely, ids = torch.topk(likely, own["candidate_topk"], dim=-1)
        features = torch.from_numpy(seeded.inputs(POSITIONS, 2, SEED)[1])
        model.lilicorr.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        scores = model.lilicorr.score(
            token_embeddings=torch.from_numpy(seeded.target(SEED)[0])[ids][None, None],
            candidate_log_probs=likely[None, None],
            pass_hidden=hidden[None, None, 1:],
            anchor_hidden=model.hidden_norm(model.fc(features))[:, -1:],
            anchor_valid=torch.ones(1, 1, dtype=torch.bool),
        )
        first, pairs = (x[0, 0] for x in model.lilicorr.log_factors(*scores))
        path = [int(first.argmax())]
        for after in pairs:
            path.append(int(after[path[-1]].argmax()))
        found = {"hidden": rounded(hidden[1:]), "logits": rounded(logits), "first": rounded(first)}
        tokens = [int(ids[slot, place]) for slot, place in enumerate(path)]
        found |= {"pairs": rounded(pairs), "tokens": tokens, "config": {"architectures": ["LiLiCorrDraftModel"]}}
        yield name, model, found


def write(package: str, name: str, model: Any, found: dict[str, Any]) -> None:
    """One golden: what was saved of the model without its numbers, and what it computes."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        raw = json.loads((Path(place) / "config.json").read_text())
        with safe_open(f"{place}/model.safetensors", "numpy") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for tensor, made in seeded.tensors(shapes, SEED).items():
                np.testing.assert_array_equal(file.get_tensor(tensor), made, err_msg=tensor)
    raw |= found.pop("config", {})
    about = {each: version(each) for each in (package, "torch", "transformers")}
    golden = {"versions": about, "seed": SEED, "positions": POSITIONS, "block": BLOCK, "config": raw, "tensors": shapes}
    path = PLACE / f"{package} {name}.json".replace(" ", "_")
    path.write_text(json.dumps(golden | found, separators=(",", ":")) + "\n")
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    made = {"dflash": dflash, "specforge": specforge, "angelslim": angelslim}
    made |= {"speculators": speculators, "sglang": sglang}
    with torch.inference_mode():
        for case in made[sys.argv[1]]():
            write(sys.argv[1], *case)
