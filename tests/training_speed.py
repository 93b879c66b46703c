"""Training steps of this project beside a plain torch loop, in turns on the same rows in one process.

    python -m tests.training_speed --target DIR --data answers.jsonl --drafter dflash

Torch trains the official class of a DFlash drafter, or for "eagle3" the class of `speculators` 0.9.0 with its attention
by sdpa (see tests/oracle/test_speculators.py for what to install). Both sides compute the features of the target, read
the same packed rows and as many blocks or passes, and update with AdamW, in float32.
"""

import argparse
import json
import statistics
import tempfile
import time

import jax
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers

from dflash_jax import load_target
from dflash_jax.train.config import make_config
from dflash_jax.train.data import Rows, read_examples
from dflash_jax.train.drafters import choose_mask_token, new_drafter
from dflash_jax.train.opening import open_run


class TorchLoop:
    """What both torch loops share.

    Args:
        directory: of the target.
        taps: layers whose outputs are the features.
        drafter: the module to train.
    """

    def __init__(self, directory, taps, drafter):
        self.target = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.taps, self.drafter = taps, drafter.float().train()
        learnt = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learnt, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def features(self, rows: Rows):
        """Features, final hidden states, and what a position sees of its document, [B, 1, S, S]."""
        tokens, starts = torch.tensor(rows.tokens, dtype=torch.long), torch.tensor(rows.starts)
        place = torch.arange(tokens.shape[1])
        seen = (place[None, None] <= place[None, :, None]) & (place[None, None] >= starts[:, :, None])
        out = self.target.model(tokens, attention_mask=seen[:, None], output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[i + 1] for i in self.taps], -1), out.last_hidden_state, seen

    def update(self, loss):
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class DFlashInTorch(TorchLoop):
    """Blocks drawn from the rows, cross-entropy that decays over a block."""

    def __init__(self, directory, raw, blocks):
        from dflash.model import DFlashDraftModel

        fields = {name: value for name, value in raw.items() if name not in ("architectures", "dtype")}
        config = transformers.Qwen3Config(**fields)
        config.architectures, config._attn_implementation = ["DFlashDraftModel"], "sdpa"
        own = raw["dflash_config"]
        super().__init__(directory, own["target_layer_ids"], DFlashDraftModel(config))
        self.mask, self.block, self.blocks = own["mask_token_id"], raw["block_size"], blocks
        self.rng = np.random.default_rng(0)
        self.decay = torch.exp(-torch.arange(self.block - 1) / 7.0)

    def step(self, rows: Rows):
        features, _, _ = self.features(rows)
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
        own = torch.block_diag(*[torch.ones(size, size)] * self.blocks).bool()[None].expand(count, -1, -1)
        out = self.drafter(
            position_ids=torch.cat([torch.arange(length)[None].expand(count, -1), positions.flatten(1)], 1),
            noise_embedding=self.target.get_input_embeddings()(noisy.flatten(1)).detach(),
            target_hidden=features,
            attention_mask=torch.cat([context, own], -1)[:, None],
        )
        hidden = out.view(*positions.shape, -1)[:, :, 1:]
        logits = F.linear(hidden, self.target.get_output_embeddings().weight.detach())
        same = starts.gather(1, positions.flatten(1)).view_as(positions) == begin[:, :, None]
        weight = self.decay * same[:, :, 1:]
        losses = F.cross_entropy(logits.flatten(0, 2), labels[:, :, 1:].flatten(), reduction="none")
        loss = (losses.view_as(weight) * weight).sum() / weight.sum()
        loss.backward()
        return self.update(loss)


class Eagle3InTorch(TorchLoop):
    """Training-time test as `speculators` has it, row by row, against the target's own distribution."""

    def __init__(self, directory, raw, passes):
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
        super().__init__(directory, raw["target_layer_ids"], Eagle3DraftModel(config))
        drafter, table = self.drafter, self.target.get_input_embeddings().weight.detach()
        drafter.embed_tokens.weight.data.copy_(table)
        head = self.target.get_output_embeddings().weight.detach()
        drafter.lm_head.weight.data.copy_(head)
        drafter.verifier_lm_head.weight.data.copy_(head)
        drafter.lm_head.weight.requires_grad_(False)  # ours trains neither table nor head
        drafter.verifier_norm = torch.nn.Identity()  # transformers returns normed states
        self.passes, self.loss = passes, resolve_loss_config("kl_div", "eager")  # the others need Triton

    def step(self, rows: Rows):
        features, last, _ = self.features(rows)
        loss = 0.0
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--drafter", choices=["dflash", "eagle3"], default="dflash")
    parser.add_argument("--layers", type=int, default=4, help="of a dflash drafter")
    parser.add_argument("--rows", type=int, default=6, help="of 512 tokens, in a step")
    parser.add_argument("--blocks", type=int, default=64, help="of a row, for dflash; eagle3 begins at every token")
    parser.add_argument("--steps", type=int, default=8, help="of each side; one more warms up")
    options = parser.parse_args()
    eagle = options.drafter == "eagle3"
    blocks = 512 if eagle else options.blocks
    loss = {"cross_entropy": 0.0, "kl": 1.0, "block_size": 8, "num_layers": 1}
    config = make_config(
        {
            "drafter": options.drafter,
            "num_layers": options.layers,
            "length": 512,
            "anchors": blocks,
            "row_anchors": blocks,
            "batch_size": options.rows,
            "accumulate": options.rows,
            "loss_chunk": 1024,
            "remat": False,
            "dtype": "float32",
            **(loss if eagle else {}),
        }
    )
    target = load_target(options.target, dtype="float32")
    examples = read_examples(options.data, config.length, target.config.vocab_size).examples
    drafter, raw = new_drafter(target, config, choose_mask_token(target, None))
    if eagle:
        theirs = Eagle3InTorch(options.target, raw, config.block_size - 1)
    else:
        theirs = DFlashInTorch(options.target, raw, options.blocks)
    seconds = {"dflash_jax": [], "torch": []}
    with tempfile.TemporaryDirectory() as directory:
        run = open_run(directory, target, drafter, raw, examples, config)
        for step in range(options.steps + 1):
            batch, rows = run.batch(step), run.packing.rows(run.packing.contents(step))
            begin = time.perf_counter()
            run.state, _ = jax.block_until_ready(run._step(run.target, run.drafter, run.state, batch))
            seconds["dflash_jax"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            theirs.step(rows)
            seconds["torch"].append(time.perf_counter() - begin)
        run.checkpoints.close()
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    figures = {name: round(1 / each, 4) for name, each in medians.items()}
    print(json.dumps({"steps_per_second": figures, "ratio": round(medians["torch"] / medians["dflash_jax"], 3)}))


if __name__ == "__main__":
    main()
