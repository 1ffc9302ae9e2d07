"""Model families as folders of a tokenizer and a chat template: for tests, and for the table of what is found out about them.

The vocabularies are small and made on the spot; added tokens, their flags, ends of turn and the behaviour of the templates
follow what each family publishes, the templates' wording is our own. With `real=True` the vocabulary is the published one, for
families whose PyPI packages ship it (scripts/vocabularies.py); added tokens that it lacks are appended.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_tandem.models.chat import Chat
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.turns import FIELDS
from slime_tandem.types import AuthorRun, Message, Prompt, SampleKey, TandemSample

CORPUS = [
    "What is 12 + 345? The answer is 357, and 7*8 = 56.\n\nThen the quick brown fox sat down.  So it is.\n",
    "if x:\n    y = f(x)\n    return {'a': [1, 2]}\n",
    "Der Fuchs springt; \u4f60\u597d\u4e16\u754c \U0001f680 caf\u00e9 <b>bold</b> system user assistant tool model.\n",
] * 12

# ---- templates: our own wording of the published behaviour ----

_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CHATML_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else sys)
 + '\\nTools:\\n<tools>' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif sys %}{{ '<|im_start|>system\\n' + sys + '<|im_end|>\\n' }}{% endif %}"""
_CHATML_CALLS = """{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": '
 + (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}"""
