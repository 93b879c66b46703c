"""Automata that read tokens do what those over bytes do."""

import json
import random
import signal
import threading
import time
from string import ascii_lowercase

import numpy as np
import pytest

from dflash_jax.constraints import process as of_process
from dflash_jax.constraints import texts
from dflash_jax.constraints.automaton import automaton
from dflash_jax.constraints.constraint import choice, json_schema, prepared, regex
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expressions
from dflash_jax.constraints.process import Process
from dflash_jax.constraints.schema import json_schema as expression
from dflash_jax.constraints.tokenizer import vocabulary_of
from dflash_jax.constraints.vocabulary import Vocabulary
from dflash_jax.vocabulary import load_tokenizer
from tests import tiny
from tests.fakes import schemas, vocabulary

NASTY = vocabulary.vocabulary()


def by_bytes(found, state, text):
    for byte in text:
        state = found.next[state, byte]
    return int(state)


def of_schema(schema):
    """The automaton of a schema; None if it allows nothing."""
    made = Expressions()
    try:
        return automaton(made, expression(made, schema))
    except ConstraintError as error:
        if error.code != "unsatisfiable":
            raise
        return None


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_every_state_allows_what_its_bytes_do(seed):
    rng = random.Random(seed)
    of_bytes = next(filter(None, (of_schema(schemas.schema(rng)) for _ in range(100))))
    found = NASTY.reading(of_bytes, [vocabulary.END])
    state_of, waiting = {1: 1}, [1]
    for state in waiting:
        following = found.next[state][found.classes]
        expected = [by_bytes(of_bytes, state_of[state], text) if text else 0 for text in NASTY.tokens]
        np.testing.assert_array_equal(following > 0, np.asarray(expected) > 0)
        allowed = found.allows(state)
        assert allowed[vocabulary.END] == of_bytes.final[state_of[state]]
        np.testing.assert_array_equal(np.delete(allowed, vocabulary.END), np.delete(following > 0, vocabulary.END))
        assert allowed[found.hint[state]]
        for after, byte_state in zip(following.tolist(), expected, strict=True):
            if after and after not in state_of:
                state_of[after] = byte_state
                waiting.append(after)
            assert not after or state_of[after] == byte_state
    assert sorted(state_of) == list(range(1, len(found.next)))


@pytest.mark.parametrize("name", ["email", "uri", "uri-reference", "hostname"])
def test_long_texts_of_many_words_are_read_by_a_large_vocabulary(name, monkeypatch):
    """A hostname of some 600 letters, and every word of the vocabulary at each of them."""
    rng = random.Random(3)
    words = {"".join(rng.choices(ascii_lowercase + "-", k=rng.randint(1, 12))).encode() for _ in range(80_000)}
    large = Vocabulary([None, *(bytes([byte]) for byte in range(256)), *sorted(words)])
    constraint = json_schema({"type": "string", "format": name})
    found = prepared(constraint, large, [0])
    text = {"email": "a-b@c-d.org", "uri": "http://a-b.org/c-d", "uri-reference": "../c-d#e", "hostname": "a-b.org"}[
        name
    ]
    states = found.walk([large.numbers[bytes([byte])] for byte in json.dumps(text).encode()])
    assert found.allows(states[-1])[0]
    assert max(found.allows(state).sum() for state in states) > 40_000
    monkeypatch.setattr(texts, "MOST", 1000)
    with pytest.raises(ConstraintError, match="too many tokens in too many states"):
        prepared(constraint, large, [0])


def test_where_no_tokens_lead_on_none_are_allowed():
    """A vocabulary without the bytes of some characters."""
    few = Vocabulary([None, b"a", b"b", b"ab", b"c"])
    found = prepared(regex("a(b|bx)c?|ax"), few, [0])
    assert found.allows(1).tolist() == [False, True, False, True, False]  # not toward x
    with pytest.raises(ConstraintError, match="no tokens of this vocabulary"):
        prepared(regex("x+"), few, [0])
    with pytest.raises(ConstraintError, match="no text"):
        prepared(choice([]), few, [0])
    with pytest.raises(ConstraintError, match="no tokens of this vocabulary"):
        prepared(regex("ab"), Vocabulary([bytes([byte]) for byte in range(256)]), [ord("b")])  # which only ends


