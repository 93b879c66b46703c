"""Drafters of DSpark and EAGLE-3, and DFlash's in the same format, against the `speculators` library 0.9.0 in torch.

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv

(It works without the torchvision and torchaudio that it asks for; those of PyPI do not load beside a torch for CPUs.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("speculators")

from speculators import SpeculatorModel  # noqa: E402
from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.dflash import DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dflash.core import DFlashDraftModel  # noqa: E402
from speculators.models.dspark import DSparkSpeculatorConfig  # noqa: E402
from speculators.models.dspark.core import DSparkDraftModel  # noqa: E402
from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

from dflash_jax import generate, load_drafter, load_target, spec_generate  # noqa: E402
from dflash_jax.decoding.state import Query, Seen  # noqa: E402
from dflash_jax.train.config import TrainConfig  # noqa: E402
from dflash_jax.train.drafters import new_drafter, save_speculators  # noqa: E402
from tests.oracle.families import MASK, VOCAB, prompts, randomise  # noqa: E402
from tests.oracle.test_parity import SHAPE, make_target  # noqa: E402
from tests.tiny import choice_of  # noqa: E402

BLOCK, REDUCED = 7, 40
ROUNDS = (13, 1, 8, 3, 5)


def _common(name, model_type="qwen3", layers=2, **rope):
    kind = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[model_type]
    rope = {"rope_theta": 10000.0, **rope}
    config = kind(**SHAPE | {"num_hidden_layers": layers, "attention_bias": False}, **rope)
    config._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=BLOCK)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    about = SpeculatorsConfig(
        algorithm=name, proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )
    return {"transformer_layer_config": config, "speculators_config": about}


def _with_vocabulary(drafter, their_target):
    """Random weights, but for what is the target's; a reduced vocabulary is every other token or so."""
    randomise(drafter, 1).eval()
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(their_target.model.embed_tokens.weight)
        if drafter.d2t is None:
            drafter.lm_head.weight.copy_(their_target.lm_head.weight)
        else:
            chosen = np.sort(np.random.default_rng(2).permutation(MASK)[:REDUCED])
            drafter.d2t.copy_(torch.tensor(chosen - np.arange(REDUCED)))
            drafter.t2d.zero_()
            drafter.t2d[chosen] = True
    return drafter


def make_block_drafter(directory, their_target, *, vocabulary=VOCAB, **own):
    kind, config = (DSparkDraftModel, DSparkSpeculatorConfig) if own else (DFlashDraftModel, DFlashSpeculatorConfig)
    fields = {
        **_common("dspark" if own else "dflash"),
        "draft_vocab_size": vocabulary,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 3],
    }
    drafter = _with_vocabulary(kind(config(**fields, **own)), their_target)
    drafter.save_pretrained(directory)
    return drafter


BLOCK_DRAFTERS = {
    "dflash": {},
    "dflash, reduced vocabulary": {"vocabulary": REDUCED},
    "vanilla": {"markov_rank": 6},
    "vanilla, reduced vocabulary": {"markov_rank": 6, "vocabulary": REDUCED},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "rnn, reduced vocabulary": {"markov_rank": 6, "markov_head_type": "rnn", "vocabulary": REDUCED},
    "masks predict": {"markov_rank": 6, "sample_from_anchor": False},
    "rnn, masks predict": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False},
    "no head": {"markov_rank": 0, "enable_confidence_head": False},
}