_CHATML_RESULT = """{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""

QWEN25 = (
    "{% set sys = 'You are a helpful assistant.' %}"
    + _CHATML_TOOLS
    + """{% for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}"""
    + _CHATML_RESULT
    + "{% elif m.tool_calls %}{{ '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}"
    + _CHATML_CALLS
    + "{{ '<|im_end|>\\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
    + _GENERATE
)

_QWEN3_TURNS = (
    """{% set sys = '' %}"""
    + _CHATML_TOOLS
    + """{% set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}"""
    + _CHATML_RESULT
    + """{% elif m.role == 'assistant' %}
{%- set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > ns.query and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}"""
    + _CHATML_CALLS
    + "{{ '<|im_end|>\\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
)
QWEN3 = (
    _QWEN3_TURNS
    + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
)
QWEN3_THINKING = _QWEN3_TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"

LLAMA3 = """{{ bos_token }}{% set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday is a day.\\n\\n' + system + '<|eot_id|>' }}
{%- set ns = namespace(shown=false) %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}{% set c = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + c.name + '", "parameters": ' }}
{{- (c.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and m.role == 'user' and not ns.shown %}{% set ns.shown = true %}{{ 'Functions:\\n' }}
{%- for t in tools %}{{ (t | tojson) + '\\n\\n' }}{% endfor %}{% endif %}
{{- (m.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL_V1 = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

_MISTRAL_NEW = """{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set ns = namespace(last=-1, turn=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- for id in ([m.tool_call_id] if m.role == 'tool' else (m.tool_calls or []) | map(attribute='id')) %}
{%- if id is not string or id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}{% endfor %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]S' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]S' + (system + '\\n\\n' if system and loop.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]S{"content": ' + (m.content | string) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '[TOOL_CALLS]S[' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ 'S' + (m.content | trim) + eos_token }}
{%- else %}{{ raise_exception('only user, assistant, system and tool') }}{% endif %}{% endfor %}"""
MISTRAL_V3 = _MISTRAL_NEW.replace("]S", "] ").replace("{{ 'S' +", "{{ ' ' +")
TEKKEN = _MISTRAL_NEW.replace("]S", "]").replace("{{ 'S' + (m.content | trim)", "{{ m.content")

GEMMA3 = """{{ bos_token }}{% set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
{{- (m.content | trim) + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GLM4 = """{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\nTools:' }}
{%- for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{% for c in m.tool_calls %}
{{- '<|assistant|>' + c.function.name + '\\n' + (c.function.arguments | tojson) }}{% endfor %}
{%- else %}{{ '<|' + {'tool': 'observation'}.get(m.role, m.role) + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

GLM45 = """{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\nTools:' }}
{%- for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{% endif %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|assistant|>\\n<think>' + (thought.strip() if loop.index0 > ns.query else '') + '</think>' }}
{{- '\\n' + content.strip() if content.strip() else '' }}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name + '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{{- ('<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '') + '\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

_DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<\uff5ctool\u2581outputs\u2581begin\uff5c>' + m.content + '<\uff5ctool\u2581outputs\u2581end\uff5c>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<\uff5cAssistant\uff5c>' + (m.content or '') + '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}
{{- m.tool_calls[0].function.name + '<\uff5ctool\u2581calls\u2581end\uff5c><\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- elif m.role == 'assistant' %}{% set content = m.content %}THOUGHT
{{- ('' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<\uff5cAssistant\uff5c>') + content }}
{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<\uff5cAssistant\uff5c>OPEN' }}{% endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace("THOUGHT", "").replace("OPEN", "")
DEEPSEEK_R1 = _DEEPSEEK.replace(
    "THOUGHT", "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
).replace("OPEN", "<think>\\n")

PHI4 = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM.<|im_end|>\\n' }}{% endif %}"
    + _CHATML_TURN
    + "{% endfor %}"
    + _GENERATE
)
SMOLLM3 = """{% set think = enable_thinking is not defined or enable_thinking %}
{{- '<|im_start|>system\\nReasoning: ' + ('/think' if think else '/no_think') + '\\n' }}
{{- (messages[0].content if messages[0].role == 'system' else '') + '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ('' if think else '<think>\\n\\n</think>\\n') + m.content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('' if think else '<think>\\n\\n</think>\\n') }}{% endif %}"""

HARMONY = """{{ '<|start|>system<|message|>You are a model.\\nReasoning: medium<|end|>' }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}{{ '<|start|>developer<|message|>' }}
{{- messages[0].content if messages[0].role == 'system' else '' }}
{%- if tools %}{{ '\\n\\nnamespace functions {' }}
{%- for t in tools %}{{ '\\ntype ' + t.function.name + ' = () => any;' }}{% endfor %}
{{- '\\n}' }}{% endif %}{{ '<|end|>' }}{% endif %}
{%- set ns = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' and m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('a tool message without a call before it') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """How one family's folder is made. `added`: surfaces of added tokens, `plain` those without the flag `special`.

    `eos`: tokenizer_config's eos_token; `ends`: generation_config's, None: there is no such file. `kwargs`: variables of the
    template with which this entry is read. `real`: the published vocabulary, a name of scripts/vocabularies.py.
    """

    template: str
    added: tuple[str, ...]
    eos: str
    ends: tuple[str, ...] | None
    bos: str | None = None
    plain: tuple[str, ...] = ()
    vocabulary: Literal["bytes", "gemma", "metaspace", "prepend"] = "bytes"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    nfc: bool = False
    digits: bool = False
    size: int = 400
    real: str | None = None


_QWEN = {
    "added": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "eos": "<|im_end|>",
    "ends": ("<|im_end|>", "<|endoftext|>"),
    "nfc": True,
    "digits": True,
    "real": "qwen",
}
_CALLS = ("<tool_call>", "</tool_call>")
_RESULTS = ("<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_DEEPSEEK_TOKENS: dict[str, Any] = {
    "bos": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "added": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "eos": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "ends": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "plain": (
        "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", *_THINK,
        *(f"<\uff5ctool\u2581{kind}\u2581{side}\uff5c>" for kind in ("calls", "outputs") for side in ("begin", "end")),
    ),
    "size": 420,
    "real": "deepseek",
}  # fmt: skip
_GLM: dict[str, Any] = {
    "added": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "eos": "<|endoftext|>",
    "ends": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "size": 440,
}

_MISTRAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(QWEN25, plain=_CALLS, **_QWEN),
    "qwen3": Family(QWEN3, plain=(*_CALLS, *_RESULTS, *_THINK), **_QWEN),
    "qwen3-nothink": Family(QWEN3, plain=(*_CALLS, *_RESULTS, *_THINK), kwargs={"enable_thinking": False}, **_QWEN),
    "qwen3-thinking": Family(QWEN3_THINKING, plain=(*_CALLS, *_RESULTS, *_THINK), **_QWEN),
    "llama3": Family(
        LLAMA3,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        size=430,
        real="llama3",
    ),
    "mistral-v1": Family(
        MISTRAL_V1, ("<unk>", "<s>", "</s>"), "</s>", ("</s>",), "<s>", vocabulary="prepend", real="mistral-v1"
    ),
    "mistral-v3": Family(
        MISTRAL_V3,
        _MISTRAL_TOKENS,
        "</s>",
        ("</s>",),
        "<s>",
        vocabulary="metaspace",
        real="mistral-v3",
    ),
    "mistral-tekken": Family(
        TEKKEN,
        _MISTRAL_TOKENS,
        "</s>",
        ("</s>",),
        "<s>",
        size=410,
        real="tekken",
    ),
    "gemma3": Family(
        GEMMA3,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        "<bos>",
        plain=(
            *("[multimodal]", "<table>", "</s>", "</code>"),
            *("\n" * n for n in range(1, 32)),
            *("\u2581" * n for n in range(2, 32)),
            *("\t" * n for n in range(1, 32)),
        ),
        vocabulary="gemma",
        real="gemma3",
    ),
    "glm4": Family(GLM4, **_GLM),
    "glm4.5": Family(GLM45, plain=(*_THINK, *_CALLS, *_RESULTS), **_GLM),
    "deepseek-v3": Family(DEEPSEEK_V3, **_DEEPSEEK_TOKENS),
    "deepseek-r1": Family(DEEPSEEK_R1, **_DEEPSEEK_TOKENS),
    "phi-4": Family(
        PHI4,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"),
        "<|im_end|>",
        ("<|endoftext|>", "<|im_end|>"),
        size=390,
        real="cl100k",
    ),
    "smollm2": Family(
        SMOLLM2,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ("<|im_end|>",),
        size=385,
        digits=True,
        real="smollm2",
    ),
    "smollm3": Family(
        SMOLLM3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ("<|im_end|>",),
        plain=_THINK,
        size=435,
    ),
    "gpt-oss": Family(
        HARMONY,
        (
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        size=450,
        real="o200k",
    ),
}


def _byte_level(family: Family) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    if family.nfc:
        tok.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if family.digits else []
    tok.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=family.size, initial_alphabet=alphabet, show_progress=False)
    )
    return tok


@cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def _sentence_piece(family: Family) -> Tokenizer:
    known, merges = _pieces()
    pieces = [*family.added, *family.plain, *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [p for p in sorted(known, key=lambda p: known[p]) if p not in pieces]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return _spaced(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True), family)


def _spaced(model: models.BPE, family: Family) -> Tokenizer:
    """A tokenizer in which U+2581 stands for a space, with the family's way of putting one in front."""
    tok = Tokenizer(model)
    replace = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if family.vocabulary == "prepend":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    elif family.vocabulary == "metaspace":
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=False)
    else:
        tok.normalizer = replace
    if family.vocabulary != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    tok.decoder = decoders.Sequence(steps)
    return tok


def tokenizer_of(family: Family, backend: Tokenizer | None = None) -> PreTrainedTokenizerFast:
    """The family's tokenizer with its template; `backend`: another vocabulary than the small one."""
    if backend is None:
        backend = _byte_level(family) if family.vocabulary == "bytes" else _sentence_piece(family)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.added])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        unk_token="<unk>" if "<unk>" in family.added else None,
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = family.template
    return hf


def make_folder(name: str, root: Path, backend: Tokenizer | None = None) -> Path:
    """`root/name` with the family's tokenizer, template and generation config (no weights); made once."""
    family, folder = FAMILIES[name], root / name
    if not (folder / "tokenizer.json").exists():
        hf = tokenizer_of(family, backend)
        hf.save_pretrained(folder)
        if family.ends is not None:
            ends = [hf.convert_tokens_to_ids(t) for t in family.ends]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder


def make_model(name: str, root: Path, *, seed: int, kind: Literal["qwen3", "llama"]) -> Path:
    """`root/name-model`: the family's small tokenizer and a tiny random model that likes to end its turns."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    tokenizer, _ = load(name, root)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer.tokens.table),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.hf.eos_token_id,
        "pad_token_id": tokenizer.hf.pad_token_id,
    }
    ends = sorted(tokenizer.tokens.eos_ids)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
        model.get_input_embeddings().weight.mul_(8)
        model.get_input_embeddings().weight[ends] *= 2.0
    model.generation_config = GenerationConfig(eos_token_id=ends)
    folder = root / f"{name}-model"
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    return folder


# ---- conversations ----


@dataclass(frozen=True)
class Said:
    """One turn of a model: its thinking ("" for none) and its answer."""

    answer: str
    thought: str = ""


@dataclass(frozen=True)
class Conversation:
    """A prompt, the model's turns, and the messages between them; `ended`: the last turn has its end."""

    messages: tuple[Message, ...]
    turns: tuple[Said, ...]
    between: tuple[tuple[Message, ...], ...] = ()
    ended: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()


def load(name: str, root: Path, backend: Tokenizer | None = None) -> tuple[ModelTokenizer, Chat]:
    """A family's tokenizer, and its template with the variables of its entry."""
    tokenizer = ModelTokenizer.load(make_folder(name, root, backend))
    return tokenizer, tokenizer.chat(FAMILIES[name].kwargs)


def sample_of(student: ModelTokenizer, chat: Chat, told: Conversation) -> TandemSample:
    """The conversation as this model would have sampled it, in its own markup and ids."""
    t, ids = chat.turns, list[int]()
    inserted: list[tuple[int, int]] = []
    for k, turn in enumerate(told.turns):
        text, before = (
            turn.answer,
            ids[slice(*inserted[-1])] if inserted else chat.render(told.messages, told.tools or None),
        )
        opened = t.think is not None and spelt(student.tokens, before).endswith(t.think[0].encode())
        if not turn.thought:
            text = (t.think[1] if opened and t.think else chat.own_begin) + text
        elif t.think is not None:
            opening = "" if opened else t.think[0]
            text = opening + turn.thought + t.think[1] + text
        else:
            text = f"<think>\n{turn.thought}\n</think>\n\n{text}"
        ids += _sampled(chat, text)
        if k < len(told.between):
            bridge = chat.bridge(told.between[k])
            # Where the next role's marker ends turns, a model says by it whom it asks.
            ids.append(bridge[0] if bridge[0] in student.tokens.eos_ids else chat.end_of_turn)
            shown = chat.next_turn(told.between[k], ids[-1])
            inserted.append((len(ids), len(ids) + len(shown)))
            ids += shown
    if told.ended:
        ids.append(chat.end_of_turn)
    n, mask = len(ids), [1] * len(ids)
    for a, b in inserted:
        mask[a:b] = [0] * (b - a)
    prompt = Prompt("p", told.messages, None, "t", {"tools": list(told.tools)} if told.tools else {})
    return TandemSample(
        SampleKey(0, 0, 0), 0, prompt, tuple(chat.render(told.messages, told.tools or None)), tuple(ids), tuple(mask),
        tuple(-1.0 * m for m in mask), "stop" if told.ended else "length", "", (AuthorRun(1, 0, n, "0"),),
        inserted=tuple(inserted), inserted_messages=told.between,
    )  # fmt: skip


def _sampled(chat: Chat, text: str) -> list[int]:
    """Ids of text as the model samples it: with the space that its tokenizer puts in front of a turn's first word."""
    return chat.encode_markup(chat.dummy_prefix + text)


def spelt(tokens: TokenBytes, ids: Sequence[int]) -> bytes:
    """What ids write, special tokens by their names."""
    return b"".join(data if (data := tokens.of(i)) is not None else tokens.names[i].encode() for i in ids)


def native(chat: Chat, told: Conversation) -> bytes:
    """The conversation as this model's own template and tokenizer write it."""
    chat_messages = [m.as_dict() for m in told.messages]
    for k, turn in enumerate(told.turns):
        said: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if turn.thought and chat.turns.think is None:
            said["content"] = f"<think>\n{turn.thought}\n</think>\n\n{turn.answer}"
        elif turn.thought:
            said |= dict.fromkeys(FIELDS, turn.thought)
        chat_messages += [said, *(m.as_dict() for m in (told.between[k] if k < len(told.between) else ()))]
    text = chat.template(chat_messages, generation=False, tools=told.tools or None)
    return spelt(chat.tokens, chat.hf.encode(text, add_special_tokens=False))


# ---- published vocabularies ----


def real_backend(family: Family) -> Tokenizer | None:
    """The published vocabulary of a family as `tokenizers` runs it; None where no package ships it.

    Raises FileNotFoundError as `vocabularies.load`.
    """
    import vocabularies

    if family.real is None:
        return None
    name = family.real
    path = vocabularies.cache_dir() / vocabularies.FILES[name]
    if path.suffix == ".model":
        spaces = {"gemma": "replace", "prepend": "prepend", "metaspace": "always"}[family.vocabulary]
        made: Tokenizer = vocabularies.from_sentencepiece(path.name, spaces=spaces).backend_tokenizer
        return made
    if name in vocabularies.RANK_FILES or name == "tekken":
        known = vocabularies.load(name)
        pattern = (
            json.loads(path.read_bytes())["config"]["pattern"] if name == "tekken" else vocabularies.RANK_FILES[name][0]
        )
        ranks = [data for data in known.tokens.table if data is not None]
        return _from_ranks(ranks, pattern, nfc=family.nfc)
    return Tokenizer.from_file(str(path))


def _from_ranks(ranks: Sequence[bytes], pattern: str, *, nfc: bool) -> Tokenizer:
    """Byte-level BPE from pieces in the order of their merges, as tiktoken has them."""
    from tokenizers import Regex
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    rank = {data: i for i, data in enumerate(ranks)}
    merges = []
    for data in ranks:
        if len(data) == 1:
            continue
        parts = [bytes([b]) for b in data]
        while len(parts) > 2:  # what the merges before this one make of it
            pairs = [rank.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append(tuple("".join(letters[b] for b in part) for part in parts))
    vocab = {"".join(letters[b] for b in data): i for data, i in rank.items()}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    if nfc:
        tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return tok
