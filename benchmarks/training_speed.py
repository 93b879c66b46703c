"""Training steps of this project beside a plain torch loop, in turns on the same rows in one process.

    python -m benchmarks.training_speed --target DIR --data answers.jsonl --drafter dflash

Torch trains the official class of a DFlash drafter, or for "eagle3" the class of `speculators` 0.9.0 with its attention
by sdpa (see tests/oracle/test_speculators.py for what to install). Both sides compute the features of the target, read
the same packed rows and as many blocks or passes, and update with AdamW, in float32.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers

from dflash_jax.config import Raw
from dflash_jax.drafters.base import Drafter
from dflash_jax.infer.engine.compiler_options import block_compiler_options
from dflash_jax.infer.interrupt import exit_quietly
from dflash_jax.parsing import parse
from dflash_jax.target import Target, load_target
from dflash_jax.train.config import TrainConfig, make_config
from dflash_jax.train.data import Packing, Rows, read_examples
from dflash_jax.train.drafters import choose_mask_token, new_drafter
from dflash_jax.train.step import Batch, init_state, train_step

EAGLE3 = {"cross_entropy": 0.0, "kl": 1.0, "block_size": 8, "num_layers": 1}  # as `speculators` trains it


@dataclass(frozen=True)
class SpeedOptions:
    """Options of `python -m benchmarks.training_speed`.

    Attributes:
        target: directory of the target
        data: answers of it, as `train regenerate` writes them
        drafter: what both sides train
        layers: of a dflash drafter
        rows: of 512 tokens, in a step
        blocks: of a row, for dflash; eagle3 begins at every token
        steps: of each side; one more warms up
    """

    target: str
    data: str
    drafter: Literal["dflash", "eagle3"] = "dflash"
    layers: int = 4
    rows: int = 6
    blocks: int = 64
    steps: int = 8


class TorchLoop:
    """A torch module and its optimizer, beside the target whose features it reads.

    Args:
        directory: of the target.
        taps: layers whose outputs are the features.
        drafter: the module to train.
    """

    def __init__(self, directory: str, taps: Sequence[int], drafter: torch.nn.Module):
        self.target = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.head = self.target.lm_head.weight.detach()
        self.taps, self.drafter = taps, drafter.float().train()
        learnt = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learnt, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def features(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, S, FD] and final hidden states [B, S, D]; a position sees its document alone."""
        tokens, starts = torch.tensor(rows.tokens, dtype=torch.long), torch.tensor(rows.starts)
        place = torch.arange(tokens.shape[1])
        seen = (place[None, None] <= place[None, :, None]) & (place[None, None] >= starts[:, :, None])
        out = self.target.model(tokens, attention_mask=seen[:, None], output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[i + 1] for i in self.taps], -1), out.last_hidden_state

    def update(self, loss: torch.Tensor) -> float:
        """Takes the step whose gradients are there."""
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class DFlashInTorch(TorchLoop):
    """The official class, trained on random blocks of the rows with a cross-entropy that decays over a block."""

    def __init__(self, directory: str, raw: Raw, blocks: int):
        from dflash.model import DFlashDraftModel

        fields = {name: value for name, value in raw.items() if name not in ("architectures", "dtype")}
        config = transformers.Qwen3Config(**fields)
        config.architectures, config._attn_implementation = ["DFlashDraftModel"], "sdpa"
        nested = raw["dflash_config"]
        super().__init__(directory, nested["target_layer_ids"], DFlashDraftModel(config))
        self.mask, self.block, self.blocks = nested["mask_token_id"], raw["block_size"], blocks
        self.rng = np.random.default_rng(0)
        self.decay = torch.exp(-torch.arange(self.block - 1) / 7.0)

    def step(self, rows: Rows) -> float:
        features, _ = self.features(rows)
        (count, length), size = rows.tokens.shape, self.block
        tokens, starts = torch.tensor(rows.tokens, dtype=torch.long), torch.tensor(rows.starts, dtype=torch.long)
        answers = [np.flatnonzero(row[:-size]) for row in rows.supervised]
        drawn = [self.rng.choice(places, self.blocks, len(places) < self.blocks) for places in answers]
        anchors = torch.tensor(np.sort(drawn))
        positions = anchors[:, :, None] + torch.arange(size)
        labels = tokens.gather(1, positions.flatten(1)).view_as(positions)
        noisy = torch.full_like(labels, self.mask)
        noisy[:, :, 0] = labels[:, :, 0]
        begin = starts.gather(1, anchors)
        place = torch.arange(length)[None, None]
        context = ((place < anchors[:, :, None]) & (place >= begin[:, :, None])).repeat_interleave(size, 1)
        itself = torch.block_diag(*[torch.ones(size, size)] * self.blocks).bool()[None].expand(count, -1, -1)
        out = self.drafter(
            position_ids=torch.cat([torch.arange(length)[None].expand(count, -1), positions.flatten(1)], 1),
            noise_embedding=self.target.get_input_embeddings()(noisy.flatten(1)).detach(),
            target_hidden=features,
            attention_mask=torch.cat([context, itself], -1)[:, None],
        )
        hidden = out.view(*positions.shape, -1)[:, :, 1:]
        logits = F.linear(hidden, self.head)
        same = starts.gather(1, positions.flatten(1)).view_as(positions) == begin[:, :, None]
        weight = self.decay * same[:, :, 1:]
        losses = F.cross_entropy(logits.flatten(0, 2), labels[:, :, 1:].flatten(), reduction="none")
        loss = (losses.view_as(weight) * weight).sum() / weight.sum()
        loss.backward()
        return self.update(loss)