@torch.inference_mode()
def their_proposals(drafter, tokens, features, anchor):
    """Hidden states of the predicting slots, and greedy tokens (ids of the target)."""
    length = tokens.shape[1]
    mask = torch.zeros(1, length)
    mask[0, anchor] = 1
    inputs = features, tokens, mask, torch.zeros(1, length, 32), torch.zeros(1, length, dtype=torch.long)
    hidden, logits = drafter._backbone_forward(*inputs, max_anchors=1)[:2]
    predicts = slice(0 if drafter.config.sample_from_anchor else 1, None)
    head = getattr(drafter, "markov_head", None)
    previous = torch.full((1, BLOCK), int(tokens[0, anchor]))
    chosen = []
    for slot in range(BLOCK)[predicts]:
        scores = logits[0, slot].clone()
        if head is not None:
            scores += head.block_bias(prev_token_ids=previous, hidden_states=hidden.view(1, BLOCK, -1))[0, slot]
        if drafter.d2t is None:
            scores[MASK] = -torch.inf  # ours never proposes it
        best = int(scores.argmax())
        chosen.append(best + (0 if drafter.d2t is None else int(drafter.d2t[best])))
        if slot + 1 < BLOCK:
            previous[0, slot + 1] = chosen[-1]
    return hidden[0, predicts].numpy(), chosen


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_block_drafters_over_rounds(name, tmp_path):
    their_target = make_target(tmp_path / "target")
    theirs = make_block_drafter(tmp_path / "drafter", their_target, **BLOCK_DRAFTERS[name])
    check_rounds(load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter"), theirs)


@pytest.mark.parametrize("vocabulary", [VOCAB, REDUCED])
def test_the_library_reads_what_we_export(vocabulary, tmp_path):
    """A drafter of ours in its layout, and the target whose embedding and head it takes."""
    make_target(tmp_path / "target")
    target = load_target(tmp_path / "target")
    chosen = None if vocabulary == VOCAB else np.sort(np.random.default_rng(2).permutation(MASK)[:vocabulary]).tolist()
    settings = TrainConfig(block_size=BLOCK, num_layers=2, target_layer_ids=(0, 2))
    ours, raw = new_drafter(target, settings, MASK, chosen)
    save_speculators(tmp_path / "drafter", ours, raw | {"target_model_name_or_path": str(tmp_path / "target")})
    theirs = SpeculatorModel.from_pretrained(tmp_path / "drafter", attn_implementation="eager").eval()
    assert type(theirs) is DFlashDraftModel
    assert theirs.config.speculators_config.verifier.architectures == ["Qwen3ForCausalLM"]
    check_rounds(target, load_drafter(tmp_path / "drafter"), theirs)


def check_rounds(target, ours, theirs):
    """Both propose the same, one round after another."""
    rng, length = np.random.default_rng(0), sum(ROUNDS) + BLOCK + 2
    tokens, features = rng.integers(0, MASK, (1, length)), rng.standard_normal((1, length, 64)).astype(np.float32)
    state, at = ours.init_state(1, 64), 0
    propose = jax.jit(lambda state, query: ours.propose(target, state, query, choice_of(1, BLOCK, VOCAB)).tokens)
    for count in ROUNDS:
        seen = slice(at, at + count)
        positions = jnp.arange(at, at + count)[None]
        where = positions, jnp.asarray([at]), jnp.asarray([count])
        state = ours.commit(target, state, Seen(jnp.asarray(tokens[:, seen]), jnp.asarray(features[:, seen]), *where))
        at += count
        hidden, chosen = their_proposals(theirs, torch.tensor(tokens), torch.tensor(features), at)
        anchor, lengths = jnp.asarray(tokens[0, at : at + 1]), jnp.asarray([at])
        query = Query(anchor, lengths, BLOCK)
        slots = ours.denoise(target, state, query)[0, -len(hidden) :]
        np.testing.assert_allclose(slots, hidden, atol=1e-4)
        assert propose(state, query)[0].tolist() == chosen


def make_eagle3(directory, their_target, model_type="llama", vocabulary=REDUCED, **own):
    fields = _common("eagle3", model_type, layers=1) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = Eagle3SpeculatorConfig(**fields, draft_vocab_size=vocabulary, **own)
    drafter = _with_vocabulary(Eagle3DraftModel(config), their_target)
    with torch.no_grad():
        if vocabulary != VOCAB:
            drafter.lm_head.weight.normal_()
    drafter.save_pretrained(directory)
    return drafter


EAGLES = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "whole vocabulary": {"vocabulary": VOCAB},
    "norm before residual": {"norm_before_residual": True, "norm_before_fc": True},
    "3.1": {"fc_norm": True, "norm_output": True, "model_type": "qwen3"},
}


