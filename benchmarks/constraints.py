"""What constraints cost, and what it brings that proposals obey them.

    python benchmarks/constraints.py TARGET DRAFTER [--tree NODES] [--rounds N]

Prints, as ratios inside one run: the seconds of a step of an engine that serves constraints, without any and with one
in every row, to those of an engine that serves none; and tokens a step (tau) of 50 answers in JSON, where the drafter's
proposals obey the constraint and where only the target's choice does.
"""

import argparse
import statistics
from typing import Any

import jax
from flax import struct

from dflash_jax import Engine, Request, SamplingParams, Text, load_drafter, load_target
from dflash_jax.constraints.constraint import Constraint, json_schema

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--tree", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slots", type=int, default=1)
    options = parser.parse_args()
    target, text = load_target(options.target), Text(options.target)
    drafter, ends = load_drafter(options.drafter), tuple(target.config.eos_token_ids)
    given: dict[str, Any] = {"slots": options.slots, "max_length": 512, "tree": options.tree}
    free, bound = (requests(text, 0.0, ends, constrained=constrained)[:8] for constrained in (False, True))
    engines = {
        "without": (Engine(target, drafter, **given), free),
        "unused": (Engine(target, drafter, constraints=True, **given), free),
        "every row": (Engine(target, drafter, constraints=True, **given), bound),
    }
    ratios = {name: list[float]() for name in engines if name != "without"}
    for turn in range(options.rounds + 1):
        seconds = {}
        for name, (engine, asked) in engines.items():
            engine.stats.reset()
            engine.generate(asked)
            seconds[name] = engine.stats.decode_seconds / engine.stats.steps
        if turn:  # the first one compiles
            for name, found in ratios.items():
                found.append(seconds[name] / seconds["without"])
    print(f"{jax.devices()[0].device_kind}, {target.dtype}, {options.slots} rows, tree {options.tree}")
    for name, found in ratios.items():
        print(f"step, {name}: {statistics.median(found):.3f} times ({min(found):.3f} to {max(found):.3f})")
    for temperature in (0.0, 0.8):
        asked = requests(text, temperature, ends, constrained=True)
        taus, answers = {}, {}
        drafters: dict[str, Any] = {"target alone": Unaware(drafter), "proposals, too": drafter}
        for name, one in drafters.items():
            engine = Engine(target, one, constraints=True, **given)
            answers[name] = [done.token_ids for done in engine.generate(asked)]
            taus[name] = engine.stats.tau
        assert len({str(found) for found in answers.values()}) == 1, "proposals changed an answer"
        gain = taus["proposals, too"] / taus["target alone"] - 1
        print(f"T {temperature}: tau {taus['target alone']:.3f} -> {taus['proposals, too']:.3f} ({gain:+.1%})")


if __name__ == "__main__":
    main()
