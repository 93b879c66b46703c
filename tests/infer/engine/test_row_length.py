"""How many tokens a row may hold: by default and at most what the target has positions for, scaled ropes included."""

import pytest

from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.engines import Needs, engine_config, row_length
from dflash_jax.models import target_config
from dflash_jax.serve_http import LENGTH
from dflash_jax.target import Target
from tests import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALED = target_config(tiny.target_config(max_position_embeddings=640, rope_scaling=YARN))
PLAIN = target_config(tiny.target_config(max_position_embeddings=640))
UNKNOWN = target_config(tiny.target_config(max_position_embeddings=None))


def made(config, prompt, **options):
    """The length of the rows for one request of so many tokens and 10 new ones."""
    needs = Needs([(prompt, 10)], 256, 0, None)
    return engine_config(Target({}, config=config), needs, GenerationOptions(), EngineOptions(**options)).max_length


@pytest.mark.parametrize(("config", "length"), [(SCALED, 1024), (PLAIN, 640), (UNKNOWN, 1010)])
def test_a_long_prompt_gets_the_positions_it_needs(config, length):
    assert made(config, 1000) == length


@pytest.mark.parametrize(("config", "length"), [(SCALED, 2048), (PLAIN, 640), (UNKNOWN, 2048)])
def test_rows_of_deterministic_jobs(config, length):
    assert made(config, 5, deterministic=True) == length


@pytest.mark.parametrize(("config", "length"), [(SCALED, 2048), (PLAIN, 640), (UNKNOWN, LENGTH)])
def test_rows_of_a_server(config, length):
    assert row_length(config, None, LENGTH) == length


def test_a_length_that_is_given_is_taken_or_refused():
    assert made(SCALED, 5, max_length=2048) == row_length(SCALED, 2048, LENGTH) == 2048
    assert row_length(UNKNOWN, 10**6, LENGTH) == 10**6
    for config, most in ((SCALED, 2048), (PLAIN, 640)):
        with pytest.raises(ValueError, match=f"at most {most}, the context length of the target, got 2049"):
            made(config, 5, max_length=2049)
