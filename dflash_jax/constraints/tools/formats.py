"""The formats that are known, and which one a chat template is of."""

from collections.abc import Mapping

from dflash_jax.constraints.automaton import Budget
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.gemma4 import Gemma4
from dflash_jax.constraints.tools.gpt_oss import GptOss
from dflash_jax.constraints.tools.kimi_k2 import KimiK2
from dflash_jax.constraints.tools.llama3 import Llama3
from dflash_jax.constraints.tools.minimax_m2 import MiniMaxM2
from dflash_jax.constraints.tools.qwen3 import Qwen3
from dflash_jax.constraints.tools.qwen3_coder import Qwen3Coder
from dflash_jax.constraints.tools.reading import Reading
from dflash_jax.constraints.tools.smollm2 import SmolLM2


class ReasoningAlone(Format):
    """No calls, but reasoning between tags."""

    name, known_by = "thinking", ("</think>",)
    marks = "<think>", "</think>"
    calls = False


# The first one whose marks a template has, so those with more of them come first.
FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (GptOss(), Gemma4(), KimiK2(), MiniMaxM2(), Qwen3Coder(), Qwen3(), Llama3(), SmolLM2(), ReasoningAlone())
}


def format_of(template: str) -> Format | None:
    """The format of a chat template; None if none is known."""
    has = lambda parts: [part in template for part in parts]
    return next((one for one in FORMATS.values() if all(has(one.known_by)) and not any(has(one.unlike))), None)


def answer_expression(made: Expressions, form: Form, content: Expression | None, budget: Budget) -> Expression:
    """What an answer of a form may be; see `Format.expression`.

    Raises:
        ConstraintError: see `Grammar.arguments`.
    """
    return FORMATS[form.format].expression(Grammar(made, budget), form, content)


def reading(form: Form, symbols: Mapping[str, str] | None = None) -> Reading:
    """What reads an answer of a form; see `Reading`."""
    return Reading(FORMATS[form.format].read, form, symbols)
