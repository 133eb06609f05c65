"""Small chat templates with the traits of well-known models', and a tokenizer that knows their
control tokens. Written for these tests; each says which trait of the original it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS: Final = (
    *("<s>", "</s>", "<bos>", "<eos>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)

#: Trims contents; the tool's answer comes from `ipython`; one call a turn, in place of content.
LLAMA3: Final = """\
{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for t in tools %}{{- t | tojson }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
{{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}
{{- '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

#: Shows reasoning only after the last question, and there writes an empty block where there is
#: none; puts tool results into user turns, one turn for several; takes arguments in either form;
#: `enable_thinking=false` gives the empty block to the model.
QWEN3: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set reasoning = m.reasoning_content or '' %}
{%- set content = m.content %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.question and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{%- if f.arguments is string %}{{- f.arguments }}{% else %}{{- f.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

#: As the real Qwen3 template: it cuts the content at its last `</think>`, unless a separate field
#: holds the reasoning, possibly empty.
QWEN3_FIELD: Final = QWEN3.replace(
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}",
    "{%- if m.reasoning_content is not string %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}",
).replace(
    "{%- if not reasoning and '</think>'", "{%- if m.reasoning_content is not string and '</think>'"
)

#: Drops the text before the first `</think>`; does not support a reasoning field.
DEEPSEEK_V31: Final = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
{{- '<｜Assistant｜></think>' + content + eos_token }}
{%- else %}{{- m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜></think>' }}{% endif %}"""

#: No space anywhere; wants arguments as a string and no content (none, not empty) beside calls.
DEEPSEEK_V3: Final = """\
{{- bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{- m.content }}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}"""

#: Opens the generation prompt with a tag that no finished turn has, and drops all reasoning.
DEEPSEEK_R1: Final = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{- m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""

#: A default system prompt; a call's name comes from its id; reasoning is not known.
KIMI_K2: Final = """\
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}
{%- endif %}
{%- if m.role == 'system' %}{{- '<|im_system|>system<|im_middle|>' + m.content }}
{%- elif m.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

#: An answer has no end marker: the next role's token ends it. Blocks of reasoning, empty ones in
#: earlier turns; arguments are taken apart.
GLM: Final = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n' }}{% for t in tools %}{{- t | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(question=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.question %}
{{- '<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}{{- '<think></think>' }}{% endif %}
{%- if m.content.strip() %}{{- '\\n' + m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- v if v is string else v | tojson }}{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

#: No role header and no generation prompt; the system prompt moves on to the last question.
MISTRAL: Final = """\
{{- bos_token }}
{%- set ns = namespace(question=0, system='') %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.question %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' }}
{%- if ns.system and loop.index0 == ns.question %}{{- ns.system + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if not call.id or call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

#: Calls the assistant `model`, puts the system prompt into the first question, trims.
GEMMA: Final = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% else %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- ns.system + m.content | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

#: An answer has channels; reasoning is shown until an answer was given; the last answer ends with
#: another marker than the ones before it.
GPT_OSS: Final = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}
{%- endif %}
{%- set ns = namespace(final=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and (loop.last or loop.index0 > ns.final) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson }}
{{- '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content }}
{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

#: ChatML with a default system prompt; knows no tools.
SMOLLM2: Final = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

#: As SmolLM3: the assistant's turns are in generation blocks.
GENERATION: Final = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- generation %}{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_BOS_EOS: Final = {
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>"),
    DEEPSEEK_V3: ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    DEEPSEEK_R1: ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    DEEPSEEK_V31: ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    MISTRAL: ("<s>", "</s>"),
    GEMMA: ("<bos>", "<eos>"),
    GPT_OSS: (None, "<|return|>"),
}


#: The library's class, which comes without annotations.
_BpeTrainer: Callable[..., trainers.Trainer] = trainers.BpeTrainer


def byte_level_bpe(
    text: str, special: Iterable[str], *, vocab_size: int, trim_offsets: bool = True
) -> Tokenizer:
    """A byte-level BPE with a few hundred merges, learnt from `text`, so that tokens span several
    characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = _BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 4, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return backend


@cache
def _backend() -> Tokenizer:
    text = "assistant system user tool think hello there, what is the weather? fine  thanks\n\n\n"
    return byte_level_bpe(text, CONTROL_TOKENS, vocab_size=440)


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    bos, eos = _BOS_EOS.get(template, (None, "<|im_end|>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(), bos_token=bos, eos_token=eos, chat_template=template
    )
