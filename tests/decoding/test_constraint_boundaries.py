"""Where a constraint begins and ends inside a block: at every offset, in chains and trees.

What users of other engines report of constraints with speculation, and the tests that show it cannot happen here:

1. proposals after the end of an answer: below; many requests: infer/http/test_constraints.py, test_tools.py
2. reasoning that ends inside a block: below; infer/http/test_tools.py
3. a mask asked of an answer that has ended, a stop token in mid-block: below; test_speculative.py
4. proposals that are never allowed: test_constraints.py
5. states along trees: test_constraints.py (every kind of drafter, chain and tree, against autoregressive decoding)
6. requests that make no progress: infer/engine/test_constraints.py (room in turn), constraints/test_hostile.py
7. blanks without end: below; constraints/test_tools.py (calls on one line)
8. schemas that take minutes to compile: constraints/test_hostile.py
9. one bad request that stops the engine: infer/http/test_constraints.py, test_tools.py
10. reduced vocabularies without an allowed token: test_constraints.py (kinds with `draft_vocab_size`)
11. pieces of calls that are lost or doubled: constraints/test_tools.py, infer/test_tools.py
12. `tool_calls` said of a call that was cut, or of none: infer/http/test_tools.py, infer/test_tools.py
13. constraints under an unknown name that are ignored: infer/http/test_constraints.py
"""

import re

import pytest

from dflash_jax import load_drafter
from dflash_jax.constraints.constraint import Constraint, choice, json_object, prepared
from dflash_jax.constraints.tools.form import Form
from tests import tiny
from tests.decoding.test_constraints import END, answers, directory, target  # noqa: F401
from tests.fakes import vocabulary

CLOSING = vocabulary.FIRST + vocabulary.TEXTS.index(b"</think>")


@pytest.mark.parametrize("tree", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_an_answer_ends_at_any_offset(tree, directory, target):  # noqa: F811
    asked = [
        tiny.ask(
            [i + 3, 9], 40, 1.0, id=str(i), constraint=choice(["a" * (i + 1)]), eos_token_ids=(END,), min_tokens=i % 3
        )
        for i in range(20)
    ]
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    found = answers(target, drafter, asked, tree=tree)
    a = vocabulary.FIRST + ord("a")
    assert found == [([a] * (i + 1) + [END], "stop") for i in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("tree", [0, 7])
def test_reasoning_ends_at_any_offset(tree, directory, target):  # noqa: F811
    """What comes before the mark is free, what comes after it is constrained, and all is as without a drafter."""
    within = Constraint("choice", '["yes", "no"]', form=Form("qwen3", "opened"))
    asked = [
        tiny.ask([i % 40 + 3, 9, i // 40], 90, 1.0, id=str(i), constraint=within, eos_token_ids=(END,))
        for i in range(150)
    ]
    settings = {"slots": 16, "max_length": 112}
    plain = answers(target, None, asked, **settings)
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    assert answers(target, drafter, asked, tree=tree, **settings) == plain
    text = lambda tokens: b"".join(vocabulary.TEXTS[token - vocabulary.FIRST] for token in tokens if token != END)
    ended = [text(tokens) for tokens, reason in plain if reason == "stop"]
    assert all(re.search(rb"</think>\n{0,2}(yes|no)$", answer) for answer in ended)
    places = {tokens.index(CLOSING) % 8 for tokens, _ in plain if CLOSING in tokens}
    assert len(places) > 5


def test_blanks_are_bounded():
    """The longest run of blanks that an object of JSON may have."""
    found = prepared(json_object(), vocabulary.vocabulary(), [END])
    blank = [vocabulary.FIRST + ord(letter) for letter in " \n\t"]
    waiting, depth = {s for s in range(1, len(found.next)) if not _inside_text(found, s)}, 0
    while waiting and depth < 50:
        waiting = {int(found.next[s, found.classes[b]]) for s in waiting for b in blank} - {0}
        waiting = {s for s in waiting if not _inside_text(found, s)}
        depth += 1
    assert depth == 18  # a new line and 16 blanks, and nothing further


def _inside_text(found, state):
    """Whether any letter may follow, as it may only inside of a string."""
    return all(found.next[state, found.classes[vocabulary.FIRST + ord(letter)]] for letter in "qzQ!")
