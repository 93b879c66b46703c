"""What constraints cost, and what it brings that proposals obey them.

    python benchmarks/constraints.py step TARGET DRAFTER [--tree NODES] [--rounds N] [--slots ROWS]
    python benchmarks/constraints.py tau TARGET DRAFTER [--tree NODES]
    python benchmarks/constraints.py prepare TOKENIZER
    python benchmarks/constraints.py beside TARGET DRAFTER [--rounds N] [--slots ROWS]

`step`, as ratios inside one run: the seconds of a step of an engine that serves constraints, without any and with one
in every row, to those of an engine that serves none. `tau`: tokens a step of 50 answers in JSON, where the drafter's
proposals obey the constraint and where only the target's choice does; of all tokens, and of those that the constraint
leaves a choice. `prepare`: seconds to prepare five schemas for the vocabulary of a tokenizer, and one that is known.
`beside`: the seconds of a step while schemas are prepared, to those of one without, and what begins with it.
"""

import argparse
import itertools
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax
from flax import struct

from dflash_jax import Drafter, Engine, Request, SamplingParams, Target, Text, load_drafter, load_target
from dflash_jax.constraints.constraint import Constraint, json_schema, prepared, tool_calls
from dflash_jax.constraints.tokenizer import vocabulary_of
from dflash_jax.vocabulary import load_tokenizer

PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
BOOK = {"title": {"type": "string"}, "year": {"type": "integer"}, "genre": {"enum": ["novel", "poem", "play"]}}
RECIPE = {
    "dish": {"type": "string"},
    "minutes": {"type": "integer"},
    "steps": {"type": "array", "items": {"type": "string"}},
}
EVENT = {"what": {"type": "string"}, "date": {"type": "string", "format": "date"}, "public": {"type": "boolean"}}
CALL = {"name": {"enum": ["search", "open", "close"]}, "arguments": {"type": "object", "properties": PERSON}}
KINDS = {"person": PERSON, "book": BOOK, "recipe": RECIPE, "event": EVENT, "function call": CALL}
ABOUT = ["Paris", "winter", "music", "a river", "chess", "bread", "the moon", "a library", "tea", "football"]
ITEM = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 1, "maximum": 999},
    "price": {"type": "number", "minimum": 0},
}
INVOICE = {
    "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
    "date": {"type": "string", "format": "date"},
    "currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
    "items": {"type": "array", "items": {"type": "object", "properties": ITEM, "required": [*ITEM]}},
    "total": {"type": "number", "minimum": 0},
}
PLAN = {
    "events": {"type": "array", "items": {"type": "object", "properties": EVENT, "required": [*EVENT]}, "maxItems": 20},
    "status": {"anyOf": [{"enum": ["open", "done"]}, {"type": "null"}]},
    "budget": {"type": "integer", "minimum": 0, "maximum": 100_000},
}
COMMENT = {
    "author": {"type": "string", "maxLength": 40},
    "text": {"type": "string"},
    "replies": {"type": "array", "items": {"$ref": "#/$defs/comment"}},
}
COMMENTS = {
    "$ref": "#/$defs/comment",
    "$defs": {"comment": {"type": "object", "properties": COMMENT, "required": [*COMMENT]}},
}
TOOLS = {
    "search": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "read_file": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "run": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "book": BOOK | PERSON,
}


class Unaware(struct.PyTreeNode):
    """A drafter that knows nothing of constraints."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, target, state, query, choice):
        return self.inner.propose(target, state, query, choice.replace(automata=None, walk=None))


def schema(properties: dict) -> Constraint:
    """The constraint of an object with all of these properties."""
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return json_schema(closed)


def requests(text: Text, temperature: float, ends: tuple[int, ...], *, constrained: bool) -> list[Request]:
    """Fifty answers in JSON."""
    found = []
    for kind, properties in KINDS.items():
        for about in ABOUT:
            asked = [{"role": "user", "content": f"Describe a {kind} about {about} as JSON."}]
            prompt = text.encode_chat(asked) if text.has_chat_template else text.encode(asked[0]["content"])
            params = SamplingParams(
                96, temperature, eos_token_ids=ends, constraint=schema(properties) if constrained else None
            )
            found.append(Request(prompt, params, id=f"{kind} {about}"))
    return found


def schemas() -> dict[str, Constraint]:
    """Five constraints as programs ask for them."""
    tools = [{"name": name, "parameters": {"type": "object", "properties": x}} for name, x in TOOLS.items()]
    return {
        "a person": schema(PERSON | {"email": {"type": "string", "format": "email"}}),
        "an invoice": schema(INVOICE),
        "a plan": schema(PLAN),
        "comments, nested": json_schema(COMMENTS),
        "calls of four tools": tool_calls(tools, "qwen3", choice="required"),
    }


def step(options: argparse.Namespace) -> None:
    """What a step costs where constraints are served."""
    target, drafter, text, ends = pair(options)
    given: dict[str, Any] = {"slots": options.slots, "max_length": 512, "tree": options.tree}
    count = max(8, options.slots)
    free, bound = (requests(text, 0.0, ends, constrained=constrained)[:count] for constrained in (False, True))
    engines = {
        "without": (Engine(target, drafter, **given), free),
        "unused": (Engine(target, drafter, constraints=True, **given), free),
        "every row": (Engine(target, drafter, constraints=True, **given), bound),
    }
    ratios = {name: list[float]() for name in engines if name != "without"}
    for turn in range(options.rounds + 1):
        seconds = {name: step_seconds(engine, asked) for name, (engine, asked) in engines.items()}
        if turn:  # the first one compiles
            for name, found in ratios.items():
                found.append(seconds[name] / seconds["without"])
    for name, found in ratios.items():
        print(f"step, {name}: {statistics.median(found):.3f} times ({min(found):.3f} to {max(found):.3f})")


def step_seconds(engine: Engine, asked: list[Request]) -> float:
    """Mean seconds of a decoding step of these requests."""
    engine.stats.reset()
    engine.generate(asked)
    return engine.stats.decode_seconds / engine.stats.steps


def tau(options: argparse.Namespace) -> None:
    """What it brings that proposals obey constraints."""
    target, drafter, text, ends = pair(options)
    given: dict[str, Any] = {"slots": options.slots, "max_length": 512, "tree": options.tree, "constraints": True}
    drafters: dict[str, Any] = {"target alone": Unaware(drafter), "proposals, too": drafter}
    for temperature in (0.0, 0.8):
        asked = requests(text, temperature, ends, constrained=True)
        taus, free, answers = {}, {}, {}
        for name, one in drafters.items():
            engine = Engine(target, one, **given)
            answers[name] = [done.token_ids for done in engine.generate(asked)]
            taus[name] = engine.stats.tau or 1.0
            chosen = sum(choices(engine, *pair) for pair in zip(asked, answers[name], strict=True))
            free[name] = chosen / engine.stats.decode_tokens * taus[name]
        assert len({str(found) for found in answers.values()}) == 1, "proposals changed an answer"
        for what, found in {"all tokens": taus, "tokens with a choice": free}.items():
            before, after = found["target alone"], found["proposals, too"]
            print(f"T {temperature}, {what} a step: {before:.3f} -> {after:.3f} ({after / before - 1:+.1%})")


def choices(engine: Engine, request: Request, tokens: list[int]) -> int:
    """How many of an answer's tokens after the first one were not the only one that the constraint allowed."""
    ready = engine.constraints and engine.constraints.check(request.params)
    assert ready is not None
    states = ready.automaton.walk(tokens)[1:-1]
    return sum(int(ready.automaton.allows(state).sum()) > 1 for state in states)


