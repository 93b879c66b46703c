"""What DFlash 2 has of its own, against the official `dflash` 0.1.0; the rest of its parity is in `test_parity`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("dflash.model")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dflash_jax import load_drafter, load_target, spec_generate  # noqa: E402
from dflash_jax.decoding.state import Query  # noqa: E402
from tests.oracle.families import MASK, prompts  # noqa: E402
from tests.oracle.test_parity import DFLASH2, make_drafter, make_target  # noqa: E402
from tests.tiny import choice_of  # noqa: E402


def test_the_selector_picks_what_the_official_one_does(tmp_path, monkeypatch):
    their_target, theirs = make_target(tmp_path / "target"), make_drafter(tmp_path / "drafter", dflash_config=DFLASH2)
    target, ours = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((40, 7, 32)).astype(np.float32)
    anchor = rng.integers(0, MASK, 40)
    choice = choice_of(40, 7, target.config.vocab_size)
    monkeypatch.setattr(type(ours), "denoise", lambda *_: jnp.asarray(hidden))
    query = Query(jnp.asarray(anchor), jnp.ones(40, jnp.int32), block_size=8)
    got = jax.jit(lambda query, choice: ours.propose(target, ours.init_state(40, 8), query, choice).tokens)(
        query, choice
    )
    with torch.inference_mode():
        logits = their_target.lm_head(torch.tensor(hidden))
        expected = theirs.propose(torch.tensor(hidden), torch.tensor(anchor), their_target.lm_head, 0.0)[0]
    possible = logits.topk(DFLASH2["selector_top_k"] + 1).indices == MASK  # ours never proposes it
    rows = ~possible.numpy().any(axis=(1, 2))
    assert np.sum(rows) > 10
    assert np.array_equal(np.asarray(got)[rows], expected.numpy()[rows])
    assert np.mean(np.asarray(got) != logits.argmax(-1).numpy()) > 0.2  # the control: the selector matters


def test_the_published_names_of_the_codebooks(tmp_path):
    """On disk they have no `.weight`."""
    make_drafter(tmp_path, dflash_config=DFLASH2)
    before, tensors = load_drafter(tmp_path), load_file(tmp_path / "model.safetensors")
    codebooks = [name for name in tensors if "_codebook" in name]
    assert len(codebooks) == 2
    renamed = {name.removesuffix(".weight") if name in codebooks else name: x for name, x in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    after = load_drafter(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, before.params, after.params))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_never_depends_on_the_drafter(temperature, tmp_path):
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", dflash_config=DFLASH2)
    target, drafter = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    ours = spec_generate(target, drafter, prompts(), **settings)
    from dflash_jax import generate

    assert ours.tokens == generate(target, prompts(), **settings).tokens


def test_the_official_package_loads_what_was_saved(tmp_path):
    from dflash.model import DFlash2DraftModel

    from dflash_jax.checkpoint import read_json
    from dflash_jax.train.drafters import save_drafter

    theirs = make_drafter(tmp_path / "theirs", dflash_config=DFLASH2)
    save_drafter(tmp_path / "ours", load_drafter(tmp_path / "theirs"), read_json(tmp_path / "theirs" / "config.json"))
    again = DFlash2DraftModel.from_pretrained(tmp_path / "ours").eval()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)
