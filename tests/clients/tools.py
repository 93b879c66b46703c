"""Runs that ask for calls of functions, of a server whose chat template writes tools."""

import json

from tests.clients.runs import CHAT, aiperf, guidellm, vllm

TOOLS = [  # whose arguments are bounded, so that answers end
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.title()}s numbers.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "numbers": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 9999},
                        "minItems": 1,
                        "maxItems": 4,
                    },
                    "unit": {"enum": ["apples", "coins", "minutes"]},
                },
                "required": ["numbers", "unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "multiply")
]
CALLING = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
ANSWERED = {"tools": json.dumps(TOOLS), "tool_response": '{"result": 7}'}
WITH_TOOLS = {
    "guidellm, tools": lambda setting: guidellm(setting, CHAT, ANSWERED, parallel_tool_calls=False),
    "aiperf, tools": lambda setting: aiperf(setting, CHAT, **CALLING),
    "vllm bench serve, tools": lambda setting: vllm(setting, CHAT, **CALLING),
}
