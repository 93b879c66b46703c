"""A drafter trained here is loaded by the official implementation and accepted there as it is here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
model = pytest.importorskip("dflash.model")

from dflash_jax import load_drafter, load_target, spec_generate  # noqa: E402
from dflash_jax.train.config import TrainConfig  # noqa: E402
from dflash_jax.train.data import Example, Packing  # noqa: E402
from dflash_jax.train.drafters import new_drafter, save_drafter  # noqa: E402
from dflash_jax.train.step import Batch, init_state, train_step  # noqa: E402
from tests.oracle.test_parity import MASK, TARGETS, _on_cpu, make_target, prompts  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", pytest.param("yarn", marks=pytest.mark.exhaustive)])
def test_exported_drafters_decode_alike(name, tmp_path):
    their_target = make_target(tmp_path / "target", **TARGETS[name])
    target, budget = load_target(tmp_path / "target"), 40
    answers = spec_generate(target, None, prompts(), max_new_tokens=budget, stop_token_ids=[]).tokens
    examples = [
        Example(np.asarray(prompt + answer, np.int32), np.arange(len(prompt) + budget) >= len(prompt))
        for prompt, answer in zip(prompts(), answers, strict=True)
    ]
    config = TrainConfig(
        block_size=8, num_layers=2, length=64, anchors=24, batch_size=3, learning_rate=2e-3, remat=False
    )
    drafter, raw = new_drafter(target, config, MASK)
    state, packing = init_state(drafter, config, 120), Packing(examples, 64, 3, 0)
    step = jax.jit(partial(train_step, config, 120), donate_argnums=2)
    for i in range(120):
        state, _ = step(target, drafter, state, Batch(*map(jnp.asarray, packing.batch(i))))
    save_drafter(tmp_path / "drafter", drafter.replace(params=state.params), raw)
    ours = spec_generate(
        target, load_drafter(tmp_path / "drafter"), prompts(), max_new_tokens=budget, stop_token_ids=[]
    )
    assert ours.tokens == answers
    their_drafter = model.DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    compared = []
    for row, prompt in enumerate(prompts()):
        theirs = model.dflash_generate(
            their_drafter, their_target, torch.tensor([prompt]), budget, [], block_size=8, return_stats=_on_cpu()
        )
        assert theirs.output_ids[0, len(prompt) :].tolist() == answers[row]
        begins = 1 + np.cumsum([0, *theirs.acceptance_lengths[:-1]])
        whole = int(np.sum(begins + 8 <= budget))  # nearer to the budget the official loop narrows its block
        assert ours.acceptance_lengths[row][:whole] == theirs.acceptance_lengths[:whole]
        compared += theirs.acceptance_lengths[:whole]
    assert np.mean(compared) > 2  # it has learned something worth comparing
