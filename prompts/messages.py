"""Turns as a chat template takes them. Pure.

Templates differ in what they expect of a tool call (arguments as an object or as JSON in a string,
no content or an empty one) and in the name of the reasoning field. `MessageForm` says what one
template takes; `prompts.tokenizer` finds it out by rendering `PROBE_TURNS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import orjson

from prompts.conversation_parser import REASONING_KEYS, ChatTurn
from prompts.tools import ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageForm:
    """What one chat template takes."""

    takes_tool_calls: bool = False
    arguments_as_text: bool = False
    #: Content of a turn that has tool calls only.
    empty_content: str | None = ""
    reasoning_key: str = REASONING_KEYS[0]
    takes_reasoning: bool = False


#: In order of preference: as SGLang and transformers themselves hand tool calls to a template.
TOOL_FORMS: Final = tuple(
    MessageForm(takes_tool_calls=True, arguments_as_text=as_text, empty_content=empty)
    for as_text, empty in product((False, True), ("", None))
)

PROBE_TOOL: Final = "probe_tool"
PROBE_DEFINITION: Final = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
PROBE_THOUGHT: Final = "probe_thought"
#: Some templates want an id of nine letters, some take the tool's name from it.
PROBE_IDS: Final = ("a1b2c3d4e", f"functions.{PROBE_TOOL}:0")


def as_messages(turns: Sequence[ChatTurn], form: MessageForm) -> list[dict[str, Any]]:
    """One dict a turn, with the keys that the turn has a value for."""
    return [_message(turn, form) for turn in turns]


def _message(turn: ChatTurn, form: MessageForm) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning is not None:
        message[form.reasoning_key] = turn.reasoning
    if turn.tool_calls:
        if not turn.content:
            message["content"] = form.empty_content
        message["tool_calls"] = [_call(call, form) for call in turn.tool_calls]
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _call(call: ToolCall, form: MessageForm) -> dict[str, Any]:
    arguments: object = call.arguments
    if form.arguments_as_text:
        arguments = call.text if call.text else orjson.dumps(call.arguments).decode()
    function = {"name": call.name, "arguments": arguments}
    document: dict[str, Any] = {"type": "function", "function": function}
    return document if call.id is None else {"id": call.id, **document}


def probe_turns(call_id: str) -> list[ChatTurn]:
    """A conversation with a tool call."""
    call = ToolCall(name=PROBE_TOOL, arguments={"probe_key": "probe_value"}, id=call_id)
    return [
        ChatTurn(role="user", content="Hi"),
        ChatTurn(role="assistant", content="", tool_calls=(call,)),
        ChatTurn(role="tool", content="probe_result", name=PROBE_TOOL, tool_call_id=call_id),
    ]


def shows_tool_call(text: str) -> bool:
    """Whether a rendering of `probe_turns` writes the call as a model would: as JSON, or taken
    apart; not as Python writes a dict, and not as JSON within JSON."""
    return (
        PROBE_TOOL in text
        and "probe_value" in text
        and "'probe_key'" not in text
        and '\\"probe_key\\"' not in text
    )
