"""The same tokens are allowed as by another compiler of schemas and regular expressions."""

import json
import random
import re

import numpy as np
import pytest

from dflash_jax.constraints import json_schema, regex
from dflash_jax.constraints.constraint import prepared
from tests.fakes import vocabulary

llguidance = pytest.importorskip("llguidance")

CLOSED = {"type": "object", "additionalProperties": False}
ADDRESS = {**CLOSED, "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
SCHEMAS = [
    {**CLOSED, "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    {**CLOSED, "properties": {"x": {"type": "null"}, "y": {"enum": ["red", "grün", 3]}, "z": {"const": "q"}}},
    {**CLOSED, "properties": {"at": {**ADDRESS, "required": ["street", "zip"]}, "n": {"type": "integer"}}},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1234}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
]
PATTERNS = ["[a-c]{2,5}x?", "(true|tr[a-z]+)[0-9]*", "é中?[^x]{0,3}", r"[0-9]{1,3}(\.[0-9]{1,3}){3}"]

TOKENS = vocabulary.vocabulary().tokens
# Strings of theirs have no character DEL, and of the escapes by number those below \\u0080 alone.
ONLY_OURS = np.asarray([b"\x7f" in (text or b"") or b"\\u" in (text or b"") for text in TOKENS])


@pytest.fixture(scope="module")
def theirs():
    """Their tokenizer, of the same tokens."""

    class Tokens:
        eos_token_id, bos_token_id, unk_token_id = vocabulary.END, None, None

        def __init__(self):
            texts = vocabulary.vocabulary().tokens
            self.tokens = [text or b"\xff<%d>" % i for i, text in enumerate(texts)]
            self.special_token_ids = [i for i, text in enumerate(texts) if not text]

        def __call__(self, text):
            text = text if isinstance(text, bytes) else text.encode()
            return [vocabulary.vocabulary().numbers[bytes([byte])] for byte in text]

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()))


def their_mask(matcher):
    import llguidance.numpy as masks

    bits = masks.allocate_token_bitmask(1, vocabulary.SIZE)
    masks.fill_next_token_bitmask(matcher, bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[: vocabulary.SIZE].astype(bool)


@pytest.mark.parametrize("walks", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("given", [*SCHEMAS, *PATTERNS], ids=lambda x: json.dumps(x)[:40])
def test_masks_are_equal_at_each_state(given, walks, theirs):
    begin = (
        '%llguidance {"no_forcing": true}\nstart: '  # masks have all that is allowed, and not only what they would take
    )
    if isinstance(given, str):
        ours, grammar = regex(given), f"{begin}/{given}/"
    else:
        strict = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        ours, grammar = json_schema(given, compact=True), f"{begin}%json {json.dumps(given | {'x-guidance': strict})}"
    grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
    found, rng = prepared(ours, vocabulary.vocabulary(), [vocabulary.END]), random.Random(0)
    for _ in range(walks):
        matcher, state, text = llguidance.LLMatcher(theirs, grammar), 1, b""
        for _ in range(30):
            expected, allowed = their_mask(matcher), found.allows(state)
            larger = ONLY_OURS | bool(re.search(rb"\\(u[0-9a-fA-F]{0,3})?$", text.replace(b"\\\\", b"")))
            same = (expected == allowed) | (allowed & larger)
            assert same.all(), [vocabulary.vocabulary().tokens[i] for i in np.flatnonzero(~same)][:9]
            token = int(rng.choice(np.flatnonzero(allowed & expected)))
            if token == vocabulary.END:
                break
            assert matcher.consume_token(token)
            state, text = int(found.next[state, found.classes[token]]), text + TOKENS[token]
