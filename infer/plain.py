"""A request in plain form: a JSON object with a prompt and settings, of a line of a job or a body over HTTP."""

from dataclasses import replace
from typing import Any, NamedTuple

from dflash_jax.constraints.constraint import Constraint
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.formats import FORMATS
from dflash_jax.files import Fields, Json, said
from dflash_jax.infer.constrained import constraint_of
from dflash_jax.infer.engine.params import MOST_ALTERNATIVES, SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError, invalid
from dflash_jax.infer.fields import LINE, check_fields, flag, token_budget
from dflash_jax.infer.text import Text, template_arguments, valid_text
from dflash_jax.infer.tools import Offer, offer_of

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "turns")
MOST_SAMPLES = 128  # answers to one prompt
MOST_STOPS = 4  # stop strings of a request
LONGEST_STOP = 1024  # bytes of a stop string
SETTINGS = """
    temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logprobs seed min_tokens
""".split()
WHOLE = {"top_k", "logprobs", "seed", "min_tokens"}  # those of them that are integers


class PlainRequest(NamedTuple):
    """A request in plain form, read and checked.

    Attributes:
        messages, later: of a conversation, its first turn and the user turns after it.
        template_arguments: of the chat template.
        form: what the answer may be made of besides text; None is nothing.
    """

    request: Request
    stop: tuple[str, ...]
    messages: tuple[dict[str, str], ...]
    later: tuple[str, ...]
    template_arguments: Json
    form: Form | None = None


class _Prompt(NamedTuple):
    """A prompt: its tokens, what the chat template made of it if there is one, and see `PlainRequest`."""

    tokens: list[int]
    rendered: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    later: tuple[str, ...] = ()


def plain_request(row: Fields, name: str, text: Text, defaults: SamplingParams) -> PlainRequest:
    """Reads a line in one of the plain forms.

    Raises:
        RequestError: it is in none of them, or has a field that would be ignored (see `fields`).
    """
    check_fields(row, LINE)
    stop = _stop_strings(row.get("stop"))
    arguments = text.reasoning_arguments(row.get("reasoning_effort"))
    arguments |= template_arguments(row.get("chat_template_kwargs"))
    offer = offer_of(row)
    prompt = _prompt(row, text, arguments, offer)
    form = _form(row, text, prompt.rendered, offer)
    params = replace(defaults, **_settings(row, defaults), constraint=_constraint(row, form, offer))
    request = Request(prompt.tokens, params, id=name, find_stop=text.find_stop(stop, params.min_tokens))
    return PlainRequest(request, stop, prompt.messages, prompt.later, arguments, form)


def _form(row: Fields, text: Text, rendered: str | None, offer: Offer) -> Form | None:
    """What the answer to a rendered prompt may be made of; None is text alone."""
    reasoning = flag(row, "include_reasoning") is not False
    if rendered is None:
        if offer.tools:
            raise invalid("tools need messages; another prompt has no template that describes them", "tools")
        return None
    found = text.format
    if offer.tools and offer.choice != "none" and (found is None or not found.calls):
        known = ", ".join(name for name, one in FORMATS.items() if one.calls)
        raise RequestError(
            "no_tool_format",
            f"the chat template does not show how this model writes calls; name its format by --tool-format ({known})",
            "tools",
        )
    if found is None:
        return None
    thinking = found.thinking(rendered, text.chat_template or "")
    if not thinking and not offer.tools:
        return None
    return Form(found.name, thinking, offer.tools, offer.choice, offer.parallel and not found.single, reasoning)


def _constraint(row: Fields, form: Form | None, offer: Offer) -> Constraint | None:
    found = constraint_of(row)
    if found is None:
        return Constraint("free", "", form=form, name="tools") if form is not None and offer.tools else None
    if offer.tools and offer.choice != "none":
        raise RequestError(
            "conflicting_constraints",
            f"{found.name} and tools cannot be combined; leave one out, or set tool_choice to none",
            found.name,
        )
    return replace(found, form=form) if form is not None and form.thinking else found


