"""Fields of requests: which ones act, which ones change nothing here, and which ones are refused by name.

One vocabulary for the lines of jobs, the bodies of OpenAI batch lines and those of HTTP requests. A field that is null
counts as absent, and a field that nobody reads is never ignored: it might have changed the answer.
"""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from dflash_jax.files import Fields
from dflash_jax.infer.engine.requests import RequestError, invalid

# Settings of an answer, named alike in every form.
COMMON = """
    temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed n stop chat_template_kwargs
    max_tokens max_completion_tokens min_tokens ignore_eos stop_token_ids reasoning_effort response_format
    structured_outputs guided_json guided_regex guided_choice json_schema regex tools tool_choice parallel_tool_calls
    include_reasoning
""".split()
# A line of a job, and a body with OpenAI's fields.
LINE = frozenset([*COMMON, *"id prompt messages prompt_token_ids turns max_new_tokens logprobs metadata".split()])
BODY = frozenset([*COMMON, *"prompt messages logprobs top_logprobs".split()])

# Accepted with any value: what they ask for is no part of an answer, or is done for every request.
INERT = frozenset(
    """
    model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention verbosity request_id session_id rid priority cache_salt include_obfuscation prediction
    spaces_between_special_tokens
    return_meta_info stream_options mm_processor_kwargs media_io_kwargs return_cached_tokens_details extra_key
    data_parallel_rank cache_prompt keep_alive id_slot timings_per_token return_progress usage
    """.split()
)
# Accepted with a value that changes nothing.
_NEUTRAL: list[tuple[tuple[Any, ...], str]] = [
    (
        (False,),
        "stream echo continue_final_message include_stop_str_in_output no_stop_trim return_token_ids "
        "return_tokens_as_token_ids return_hidden_states use_beam_search return_routed_experts",
    ),
    ((1,), "best_of length_penalty typical_p tfs_z"),
    (("",), "suffix"),
    (({}, []), "logit_bias"),
    ((["text"], []), "modalities"),
    (([],), "functions transforms plugins bad_words allowed_token_ids logits_processors documents"),
    (("none", "auto"), "function_call"),
    ((True,), "separate_reasoning stream_reasoning skip_special_tokens add_generation_prompt return_text_in_logprobs"),
    ((0,), "top_a mirostat dry_multiplier xtc_probability dynatemp_range prompt_logprobs"),
    ((-1,), "top_n_sigma"),
    (({},), "session_params custom_params web_search_options"),
]
NEUTRAL = {name: values for values, names in _NEUTRAL for name in names.split()}
_INSTEAD = {"functions": "use tools", "function_call": "use tool_choice"}
# Known from other servers, and not here with any value.
UNSUPPORTED = frozenset(
    """
    audio moderation guided_grammar guided_decoding_backend guided_whitespace_pattern guided_json_object ebnf grammar
    structural_tag truncate_prompt_tokens lora_path
    adapter early_stopping diversity_penalty num_beams min_new_tokens logit_processor custom_logit_processor images
    image_data video_data input_ids bootstrap_host kv_transfer_params vllm_xargs chat_template add_special_tokens
    stop_regex reasoning thinking enable_thinking input_embeds n_predict
    """.split()
)


def check_fields(row: Fields, known: Collection[str]) -> None:
    """Checks the names of a request's fields, and the values of those that may only have a neutral one.

    Args:
        known: fields that the caller reads.

    Raises:
        RequestError: a field that is unknown, or is known elsewhere and would change the answer.
    """
    for name, value in row.items():
        if value is None or name in known or name in INERT:
            continue
        if name == "best_of" and value == row.get("n"):
            continue
        if name in NEUTRAL:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
                instead = _INSTEAD.get(name, "leave it out")
                raise RequestError("unsupported_parameter", f"{name} {value!r:.60} is not supported; {instead}", name)
        elif name in UNSUPPORTED:
            raise RequestError("unsupported_parameter", f"{name} is not supported; leave it out")
        else:
            raise RequestError("unsupported_parameter", _unknown(name, known))


def _unknown(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, [*known, *NEUTRAL], 1)
    hint = f"the nearest is {nearest[0]!r}" if nearest else "it is not ignored, since it might change the answer"
    room = "; data of your own goes into metadata" if "id" in known else ""
    return f"unknown parameter {name!r:.60}; {hint}{room}"


def flag(row: Fields, name: str) -> bool | None:
    """A field that is true, false, or absent; raises RequestError for anything else."""
    value = row.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"{name} must be true or false, got {value!r:.60}", name)
    return value


def token_budget(row: Fields) -> int | None:
    """The most tokens that a request asks for, under any of its names; None if it does not say.

    Raises:
        RequestError: it is no positive integer, or two names disagree.
    """
    names = ("max_new_tokens", "max_completion_tokens", "max_tokens")
    given = {name: row[name] for name in names if row.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int or not 1 <= value < 2**63:
            raise invalid(f"{name} must be a positive integer, got {value!r:.60}")
    if len(set(given.values())) > 1:
        raise invalid(f"these must not differ: {given}")
    return next(iter(given.values()), None)
