"""One input row -> one `Prompt`, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from prompts.align import Encoding, mark_spans
from prompts.dialects import Conversation, Ids, Item, decode_row, label_of, read_item
from prompts.inputs import RawRow
from prompts.mask import assistant_spans
from prompts.tokenizer import ChatTokenizer
from prompts.turns import Turn
from prompts.types import BadRow, Prompt, RowError, RowReason

#: What a digest says where there is nothing to digest.
NO_DIGEST: Final = "none"

Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


class Renderer:
    """Turns rows into prompts with one model's tokenizer and chat template.

    What each kind of row gives:

    - A conversation is rendered by the chat template and tokenised once. Where the last turn is not
      the assistant's, the generation prompt follows: the model's states on what it would answer to.
      The mask is 1 on what the assistant said (see `prompts.mask`).
    - A text is tokenised as it is; nothing in it says who wrote what, so its mask is 1 throughout.
    - Ids are taken as they are, with their mask, or with 1 throughout where they have none.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        """`tokenizer`: a transformers tokenizer; without one only rows of ids give prompts."""
        self._tokenizer = None if tokenizer is None else ChatTokenizer(tokenizer)

    @classmethod
    def load(cls, path_or_name: str, *, trust_remote_code: bool = False) -> Renderer:
        """With the tokenizer of a local model folder or a hub name. Raises `TokenizerError`."""
        renderer = cls()
        renderer._tokenizer = ChatTokenizer.load(path_or_name, trust_remote_code=trust_remote_code)
        return renderer

    @property
    def tokenizer_digest(self) -> str:
        """Digest of all that decides which tokens a text gives, or "none"."""
        return NO_DIGEST if self._tokenizer is None else self._tokenizer.digest

    @property
    def template_digest(self) -> str:
        """Digest of the chat template's text, or "none"."""
        if self._tokenizer is None or self._tokenizer.template is None:
            return NO_DIGEST
        return xxhash.xxh3_128_hexdigest(self._tokenizer.template.encode())

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the tokenizer knows, added ones included; None without a tokenizer."""
        return None if self._tokenizer is None else len(self._tokenizer)

    def prompt_from(self, row: RawRow) -> Prompt | BadRow:
        """The row's prompt; never raises for what is in the row."""
        label = None
        try:
            fields = decode_row(row.data)
            label = label_of(fields)
            input_ids, loss_mask = self._tokens(read_item(fields))
        except RowError as exc:
            return BadRow(
                ordinal=row.ordinal,
                source=row.source,
                line=row.line,
                label=label,
                reason=exc.reason,
                detail=exc.detail,
            )
        return Prompt(
            ordinal=row.ordinal,
            source=row.source,
            line=row.line,
            label=label,
            input_ids=input_ids,
            loss_mask=loss_mask,
        )

    def _tokens(self, item: Item) -> Tokens:
        if isinstance(item, Ids):
            mask = item.loss_mask
            return item.input_ids, _all_ones(item.input_ids) if mask is None else mask
        if self._tokenizer is None:
            detail = "needs a tokenizer: pass --tokenizer"
            raise RowError(RowReason.RENDER_FAILED, detail)
        if isinstance(item, Conversation):
            return _conversation_tokens(self._tokenizer, item.turns)
        ids = np.array(_encode(self._tokenizer, item.text).ids, dtype=np.int32)
        return ids, _all_ones(ids)


def _conversation_tokens(tokenizer: ChatTokenizer, turns: Sequence[Turn]) -> Tokens:
    generation_prompt = turns[-1].role != "assistant"
    text = tokenizer.render(turns, generation_prompt=generation_prompt)
    _check_complete(turns, text)
    spans = assistant_spans(tokenizer, turns, text, generation_prompt=generation_prompt)
    encoding = _encode(tokenizer, text)
    return np.array(encoding.ids, dtype=np.int32), mark_spans(encoding, spans)


def _encode(tokenizer: ChatTokenizer, text: str) -> Encoding:
    encoding = tokenizer.encode(text)
    if not encoding.ids:
        raise RowError(RowReason.EMPTY_PROMPT, "no token comes out")
    if list(encoding.ids[:2]) == [tokenizer.bos_id] * 2:
        detail = (
            "the prompt begins with two BOS tokens: the template or the row writes one too many"
        )
        raise RowError(RowReason.RENDER_FAILED, detail)
    return encoding


def _check_complete(turns: Sequence[Turn], text: str) -> None:
    """Raises `RowError` where the template left out a turn that is not the assistant's.

    Templates skip roles that they do not know without a word. System turns may be moved to the
    front; a tool's answer may be written as a JSON string. The assistant's turns: `prompts.mask`.
    """
    position = 0
    for index, turn in enumerate(turns):
        content = turn.content.strip()
        if turn.role == "assistant":
            continue
        found = text.find(content, 0 if turn.role == "system" else position)
        if found < 0 and turn.role == "tool":
            content = orjson.dumps(content).decode()[1:-1]
            found = text.find(content, position)
        if found < 0:
            detail = f"turn {index} ({turn.role}) is not in the rendering: the template left it out"
            raise RowError(RowReason.RENDER_FAILED, detail)
        if turn.role != "system":
            position = found + len(content)


def _all_ones(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    return np.ones(ids.size, dtype=np.uint8)
