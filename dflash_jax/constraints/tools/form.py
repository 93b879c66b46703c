"""What an answer may be made of, as plain data."""

from dataclasses import dataclass, replace
from typing import Literal

Thinking = Literal["", "may", "opened"]


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
        choice: whether calls are left to the model, must be, or must not be.
        parallel: whether several calls may follow one another.
    """

    format: str
    thinking: Thinking = ""
    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    parallel: bool = True

    @property
    def calls(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def loosened(self) -> "Form":
        """The same where tools that are not strict may have any object as arguments."""
        return replace(self, tools=tuple(tool if tool.strict else replace(tool, strict=False) for tool in self.tools))