def test_hints_are_the_longest_token_of_what_must_follow():
    found = prepared(choice(["true", "truth"]), NASTY, [vocabulary.END])
    assert NASTY.tokens[found.hint[1]] == b"tr"
    last = found.walk([NASTY.numbers[text] for text in (b"tr", b"u", b"e")])[-1]
    assert found.hint[last] == vocabulary.END


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "characters"])
def test_bytes_of_tokens(name, tmp_path):
    """What a tokenizer decodes is what its tokens are made of."""
    if name == "byte level":
        vocabulary.write_tokenizer(tmp_path)
    elif name == "characters":
        tiny.write_tokenizer(tmp_path)
    else:
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        pieces = ["▁the", "▁", "a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0x00>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    found = vocabulary_of(tokenizer, len(tokenizer) + 3)
    assert len(found) == len(tokenizer) + 3
    rng = random.Random(0)
    texts = [i for i, token in enumerate(found.tokens) if token]
    letters, compared = [i for i in texts if max(found.tokens[i]) < 0x80 or len(found.tokens[i]) > 1], 0
    for _ in range(200):
        tokens = rng.choices(letters, k=4)
        try:
            text = b"".join(found.tokens[i] for i in tokens).decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(tokens) == text
        compared += 1
    assert compared > 50
    if name == "byte level":
        assert [token for token in found.tokens if token] == vocabulary.TEXTS
        assert found.special["<end>"] == vocabulary.END


def test_tokenizers_without_bytes_are_refused():
    with pytest.raises(ConstraintError, match=r"need the target's tokenizer\.json") as error:
        vocabulary_of(None, 8)
    assert error.value.code == "no_constraints"


def test_another_process_prepares_the_same():
    process = Process(NASTY, 2**12)
    try:
        for made in (regex("a+b"), json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})):
            expected = prepared(made, NASTY, [vocabulary.END])
            for one, other in zip(process.prepared(made, [vocabulary.END]), expected, strict=True):
                np.testing.assert_array_equal(one, other)
        with pytest.raises(ConstraintError, match="/not") as error:
            process.prepared(json_schema({"not": {}}), [vocabulary.END])
        assert error.value.code == "unsupported_schema"
        running = process._running
        running.kill()
        running.wait()
        assert process.prepared(regex("b"), [vocabulary.END]).next.shape[0] == 3  # by a new one
    finally:
        process.close()


def test_a_process_that_gets_no_time_gives_way_to_one_that_does(monkeypatch):
    """It is ended when its time is over, and the next one does not wait for processors without work."""
    process, begun = Process(NASTY, 2**12), list[bool]()
    start = process._start
    monkeypatch.setattr(process, "_start", lambda: (begun.append(process._waits), start())[1])
    try:
        process.prepared(regex("a"), [vocabulary.END])
        monkeypatch.setattr(of_process, "SECONDS", 0.0)
        process._running.send_signal(signal.SIGSTOP)
        assert process.prepared(regex("b"), [vocabulary.END]).next.shape[0] == 3
        assert begun == [True, False]
    finally:
        process.close()


def test_whoever_asks_while_it_is_closed_is_answered():
    process, failed = Process(NASTY, 2**12), list[str]()
    process.prepared(regex("a"), [vocabulary.END])
    process._running.send_signal(signal.SIGSTOP)

    def ask():
        try:
            process.prepared(regex("b"), [vocabulary.END])
        except ConstraintError as error:
            failed.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    while not process._lock.locked():
        time.sleep(0.01)
    process.close()
    thread.join(20)
    assert not thread.is_alive()
    assert failed == ["constraint_timeout"]
    assert process._running is None


def test_it_imports_nothing_from_the_directory_it_is_started_in(tmp_path, monkeypatch):
    (tmp_path / "numbers.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    process = Process(NASTY, 2**12)
    try:
        assert process.prepared(regex("b"), [vocabulary.END]).next.shape[0] == 3
    finally:
        process.close()
