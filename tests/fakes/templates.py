"""Chat templates that write what the published ones of eight families write, in words of our own.

Each names the template that it follows, and that one's licence. `tests/oracle/test_templates.py` compares with the
published ones where they are at hand.
"""

from typing import NamedTuple


class Template(NamedTuple):
    """A chat template.

    Attributes:
        source, licence: of the published template.
        text: in Jinja.
        end: the token that ends an answer with calls.
        published: file name under which llama.cpp keeps the published one.
    """

    source: str
    licence: str
    text: str
    end: str = "<|im_end|>"
    published: str = ""


_CHATML_TOOLS = """{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content -%}
{%- set rest = messages[1:] -%}{%- else -%}{%- set said = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- if said or tools -%}<|im_start|>system
{{ said }}{% if tools %}

Tools:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
{% endif %}<|im_end|>
{% endif %}"""
_CHATML_END = """{%- elif m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}{%- endfor -%}"""

QWEN3 = Template(
    "Qwen/Qwen3-8B, tokenizer_config.json",
    "Apache-2.0",
    _CHATML_TOOLS
    + """{%- for m in rest -%}{%- if m.role == 'assistant' -%}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
"""
    + _CHATML_END
    + """{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{%- endif -%}""",
    published="Qwen-Qwen3-0.6B",
)

QWEN3_CODER = Template(
    "Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja",
    "Apache-2.0",
    _CHATML_TOOLS
    + """{%- for m in rest -%}{%- if m.role == 'assistant' -%}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '\n\n' if m.content else '' }}<tool_call>
<function={{ c.function.name }}>
{% for name, value in c.function.arguments.items() -%}
<parameter={{ name }}>
{{ value | tojson if value is mapping or value is iterable and value is not string else value }}
</parameter>
{% endfor -%}
</function>
</tool_call>{% endfor %}<|im_end|>
"""
    + _CHATML_END
    + """{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}""",
    published="Qwen3-Coder",
)

LLAMA3 = Template(
    "meta-llama/Llama-3.1-8B-Instruct, tokenizer_config.json",
    "Llama 3.1 Community License",
    """<|begin_of_text|>{%- macro head(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro -%}
{%- if tools -%}{{ head('system') }}Environment: ipython
A call is {"name": function, "parameters": arguments}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|eot_id|>{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}{%- if m.tool_calls | length > 1 -%}{{ raise_exception('one call a message') }}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{ head('assistant') }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else -%}{{ head('ipython' if m.role == 'tool' else m.role) }}{{ m.content }}{%- endif -%}<|eot_id|>
{%- endfor -%}{%- if add_generation_prompt -%}{{ head('assistant') }}{%- endif -%}""",
    "<|eot_id|>",
    published="meta-llama-Llama-3.1-8B-Instruct",
)

GPT_OSS = Template(
    "openai/gpt-oss-20b, chat_template.jinja",
    "Apache-2.0",
    """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if tools -%}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|end|>{%- endif -%}
{%- set last = namespace(name='') -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.tool_calls -%}{%- set call = m.tool_calls[0].function -%}{%- set last.name = call.name -%}
{%- if m.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}
{{ '<|start|>assistant to=functions.' + call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ '<|start|>functions.' + last.name + ' to=assistant' }}<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    "<|call|>",
    published="openai-gpt-oss-120b",
)

KIMI_K2 = Template(
    "moonshotai/Kimi-K2-Instruct, chat_template.jinja",
    "Modified MIT",
    """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|im_user|>user<|im_middle|>
{%- elif m.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
{%- else -%}<|im_system|>{{ m.role }}<|im_middle|>{%- endif -%}
{%- if m.role == 'tool' -%}## Return of {{ m.tool_call_id }}
{% endif -%}{{ m.content }}
{%- if m.tool_calls -%}<|tool_calls_section_begin|>{%- for c in m.tool_calls -%}<|tool_call_begin|>{{ c.id }}
{%- raw -%}<|tool_call_argument_begin|>{%- endraw -%}{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
    published="moonshotai-Kimi-K2",
)

MINIMAX_M2 = Template(
    "MiniMaxAI/MiniMax-M2, chat_template.jinja",
    "MIT",
    """{%- if tools -%}]~!b[]~b]system
<tools>{% for tool in tools %}
<tool>{{ tool.function | tojson }}</tool>{% endfor %}
</tools>[e~[
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}]~b]ai
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for c in m.tool_calls %}
{{- '' }}<invoke name="{{ c.function.name }}">
{% for name, value in c.function.arguments.items() %}<parameter name="{{ name }}">
{%- if value is string -%}{{ value }}{%- else -%}{{ value | tojson }}{%- endif -%}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% elif m.role == 'tool' -%}]~b]tool
<response>{{ m.content }}</response>[e~[
{% else -%}]~b]{{ m.role }}
{{ m.content }}[e~[
{% endif -%}{%- endfor -%}{%- if add_generation_prompt -%}]~b]ai
<think>
{% endif -%}""",
    "[e~[",
    published="MiniMax-M2",
)

GEMMA4 = Template(
    "google/gemma-4-31B-it, chat_template.jinja",
    "Apache-2.0",
    """{%- macro write(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}{ {%- for k, x in v | dictsort -%}{{ k }}:{{ write(x) }}
{%- if not loop.last -%},{%- endif -%}{%- endfor -%} }
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is iterable -%}[{%- for x in v -%}{{ write(x) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}
{%- if tools -%}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}
{{- write(tool.function.parameters) }}<tool|>{% endfor %}<turn|>
{% endif -%}
{%- set ns = namespace(open=false) -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|tool_response>response:{{ m.name or 'f' }}{value:{{ write(m.content) }}}<tool_response|>
{%- elif m.role == 'assistant' -%}<|turn>model
{% if m.reasoning_content %}<|channel>thought
{{ m.reasoning_content }}
<channel|>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] -%}<|tool_call>call:{{ c.function.name }}
{{- write(c.function.arguments) }}<tool_call|>{%- endfor -%}
{%- if not m.tool_calls -%}<turn|>
{% endif -%}
{%- else -%}<|turn>{{ m.role }}
{{ m.content }}<turn|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|turn>model
{% if enable_thinking is defined and not enable_thinking %}<|channel>thought
<channel|>{% endif -%}{%- endif -%}""",
    "<|tool_response>",
    published="google-gemma-4-31B-it",
)

SMOLLM2 = Template(
    "HuggingFaceTB/SmolLM2-135M-Instruct, tokenizer_config.json",
    "Apache-2.0",
    """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are SmolLM.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
)

TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3_coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "gpt_oss": GPT_OSS,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "gemma4": GEMMA4,
    "smollm2": SMOLLM2,
}
