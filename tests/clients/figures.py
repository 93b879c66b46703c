"""What a client says of its run, and what the server counted meanwhile."""

import time
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Report:
    """What a client says of its run; None is what it says nothing about.

    Attributes:
        completed: requests that it counts as answered.
        prompt_tokens: of these requests.
        output_tokens: of their answers.
        acceptance: tokens per decoding step.
        cached_tokens: prompt tokens that were in the server's cache.
        warm_up: tokens of answers that are in none of the other figures.
        since_start: whether `acceptance` is that of all steps since the server's start, and not only of the run.
        expected_acceptance: what `acceptance` must be, where it is no mean over steps.
        requests_each: requests that a question takes.
    """

    completed: int
    prompt_tokens: int | None
    output_tokens: int
    acceptance: float | None = None
    cached_tokens: int | None = None
    warm_up: int = 0
    since_start: bool = False
    expected_acceptance: float | None = None
    requests_each: int = 1


def counted(url: str) -> dict[str, float]:
    """The figures of /metrics, by name, once no request is in progress; those with labels are summed."""
    while True:
        figures: dict[str, float] = {}
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            for family in text_string_to_metric_families(response.read().decode()):
                for sample in family.samples:
                    figures[sample.name] = figures.get(sample.name, 0.0) + sample.value
        if not figures["dflash_slots_busy"] and not figures["dflash_requests_waiting"]:
            return figures
        time.sleep(0.05)


def differences(report: Report, requests: int, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What a client reports otherwise than the engine counted.

    Args:
        requests: of the run.
        before, after: what `counted` found before and after it.
    """
    grown = lambda name: after[name] - before[name]
    count = after.__getitem__ if report.since_start else grown
    acceptance = report.expected_acceptance or count("dflash_step_tokens_total") / count("dflash_steps_total")
    expected = {
        "requests": (report.completed, requests),
        "tokens": (report.output_tokens + report.warm_up, grown("dflash_generated_tokens_total")),
        "prompt tokens": (report.prompt_tokens, grown("dflash_prompt_tokens_total")),
        "cached tokens": (report.cached_tokens, grown("dflash_prompt_tokens_copied_total")),
        "tokens per step": (report.acceptance, acceptance),
    }
    return [
        f"{said:g} {name}, expected {true:g}"
        for name, (said, true) in expected.items()
        if said is not None and abs(said - true) > 1e-6
    ]