class TheirEagle:
    """Chain drafting with the torch layer and a cache of its own."""

    def __init__(self, drafter):
        self.drafter, self.cache = drafter, transformers.DynamicCache()

    @torch.inference_mode()
    def extend(self, features, tokens):
        """Reads (feature, next token) pairs; returns the last one's state."""
        d = self.drafter
        if d.input_norm is not None:
            features = d.input_norm(features)
        if d.fc_norm is not None:
            parts = features.chunk(len(d.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(d.fc_norm, parts, strict=True)], dim=-1)
        return self._read(d.fc(features), tokens)

    def _read(self, known, tokens):
        d, before, count = self.drafter, self.cache.get_seq_length(), tokens.shape[1]
        positions = torch.arange(before, before + count)[None]
        x = torch.cat([d.embed_tokens(tokens), known], dim=-1)
        mask = torch.full((count, before + count), -torch.inf).triu(before + 1)[None, None]
        x = d.layers[0](
            x,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            cache_position=positions[0],
            position_embeddings=d.rotary_emb(x, positions),
        )
        return d.norm(x) if d.config.norm_output else x

    @torch.inference_mode()
    def propose(self, features, tokens, count):
        d, before = self.drafter, self.cache.get_seq_length() + tokens.shape[1]
        known, chosen, hidden = self.extend(features, tokens)[:, -1:], [], []
        for _ in range(count):
            hidden.append((known if d.config.norm_output else d.norm(known))[0, 0].numpy())
            best = int(d.lm_head(torch.tensor(hidden[-1])).argmax())
            chosen.append(best + (0 if d.d2t is None else int(d.d2t[best])))
            known = self._read(known, torch.tensor([chosen[-1:]]))
        self.cache.crop(before)
        return np.stack(hidden), chosen


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_over_rounds(name, tmp_path):
    their_target = make_target(tmp_path / "target")
    theirs = TheirEagle(make_eagle3(tmp_path / "drafter", their_target, **EAGLES[name]))
    target, ours = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter", num_target_layers=4)
    assert ours.taps == (0, 1, 2)
    rng, length = np.random.default_rng(0), sum(ROUNDS) + 1
    tokens, features = rng.integers(0, MASK, (1, length)), rng.standard_normal((1, length, 96)).astype(np.float32)
    state, at = ours.init_state(1, 64), 0
    propose = jax.jit(lambda state, query: ours.propose(target, state, query, choice_of(1, BLOCK, VOCAB)).tokens)
    for count in ROUNDS:
        seen = slice(at, at + count)
        where = jnp.arange(at, at + count)[None], jnp.asarray([at]), jnp.asarray([count])
        state = ours.commit(target, state, Seen(jnp.asarray(tokens[:, seen]), jnp.asarray(features[:, seen]), *where))
        pairs = torch.tensor(features[:, seen]), torch.tensor(tokens[:, at + 1 : at + count + 1])
        hidden, chosen = theirs.propose(*pairs, BLOCK)
        at += count
        anchor, lengths = jnp.asarray(tokens[0, at : at + 1]), jnp.asarray([at])
        first, _, _ = ours.forward(target, state.feature[:, None], anchor[:, None], state, lengths - 1, None)
        np.testing.assert_allclose(first[0, 0], hidden[0], atol=1e-4)
        assert propose(state, Query(anchor, lengths, BLOCK + 1))[0].tolist() == chosen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_the_output_never_depends_on_the_drafter(name, temperature, tmp_path):
    their_target = make_target(tmp_path / "target")
    make = {"eagle3": make_eagle3, "dspark": make_block_drafter}[name]
    own = {"dspark": {"markov_rank": 6, "vocabulary": REDUCED}}
    make(tmp_path / "drafter", their_target, **own.get(name, {}))
    target, drafter = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    assert (
        spec_generate(target, drafter, prompts(), **settings).tokens == generate(target, prompts(), **settings).tokens
    )