class Eagle3InTorch(TorchLoop):
    """Training-time test as `speculators` has it, row by row, against the target's own distribution."""

    def __init__(self, directory: str, raw: Raw, passes: int):
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
        layer = transformers.Qwen3Config(**{name: raw[name] for name in names.split()}, num_hidden_layers=1)
        layer._attn_implementation = "sdpa"
        about = SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=passes)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        )
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer, speculators_config=about, draft_vocab_size=raw["vocab_size"]
        )
        drafter = Eagle3DraftModel(config)
        super().__init__(directory, raw["target_layer_ids"], drafter)
        drafter.embed_tokens.weight.data.copy_(self.target.model.embed_tokens.weight.detach())
        drafter.lm_head.weight.data.copy_(self.head)
        drafter.verifier_lm_head.weight.data.copy_(self.head)
        drafter.lm_head.weight.requires_grad_(False)  # ours trains neither table nor head
        drafter.verifier_norm = torch.nn.Identity()  # transformers returns normed states
        self.passes, self.loss = passes, resolve_loss_config("kl_div", "eager")  # the others need Triton

    def step(self, rows: Rows) -> float:
        features, last = self.features(rows)
        loss = torch.zeros(())
        for row in range(len(rows.tokens)):
            _, one, _ = self.drafter(
                features[row : row + 1, :-1],
                torch.tensor(rows.tokens[row : row + 1, 1:], dtype=torch.long),
                torch.tensor(rows.starts[row : row + 1, 1:], dtype=torch.long),
                torch.tensor(rows.supervised[row : row + 1, 1:]),
                verifier_last_hidden_states=last[row : row + 1, 1:],
                ttt_steps=self.passes,
                loss_config=self.loss,
            )
            (one / len(rows.tokens)).backward()
            loss += one.detach() / len(rows.tokens)
        return self.update(loss)


def settings(options: SpeedOptions) -> TrainConfig:
    """What this side trains with, as `train fit` takes it."""
    eagle = options.drafter == "eagle3"
    blocks = 512 if eagle else options.blocks
    given = {"drafter": options.drafter, "num_layers": options.layers, "dtype": "float32", "remat": False}
    given |= {"length": 512, "anchors": blocks, "row_anchors": blocks, "loss_chunk": 1024}
    given |= {"batch_size": options.rows, "accumulate": options.rows}
    return make_config({**given, **(EAGLE3 if eagle else {})})


def timed_in_turns(
    target: Target,
    drafter: Drafter,
    theirs: DFlashInTorch | Eagle3InTorch,
    packing: Packing,
    config: TrainConfig,
    steps: int,
) -> dict[str, list[float]]:
    """Seconds of every step of both sides on the same rows; the first of each compiles or warms up."""
    step = jax.jit(partial(train_step, config, steps + 1), donate_argnums=2, compiler_options=block_compiler_options())
    state, seconds = init_state(drafter, config, steps + 1), {"dflash_jax": [], "torch": []}
    for number in range(steps + 1):
        rows = packing.batch(number)
        batch = Batch(*map(jnp.asarray, rows))
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(target, drafter, state, batch))
        seconds["dflash_jax"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        theirs.step(rows)
        seconds["torch"].append(time.perf_counter() - begin)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    options = parse(SpeedOptions, argv, prog="python -m benchmarks.training_speed", description=description)
    config, target = settings(options), load_target(options.target, dtype="float32")
    examples = read_examples(options.data, config.length, target.config.vocab_size).examples
    drafter, raw = new_drafter(target, config, choose_mask_token(target, None))
    if options.drafter == "eagle3":
        theirs = Eagle3InTorch(options.target, raw, config.block_size - 1)
    else:
        theirs = DFlashInTorch(options.target, raw, options.blocks)
    packing = Packing(examples, config.length, config.batch_size, config.seed)
    seconds = timed_in_turns(target, drafter, theirs, packing, config, options.steps)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    figures = {name: round(1 / median, 4) for name, median in medians.items()}
    print(json.dumps({"steps_per_second": figures, "ratio": round(medians["torch"] / medians["dflash_jax"], 3)}))
    return 0


if __name__ == "__main__":
    exit_quietly(main())
