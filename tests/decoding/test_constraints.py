"""Constrained answers: the same with any drafter, tree and neighbors, and distributed as they must be."""

import contextlib
import dataclasses
import random
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, Request, load_drafter, load_target, replay, spec_generate
from dflash_jax.constraints.constraint import SECONDS, choice, json_schema, regex
from dflash_jax.decoding.automata import Walk, empty_tables
from dflash_jax.decoding.proposal import Proposal, make_block
from dflash_jax.decoding.proposing import propose
from dflash_jax.decoding.state import init_state
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.constraints import Constraints
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.programs import decode_call
from dflash_jax.infer.engine.requests import RequestError
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.fakes import schemas, vocabulary
from tests.fakes.drafters import BigramDrafter

SIZE, END = vocabulary.SIZE, vocabulary.END
IDS = {"vocab_size": SIZE, "eos_token_id": END}
KINDS = {
    name: raw
    | {"vocab_size": SIZE, "eos_token_id": None}
    | ({"draft_vocab_size": 200} if "draft_vocab_size" in raw else {})
    for name, raw in tiny.kinds().items()
}
for raw in KINDS.values():
    if "dflash_config" in raw:
        raw["dflash_config"] = raw["dflash_config"] | {"mask_token_id": vocabulary.MASK}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [json_schema(PERSON), regex(r"\d{3}-[a-c]{1,9}x"), choice(["yes", "no", "maybe"]), None]
