"""The fields of a job's records."""

ALWAYS = ("id", "index", "error", "metadata")  # that records have
CHOSEN = ("text", "token_ids", "finish_reason", "usage", "speculation", "logprobs", "message", "turns", "samples")
INPUT = "input"  # the whole line, if it is asked for