def prepare(options: argparse.Namespace) -> None:
    """How long it takes until a constraint can be used."""
    tokenizer = load_tokenizer(Path(options.tokenizer))
    begin = time.perf_counter()
    vocabulary = vocabulary_of(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    vocabulary.prepare()
    print(f"{len(vocabulary):,} tokens: {time.perf_counter() - begin:.2f} s, once an engine")
    ends = [next(iter(vocabulary.special.values()))]
    for name, constraint in schemas().items():
        begin = time.perf_counter()
        found = prepared(constraint, vocabulary, ends)
        print(f"{name}: {time.perf_counter() - begin:.2f} s, {len(found.next)} states")


def beside(options: argparse.Namespace) -> None:
    """What rows that decode feel of constraints that are prepared."""
    target, drafter, text, ends = pair(options)
    engine = Engine(target, drafter, slots=options.slots, max_length=512, tree=options.tree, constraints=True)
    constraints = engine.constraints
    assert constraints is not None
    constraints.prepare_beside()
    asked = requests(text, 0.0, ends, constrained=False)[: options.slots]
    numbers, ratios, waited, ended = itertools.count(), list[float](), list[float](), threading.Event()

    def preparing() -> None:
        while not ended.is_set():
            properties = {f"field {next(numbers)}": {"type": "string"}} | INVOICE
            begin = time.perf_counter()
            constraints.check(SamplingParams(9, eos_token_ids=ends, constraint=schema(properties)))
            waited.append(time.perf_counter() - begin)

    for turn in range(options.rounds + 1):
        alone = step_seconds(engine, asked)
        ended.clear()
        thread = threading.Thread(target=preparing)
        thread.start()
        together = step_seconds(engine, asked)
        ended.set()
        thread.join()
        if turn:  # the first one compiles
            ratios.append(together / alone)
    found = f"{statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"step while schemas are prepared: {found}")
    print(f"a schema meanwhile: {statistics.median(waited):.2f} s")
    known, waited = requests(text, 0.0, ends, constrained=True)[0].params, []
    for _ in range(100):
        begin = time.perf_counter()
        ready = constraints.check(known)
        constraints.place(ready)
        waited.append(time.perf_counter() - begin)
        constraints.release(ready)
    print(f"a known schema: {1e3 * statistics.median(waited):.3f} ms from its request to its tables")
    constraints.close()


def pair(options: argparse.Namespace) -> tuple[Target, Drafter, Text, tuple[int, ...]]:
    """The models, what reads their text, and the tokens that end an answer."""
    target = load_target(options.target)
    print(f"{jax.devices()[0].device_kind}, {target.dtype}, {options.slots} rows, tree {options.tree}")
    return target, load_drafter(options.drafter), Text(options.target), tuple(target.config.eos_token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    for part in (step, tau, beside):
        options = parts.add_parser(part.__name__)
        options.add_argument("target")
        options.add_argument("drafter")
        options.add_argument("--tree", type=int, default=0)
        options.add_argument("--rounds", type=int, default=7)
        options.add_argument("--slots", type=int, default=16 if part is beside else 1)
        options.set_defaults(part=part)
    options = parts.add_parser("prepare")
    options.add_argument("tokenizer")
    options.set_defaults(part=prepare)
    options = parser.parse_args()
    options.part(options)


if __name__ == "__main__":
    main()