def _settings(row: Fields, defaults: SamplingParams) -> Json:
    given: Json = {name: row[name] for name in SETTINGS if row.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int if name in WHOLE else int | float) or isinstance(value, bool):
            kind = "an integer" if name in WHOLE else "a number"
            raise invalid(f"{name} must be {kind}, got {value!r:.80}")
        if not abs(value) < 2**63:
            raise invalid(f"{name} is out of range: {value!r:.80}")
    if not 0 <= given.get("logprobs", 0) <= MOST_ALTERNATIVES:
        raise invalid(f"logprobs must lie in 0..{MOST_ALTERNATIVES}, got {given['logprobs']}")
    if given.get("top_k", 0) >= 2**31:
        raise invalid(f"top_k is out of range: {given['top_k']}")
    if given.get("top_k") == -1:  # the other spelling of "all"
        given["top_k"] = 0
    if (budget := token_budget(row)) is not None:
        given["max_new_tokens"] = budget
    return given | _stop_settings(row, defaults)


def _stop_settings(row: Fields, defaults: SamplingParams) -> Json:
    """`ignore_eos` and `stop_token_ids`: those of a line come to those of the job."""
    given: Json = {}
    if (ignored := flag(row, "ignore_eos")) is not None:
        given["ignore_eos"] = ignored
    if (stops := row.get("stop_token_ids")) is not None:
        if not isinstance(stops, list) or not all(type(token) is int and 0 <= token < 2**31 for token in stops):
            raise invalid(f"stop_token_ids must be a list of token ids, got {stops!r:.60}")
        given["stop_token_ids"] = tuple(dict.fromkeys((*defaults.stop_token_ids, *stops)))
    return given


def sample_count(row: Fields) -> int:
    """The field `n`, 1 by default; raises RequestError."""
    n = row.get("n")
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n <= MOST_SAMPLES:
        raise invalid(f"n must be an integer in 1..{MOST_SAMPLES}, got {n!r:.60}")
    return n


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) and stop else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise invalid(f"stop must be a string or a list of strings, got {stop!r:.80}")
    if len(stops) > MOST_STOPS:
        raise invalid(f"stop may have at most {MOST_STOPS} strings, got {len(stops)}")
    if (longest := max((len(valid_text(s).encode()) for s in stops), default=0)) > LONGEST_STOP:
        raise invalid(f"a stop string may have at most {LONGEST_STOP} bytes, got {longest}")
    return tuple(stops)


def _prompt(row: Fields, text: Text, arguments: Fields, offer: Offer) -> _Prompt:
    given = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request", f"the line must have exactly one of {', '.join(PROMPT_FIELDS)}; got {given or 'none'}"
        )
    kind, value = given[0], row[given[0]]
    if row.get("chat_template_kwargs") and kind not in ("messages", "turns"):
        raise invalid("chat_template_kwargs needs messages or turns; another prompt has no template")
    if kind == "prompt" and isinstance(value, str):
        return _Prompt(text.encode(value))
    if kind == "prompt_token_ids" and isinstance(value, list):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return _Prompt(value)
    elif kind == "turns" and isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        messages = ({"role": "user", "content": value[0]},)
        if offer.tools:
            raise invalid("tools need messages; turns have no place for what the functions return", "tools")
        rendered = text.render(messages, **arguments)
        return _Prompt(text.encode_rendered(rendered), rendered, messages, tuple(map(valid_text, value[1:])))
    elif kind == "messages":
        rendered = text.render(value, offer.given, **arguments)
        return _Prompt(text.encode_rendered(rendered), rendered)
    expected = {"prompt": "a string", "prompt_token_ids": "a list of integers", "turns": "a list of strings"}
    raise RequestError("invalid_request", f"{kind} must be {expected[kind]}, got {value!r:.80}")


def refusal(error: Exception) -> RequestError:
    """The error for a request whose content provoked this exception."""
    if isinstance(error, RequestError):
        return error
    return RequestError("invalid_request", f"the request cannot be read: {said(error):.200}")
