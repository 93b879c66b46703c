"""What an answer may be made of, as plain data."""

from dataclasses import dataclass, field, replace
from typing import Literal

Thinking = Literal["", "may", "opened"]
Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of the function.
        parameters: schema of its arguments, as JSON; "" is none.
        strict: whether its schema must be enforced. None enforces it where that is possible; False asks for any object.
    """

    name: str
    parameters: str = ""
    strict: bool | None = None


@dataclass(frozen=True)
class Form:
    """The parts of an answer.

    Attributes:
        format: name of the format that the family writes (see `formats.FORMATS`).
        thinking: whether it may begin with reasoning, or the prompt has opened that already.
        tools: that may be called.
        choice: whether calls are left to the model, must be, or must not be. Of a named function there is one call.
        parallel: whether several calls may follow one another.
        reasoning: whether the reader of the answer is shown its reasoning.
    """

    format: str
    thinking: Thinking = ""
    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    parallel: bool = True
    reasoning: bool = field(default=True, compare=False)

    @property
    def calls(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is one call at least."""
        return self.choice in ("required", "named")

    @property
    def several(self) -> bool:
        """Whether it may have more than one call."""
        return self.parallel and self.choice != "named"

    @property
    def loosened(self) -> "Form":
        """The same where tools that are not strict may have any object as arguments."""
        return replace(self, tools=tuple(tool if tool.strict else replace(tool, strict=False) for tool in self.tools))
