"""Tool calls of a turn and tool definitions of a row, whatever their shape. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from prompts.token_bound import parse_json
from prompts.types import Alteration, RowError, RowReason, kind_of

#: How data sets write "nothing" where a column must have a value.
NOTHING: Final[tuple[object, ...]] = (None, "", [], {}, "[]", "{}", "null")

TOOL_FIELDS: Final = ("tools", "functions")
CALL_KEYS: Final = ("tool_calls", "function_call")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that an assistant turn makes."""

    name: str
    arguments: Mapping[str, Any]
    text: str | None = None  # the arguments as the row wrote them, where it wrote a string
    id: str | None = None


def read_tool_calls(
    where: str, turn: Mapping[str, Any], alterations: set[Alteration]
) -> tuple[ToolCall, ...]:
    """The calls in a turn's `tool_calls` or, as of old, its one `function_call`.

    Raises `RowError` (bad_tool_call, conflicting_fields): arguments that are no JSON object are
    refused, never replaced.
    """
    found = {key: turn[key] for key in CALL_KEYS if turn.get(key) not in NOTHING}
    if not found:
        return ()
    if len(found) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"{where}: both {' and '.join(found)}")
    ((key, value),) = found.items()
    value = _parsed(f"{where}: {key}", value)
    if key == "function_call":
        alterations.add(Alteration.FUNCTION_CALL_CONVERTED)
        value = [value]
    if not isinstance(value, list):
        raise _bad(f"{where}: {key} is {kind_of(value)}, not a list")
    return tuple(_call(f"{where}: {key}[{index}]", call) for index, call in enumerate(value))


def _call(where: str, call: object) -> ToolCall:
    if not isinstance(call, dict):
        raise _bad(f"{where} is {kind_of(call)}, not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise _bad(f"{where} has no function name")
    if not name:
        raise _bad(f"{where} has an empty function name")
    written = function.get("arguments")
    text = written if isinstance(written, str) else None
    arguments = {} if written is None or written == "" else _parsed(f"{where}: arguments", written)
    if not isinstance(arguments, dict):
        raise _bad(f"{where}: arguments are {kind_of(arguments)}, not an object")
    call_id = call.get("id")
    return ToolCall(
        name=name,
        arguments=arguments,
        text=text,
        id=call_id if isinstance(call_id, str) else None,
    )


def read_tools(row: Mapping[str, Any], alterations: set[Alteration]) -> tuple[Any, ...]:
    """The row's tool definitions as chat templates take them. Raises `RowError`."""
    found = {name: row[name] for name in TOOL_FIELDS if row.get(name) not in NOTHING}
    if not found and (tools := _metadata_tools(row)) not in NOTHING:
        alterations.add(Alteration.TOOLS_FROM_METADATA)
        found = {"metadata.tools": tools}
    if not found:
        return ()
    if len(found) > 1:
        raise RowError(RowReason.CONFLICTING_FIELDS, f"both {' and '.join(found)} are there")
    ((name, value),) = found.items()
    value = _parsed(name, value)
    if not isinstance(value, list):
        raise _bad(f"{name} is {kind_of(value)}, not a list")
    return tuple(_tool(f"{name}[{index}]", tool, alterations) for index, tool in enumerate(value))


def _tool(where: str, tool: object, alterations: set[Alteration]) -> Any:
    tool = _parsed(where, tool)
    if isinstance(tool, dict) and isinstance(tool.get("name"), str) and "function" not in tool:
        # Templates read `tool.function`; bare definitions are an older habit.
        alterations.add(Alteration.TOOLS_WRAPPED)
        return {"type": "function", "function": tool}
    if not isinstance(tool, dict) or not tool_name(tool):
        raise _bad(f"{where} has no name")
    return tool


def tool_name(tool: Any) -> str:
    """The name in a definition of the usual shape, or nothing."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _metadata_tools(row: Mapping[str, Any]) -> object:
    # Nemotron v1 keeps a tool-calling row's definitions in a column of JSON.
    metadata = row.get("metadata")
    if isinstance(metadata, str) and '"tools"' in metadata:
        try:
            metadata = parse_json(metadata)
        except orjson.JSONDecodeError:
            return None
    return metadata.get("tools") if isinstance(metadata, dict) else None


def _parsed(where: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except orjson.JSONDecodeError as exc:
        raise _bad(f"{where}: a string that is no JSON ({exc.msg} at character {exc.pos})") from exc


def _bad(detail: str) -> RowError:
    return RowError(RowReason.BAD_TOOL_CALL, detail)
