"""Walks from commands to kernels are found whole, in a pair that is quickly traced."""

import pytest

from tests.walks import serving_walks, training_walks


@pytest.mark.slow
def test_walks_of_serving_lead_from_the_command_to_the_kernel(pair):
    walks = serving_walks(pair / "target", pair / "drafter")
    assert list(walks) == ["verify", "draft"]
    for hops in walks.values():
        assert hops[0] == ("serve.py", "main")
        assert ("decoding/step.py", "speculative_step") in hops
        assert hops[-1].file == "kernels/block_attention/api.py"
    drafting = {name: any(hop.file.startswith("drafters/") for hop in hops) for name, hops in walks.items()}
    assert drafting == {"verify": False, "draft": True}


def test_walks_of_training_lead_from_the_command_to_the_kernel(pair):
    walks = training_walks(pair / "target")
    assert list(walks) == ["target", "blocks"]
    assert {hops[0] for hops in walks.values()} == {("train/__main__.py", "main")}
    assert walks["target"][-1].file == "kernels/block_attention/api.py"
    assert walks["blocks"][-1].file == "kernels/anchored_attention/api.py"