CONSTRAINTS.append(json_schema(PERSON, compact=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("constraints")
    vocabulary.write_tokenizer(tiny.write_target(directory / "target", tiny.target_config(**IDS)))
    for name, raw in KINDS.items():
        tiny.write_drafter(directory / name, raw)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def requests(count=10, new=30, temperatures=(0.0, 0.8, 1.0), **given):
    return [
        tiny.ask(
            [i % 50 + 3, 9, 11],
            new,
            temperatures[i % len(temperatures)],
            id=str(i),
            constraint=CONSTRAINTS[i % len(CONSTRAINTS)],
            eos_token_ids=(END,),
            **given,
        )
        for i in range(count)
    ]


def answers(target, drafter, asked, **settings):
    settings = {"slots": 3, "max_length": 64, "steps_per_visit": 4, "constraints": True} | settings
    return [(done.token_ids, done.finish_reason) for done in Engine(target, drafter, **settings).generate(asked)]


@pytest.fixture(scope="module")
def plain(target):
    return answers(target, None, requests())


EVERY_DAY = {("dflash", 0), ("dflash", 7)}


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        pytest.param(kind, tree, marks=[] if (kind, tree) in EVERY_DAY else pytest.mark.slow)
        for kind in KINDS
        for tree in (0, 7)
    ],
)
def test_they_are_those_of_plain_decoding(kind, tree, directory, target, plain):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    assert answers(target, drafter, requests(), tree=tree) == plain
    for request, (tokens, reason) in zip(requests(), plain, strict=True):
        if reason == "stop" and request.params.constraint:
            assert tokens[-1] == END


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [0, 7])
def test_many_are_those_of_plain_decoding(kind, tree, directory, target):
    """400 answers of each kind, chain and tree, under 300 schemas, beside a hundred without any."""
    rng, constraints = random.Random(7), Constraints(target, 2**14)
    params = SamplingParams(40, eos_token_ids=(END,), seed=3)
    asked = []
    while len(asked) < 400:
        temperature, constraint = rng.choice((0.0, 0.8, 1.0)), None
        if len(asked) % 4:
            constraint = json_schema(schemas.schema(rng), compact=rng.random() < 0.3)
        given = dataclasses.replace(params, temperature=temperature, constraint=constraint)
        begin = time.thread_time()
        with contextlib.suppress(RequestError):  # a few schemas allow nothing, or too much
            constraints.check(given)
            if time.thread_time() < begin + SECONDS / 4:  # far from what is refused
                asked.append(Request([rng.randrange(3, 60) for _ in range(3)], given, id=str(len(asked))))
    expected = answers(target, None, asked, slots=8)
    drafter = load_drafter(directory / kind, num_target_layers=4)
    found = answers(target, drafter, asked, tree=tree, slots=8)
    assert [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == []
    assert sum(reason == "stop" for _, reason in found) > 100


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"cache_tokens": 384, "prefill_chunk": 8},
        pytest.param({"prefix_chunks": 4, "prefill_chunk": 8, "slots": 2}, marks=pytest.mark.slow),
        pytest.param({"slots": 16, "steps_per_visit": 1}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True}, marks=pytest.mark.slow),
        pytest.param({"block_size": "auto", "tree": "auto"}, marks=pytest.mark.slow),
        pytest.param({"proposals": "independent"}, marks=pytest.mark.slow),
        pytest.param({"proposals": "argmax", "tree": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_about_an_engine_changes_them(settings, directory, target, plain):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    assert answers(target, drafter, requests(), **settings) == plain


@pytest.mark.lossless
def test_neither_do_proposals_that_are_never_allowed(target, plain):
    """A drafter that knows nothing of constraints."""
    assert answers(target, BigramDrafter(SIZE), requests(), slots=2) == plain


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("tree", [0, 7])
def test_at_every_place_of_a_block_the_mask_may_change_and_the_answer_end(tree, directory, target):
    """Letters are followed by digits, as reasoning is by JSON; proposals go on after the end."""
    forms = [f"[xz]{{{letters}}}[0-9]{{3}}" for letters in range(1, 13)]
    asked = [
        tiny.ask([5, 6], 30, i % 2, id=str(i), constraint=regex(form), eos_token_ids=(END,))
        for i, form in enumerate(forms)
    ]
    found = answers(target, load_drafter(directory / "dflash", num_target_layers=4), asked, tree=tree)
    assert found == answers(target, None, asked)
    for form, (tokens, reason) in zip(forms, found, strict=True):
        assert reason == "stop"
        assert re.fullmatch(form, b"".join(vocabulary.vocabulary().tokens[token] for token in tokens[:-1]).decode())


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize(
    "given", [{"repetition_penalty": 1.3}, {"min_tokens": 12}, {"top_k": 5, "top_p": 0.9}], ids=str
)
def test_settings_go_with_them(given, directory, target):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    expected = answers(target, None, requests(**given))
    assert answers(target, drafter, requests(**given), tree=7) == expected
    assert all(tokens for tokens, _ in expected)


def test_replay_knows_the_constraint(target, plain):
    for request, (tokens, _) in list(zip(requests(), plain, strict=True))[:5]:
        found = replay(target, request.prompt_token_ids, tokens, request.params, request_id=request.id, chunk=8)
        assert found.worst_gap == 0
    request, (tokens, _) = requests()[0], plain[0]
    wrong = [*tokens[:3], vocabulary.FIRST + 7, *tokens[4:]]
    assert replay(target, request.prompt_token_ids, wrong, request.params, request_id="0").worst_gap == np.inf


def test_spec_generate_takes_one(directory, target):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    given = {"max_new_tokens": 20, "constraint": regex("[ab]{2,4}")}
    speculative = spec_generate(target, drafter, [[5, 6], [7]], **given)
    assert speculative.tokens == spec_generate(target, None, [[5, 6], [7]], **given).tokens
    texts = [b"".join(vocabulary.vocabulary().tokens[t] for t in tokens[:-1]) for tokens in speculative.tokens]
    assert all(2 <= len(text) <= 4 and set(text) <= set(b"ab") for text in texts)


def test_an_answer_that_may_only_end_ends(target):
    """Whatever `min_tokens` says."""
    params = {"constraint": choice(["ab"]), "eos_token_ids": (END,), "min_tokens": 9}
    engine = Engine(target, None, max_length=64, constraints=True)
    (done,) = engine.generate([tiny.ask([5], 20, **params)])
    assert done.token_ids[-1] == END
    assert len(done.token_ids) <= 3


def test_without_constraints_a_program_is_what_it_was(directory, target):
    """Nothing of them is compiled in, and the state has nothing of them."""
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    state = jax.eval_shape(lambda: init_state(target, drafter, 2, 64, 4))
    assert state.walk is None
    call = lambda state, automata: decode_call(
        target, drafter, state, 4, 0, Draft(5), EngineConfig(), automata=automata
    )
    program, arguments = call(state, None)
    text = program.lower(*arguments).as_text()
    constrained = jax.eval_shape(lambda: init_state(target, drafter, 2, 64, 4, constraints=True))
    tables = empty_tables(SIZE, states=64, cells=512, masks=8, automata=4)
    program, arguments = call(constrained, tables)
    assert f"tensor<8x{-(-SIZE // 32)}xui32>" in program.lower(*arguments).as_text()
    assert f"tensor<8x{-(-SIZE // 32)}xui32>" not in text


# ------------------------------------------------------------------------------------------------
# The parts


def choosing(target, constraint, rows=2, depth=4, temperature=0.0):
    """How rows choose that begin under a constraint; and its automaton."""
    constraints = Constraints(target, 2**12)
    ready = constraints.check(SamplingParams(constraint=constraint, eos_token_ids=(END,)))
    begin = constraints.place(ready)
    walk = Walk(*(jnp.full(rows, int(x), jnp.int32) for x in (begin.state, begin.automaton)))
    made = tiny.choice_of(rows, depth, SIZE, temperature)
    return made.replace(automata=constraints.tables, walk=walk), ready.automaton


def test_states_of_a_tree_are_those_of_its_paths(target):
    made, found = choosing(target, json_schema(PERSON))
    rng, parents = np.random.default_rng(0), np.asarray([[0, 0, 1, 1, 3, 2, 6], [0, 1, 2, 3, 4, 5, 6]])
    allowed = [np.flatnonzero(found.next[state][found.classes]) for state in range(len(found.next))]
    tokens, states = np.zeros((2, 7), np.int32), np.ones((2, 8), np.int32)
    for row, place in np.ndindex(2, 7):
        before = states[row, parents[row, place]]
        may = allowed[before] if rng.random() < 0.9 and allowed[before].size else np.arange(SIZE)
        tokens[row, place] = rng.choice(may)
        states[row, place + 1] = found.next[before, found.classes[tokens[row, place]]]
    proposal = Proposal(jnp.asarray(tokens), jnp.asarray(parents, jnp.int32), 7)
    np.testing.assert_array_equal(made.states(proposal), states)  # they lie at the beginning of the tables
    logits = jnp.asarray(rng.standard_normal((2, 8, SIZE)), jnp.float32)
    block, without = make_block(jnp.zeros(2, jnp.int32), proposal), made.replace(noise=jnp.zeros((2, 8, SIZE)))
    chosen = np.asarray(without.for_block(logits, block, made.states(proposal)))
    for row, place in np.ndindex(2, 8):
        if state := states[row, place]:
            assert found.allows(int(state))[chosen[row, place]]


@pytest.mark.parametrize("nodes", [0, 12])
def test_proposals_obey(target, nodes):
    """Every path of a proposal is one that the constraint allows."""
    made, found = choosing(target, regex("(ab|cd){9}"), temperature=0.9)
    logits = jax.random.normal(jax.random.key(0), (2, 4, SIZE))
    proposal = jax.jit(propose)(made.replace(nodes=nodes), logits)
    tokens = np.asarray(proposal.tokens)
    parents = np.arange(4)[None].repeat(2, 0) if proposal.parents is None else np.asarray(proposal.parents)
    states = np.ones((2, tokens.shape[1] + 1), int)
    for row, place in np.ndindex(*tokens.shape):
        states[row, place + 1] = found.next[states[row, parents[row, place]], found.classes[tokens[row, place]]]
        if proposal.scores is None or proposal.scores[row, place] > -np.inf:
            assert states[row, place + 1]


def test_a_hint_is_proposed_where_a_drafter_has_no_allowed_token(target):
    made, _ = choosing(target, choice(["abc"]))
    few = jnp.asarray([vocabulary.FIRST + byte for byte in b"xyz"])
    proposal = propose(made.restricted(few), jnp.zeros((2, 3, 3)))
    assert vocabulary.vocabulary().tokens[int(proposal.tokens[0, 0])] == b"abc"
    assert int(proposal.tokens[0, 1]) == END
    tree = propose(made.restricted(few).replace(nodes=3), jnp.zeros((2, 3, 3)))
    assert int(tree.tokens[0, 0]) == int(proposal.tokens[0, 0])


def test_calibration_learns_nothing_of_constrained_rows(directory, target):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)

    def hits(constraint):
        asked = [
            dataclasses.replace(r, params=dataclasses.replace(r.params, constraint=constraint)) for r in requests(4)
        ]
        engine = Engine(target, drafter, slots=2, max_length=64, constraints=True)
        before = np.asarray(engine.batch.state.calibration.hits)
        engine.generate(asked)
        return np.abs(np.asarray(engine.batch.state.calibration.hits) - before).sum()

    assert hits(regex("[ab]{9,20}")) == 0
    assert hits(None) > 0


def test_answers_come_as_often_as_the_projected_distribution_has_them(directory, target):
    """Sampling under a mask: each token as likely as the target's softmax among those allowed there."""
    drafter, count = load_drafter(directory / "dflash", num_target_layers=4), 800
    asked = [
        tiny.ask([5, 9], 4, 1.0, id=str(i), constraint=regex("a[bc]|b[ab]"), eos_token_ids=(END,)) for i in range(count)
    ]
    engine = Engine(target, drafter, slots=32, max_length=16, constraints=True, steps_per_visit=4)
    texts = [tuple(done.token_ids) for done in engine.generate(asked)]
    ready = engine.constraints.check(asked[0].params)

    def continued(prefix, state, probability):
        logits = target.forward(
            jnp.asarray([[5, 9, *prefix]]), jnp.arange(2 + len(prefix))[None], None, target.init_cache(1, 8)
        )
        logits = np.asarray(target.unembed(logits[0]))[0, -1].astype(np.float64)
        may = np.flatnonzero(ready.automaton.allows(state))
        shares = np.exp(logits[may] - logits[may].max())
        for token, share in zip(may.tolist(), shares / shares.sum(), strict=True):
            if token == END:
                yield (*prefix, token), probability * share
            else:
                after = int(ready.automaton.next[state, ready.automaton.classes[token]])
                yield from continued((*prefix, token), after, probability * share)

    expected = dict(continued((), 1, 1.0))
    assert set(texts) <= set(expected)
    statistic = sum((texts.count(key) - count * p) ** 2 / (count * p) for key, p in expected.items())
    degrees = len(expected) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # beyond which lie 1 in 10**4


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("axes", ["data=2,model=2", "model=4"])
def test_a_mesh_changes_nothing(axes, directory, plain):
    devices = jax.devices()[:4]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    target = load_target(directory / "target", mesh=mesh)
    drafter = load_drafter(directory / "dflash", mesh=mesh, num_target_layers=4)
    assert answers(target, drafter, requests(), slots=4, tree=7) == plain
