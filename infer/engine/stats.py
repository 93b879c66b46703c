"""What an engine has done so far."""

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Seconds and steps since the engine was made. A step advances every busy row.

    Attributes:
        steps: device steps.
        row_steps: steps counted once per row they advanced.
        prompt_tokens, prefix_tokens: tokens of prompts that were read, and of them those copied from an earlier one.
            Answers of preempted requests that are read again count, too.
        beside_tokens: of them, those that steps of other rows have read, in `decode_seconds`.
        prompt_programs: programs that read them; each reads the weights once.
        preempted: requests that gave their pages back before they had ended, and were read again.
        decode_tokens: tokens committed by them; first tokens come from prefill and do not count.
        wall times include the transfer of tokens to the host.
    """

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    beside_tokens: int = 0
    prompt_programs: int = 0
    preempted: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """How fast rows decoded; None before the first step."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length so far; None before the first step."""
        return self.decode_tokens / self.row_steps if self.row_steps else None

    def reset(self) -> None:
        """Back to zero."""
        self.__init__()


def total(stats: Iterable[Stats]) -> Stats:
    """The sums over several engines."""
    known = [*stats]
    return Stats(**{field.name: sum(getattr(one, field.name) for one in known) for field in fields(Stats)})
