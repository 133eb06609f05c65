"""One input row -> one `Prompt`, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from prompts.ambient import current_moment
from prompts.assistant_spans import SpanFinder
from prompts.conversation import ConversationReader, up_to_answer
from prompts.conversation_parser import ChatTurn
from prompts.dialects import Ids, RenderedText, check_parts, decode_row, label_of, read_item
from prompts.inputs import RawRow
from prompts.reading_options import DEFAULTS, ReadingOptions
from prompts.thinking import THINK_END
from prompts.token_bound import BYTES_PER_TOKEN, NO_BOUND, TokenBound
from prompts.token_offsets import Encoding, Span, has_split_start, mark_spans
from prompts.tokenizer import ChatTokenizer
from prompts.types import Alteration, BadRow, Prompt, RowError, RowReason

#: What a digest says where there is nothing to digest.
NO_DIGEST: Final = "none"


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A row read and rendered, but not tokenised."""

    row: RawRow
    label: str | None
    text: str | None  # None where the row holds ids
    ids: Ids | None = None
    spans: Sequence[Span] | None = None  # of the text, to be trained; None: all of it
    alterations: frozenset[Alteration] = frozenset()
    has_answer: bool = False


class Renderer:
    """Turns rows into prompts with one model's tokenizer and chat template.

    What each kind of row gives:

    - A conversation is rendered by the chat template and tokenised once. Where the last turn is not
      the assistant's, the generation prompt follows: the model's states on what it would answer to.
      The mask is 1 on what the assistant said (see `prompts.assistant_spans`).
    - A text is tokenised as it is; nothing in it says who wrote what, so its mask is 1 throughout.
    - Ids are taken as they are, with their mask, or with 1 throughout where they have none.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        options: ReadingOptions = DEFAULTS,
        *,
        bound: TokenBound = NO_BOUND,
    ) -> None:
        """`tokenizer`: a transformers tokenizer; without one, only rows of ids give prompts.

        `bound`: texts far longer than it are not tokenised whole. A prompt may still exceed it.
        """
        self.options = with_moment(options)
        self.bound = bound
        self.tokenizer: ChatTokenizer | None = None
        self._finder: SpanFinder | None = None
        if tokenizer is not None:
            self._use(ChatTokenizer(tokenizer, self.options.template))

    @classmethod
    def load(
        cls,
        path_or_name: str,
        options: ReadingOptions = DEFAULTS,
        *,
        bound: TokenBound = NO_BOUND,
    ) -> Renderer:
        """With the tokenizer of a local model folder or a hub name. Raises `TokenizerError`."""
        renderer = cls(options=options, bound=bound)
        renderer._use(ChatTokenizer.load(path_or_name, renderer.options.template))
        return renderer

    def _use(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._finder = SpanFinder(tokenizer)

    @property
    def tokenizer_digest(self) -> str:
        """Digest of all that decides which tokens a text gives, or "none"."""
        return NO_DIGEST if self.tokenizer is None else self.tokenizer.digest

    @property
    def template_digest(self) -> str:
        """Digest of the chat template's text, or "none"."""
        if self.tokenizer is None or self.tokenizer.template is None:
            return NO_DIGEST
        return xxhash.xxh3_128_hexdigest(self.tokenizer.template.encode())

    @property
    def now(self) -> str | None:
        """The time that the chat template gets, in ISO 8601; None if it does not read the clock."""
        if self.tokenizer is None or not self.tokenizer.reads_clock:
            return None
        assert self.options.template.now is not None
        return self.options.template.now.isoformat()

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the tokenizer knows, added ones included; None without a tokenizer."""
        return None if self.tokenizer is None else len(self.tokenizer)

    def prompt_from(self, row: RawRow) -> Prompt | BadRow:
        """The row's prompt; never raises for what is in the row."""
        return self.prompts_from([row])[0]

    def prompts_from(self, rows: Sequence[RawRow]) -> list[Prompt | BadRow]:
        """The same for several rows, in their order.

        Step by step rather than row by row: each step runs with warm caches, which makes a quarter
        of the time.
        """
        drafts = [self._draft(row) for row in rows]
        encodings = [self._encoding(draft) for draft in drafts]
        return [
            draft if isinstance(draft, BadRow) else self._prompt(draft, encoding)
            for draft, encoding in zip(drafts, encodings, strict=True)
        ]

    def _draft(self, row: RawRow) -> _Draft | BadRow:
        label = None
        try:
            fields = decode_row(row.data)
            label = label_of(fields)
            item = read_item(fields, self.options)
            if isinstance(item, Ids):
                return _Draft(
                    row=row, label=label, text=None, ids=item, alterations=item.alterations
                )
            if self.tokenizer is None or self._finder is None:
                detail = "needs a tokenizer: pass --tokenizer"
                raise RowError(RowReason.RENDER_FAILED, detail)
            if isinstance(item, RenderedText):
                self._check_length([item.text])
                return _Draft(
                    row=row,
                    label=label,
                    text=item.text,
                    alterations=_remarks(self.tokenizer, item.text),
                )
            if row.origin.part is not None:
                check_parts(item, len(row.data))
                item = up_to_answer(item, row.origin.part)
            self._check_length(list(map(_shown_of, item.turns)))
            reader = ConversationReader(self.tokenizer, self._finder, self.options, item)
            text, spans = reader.text_and_spans()
            self._check_length([text])
        except RowError as exc:
            return _bad_row(row, label, exc)
        return _Draft(
            row=row,
            label=label,
            text=text,
            spans=spans,
            alterations=frozenset(reader.alterations),
            has_answer=bool(spans),
        )

    def _check_length(self, texts: Sequence[str]) -> None:
        """Raises `RowError` (too_long, row_too_large) if the prompt's texts alone are too long."""
        bound = self.bound
        assert self.tokenizer is not None
        if bound.keeps_beginning or bound.is_near(texts):
            return
        if len(texts) > bound.too_many or self.tokenizer.has_more_tokens(texts, bound.too_many):
            raise RowError(RowReason.TOO_LONG, f"more than {bound.too_many} tokens")
        if sum(map(len, texts)) > max(bound.max_whole_chars, BYTES_PER_TOKEN * bound.max_tokens):
            detail = f"more than {bound.max_whole_chars} characters, in few and long tokens"
            raise RowError(RowReason.ROW_TOO_LARGE, detail)

    def _encoding(self, draft: _Draft | BadRow) -> Encoding | BadRow | None:
        if isinstance(draft, BadRow) or draft.text is None or self.tokenizer is None:
            return None
        if not self.bound.keeps_beginning or self.bound.is_near([draft.text]):
            return self.tokenizer.encode(draft.text)
        try:
            return self.tokenizer.encode_beginning(draft.text, self.bound)
        except RowError as exc:
            return _bad_row(draft.row, draft.label, exc)

    def _prompt(self, draft: _Draft, encoding: Encoding | BadRow | None) -> Prompt | BadRow:
        row = draft.row
        if isinstance(encoding, BadRow):
            return encoding
        if encoding is not None and draft.spans is not None:
            spans = [span for span in draft.spans if span[0] < len(encoding.text)]
            draft = replace(draft, spans=spans)
        try:
            ids, mask = self._ids_and_mask(draft, encoding)
            alterations = set(draft.alterations)
            if encoding is not None and has_split_start(encoding, draft.spans or ()):
                alterations.add(Alteration.ANSWER_START_UNTRAINED)
        except RowError as exc:
            return _bad_row(row, draft.label, exc)
        return Prompt(
            ordinal=row.ordinal,
            origin=row.origin,
            label=draft.label,
            input_ids=ids,
            loss_mask=mask,
            alterations=tuple(sorted(alterations)),
            has_answer=draft.has_answer,
            is_beginning=encoding is not None and len(encoding.text) < len(draft.text or ""),
        )

    def _ids_and_mask(
        self, draft: _Draft, encoding: Encoding | None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        if draft.ids is not None:
            ids, mask = draft.ids.input_ids, draft.ids.loss_mask
            return ids, np.ones(ids.size, dtype=np.uint8) if mask is None else mask
        assert self.tokenizer is not None and encoding is not None
        _check_beginning(self.tokenizer, encoding)
        ids = np.array(encoding.ids, dtype=np.int32)
        if draft.spans is None:
            return ids, np.ones(ids.size, dtype=np.uint8)
        return ids, mark_spans(encoding, draft.spans)


def with_moment(options: ReadingOptions) -> ReadingOptions:
    """`options` with a time for the chat template: the current one, unless they have one."""
    if options.template.now is not None:
        return options
    return replace(options, template=replace(options.template, now=current_moment()))


def _bad_row(row: RawRow, label: str | None, error: RowError) -> BadRow:
    return BadRow(
        ordinal=row.ordinal,
        origin=row.origin,
        label=label,
        reason=error.reason,
        detail=error.detail,
    )


def _shown_of(turn: ChatTurn) -> str:
    """The text of a turn that every template renders, even one that drops reasoning."""
    return turn.content.rpartition(THINK_END)[2] if turn.role == "assistant" else turn.content


def _remarks(tokenizer: ChatTokenizer, text: str) -> frozenset[Alteration]:
    tokens = tokenizer.control_tokens
    if tokens and not any(token in text for token in tokens):
        return frozenset({Alteration.NO_CONTROL_TOKEN})
    return frozenset()


def _check_beginning(tokenizer: ChatTokenizer, encoding: Encoding) -> None:
    if not encoding.ids:
        raise RowError(RowReason.EMPTY_PROMPT, "no token comes out")
    if list(encoding.ids[:2]) == [tokenizer.bos_id] * 2:
        detail = (
            "the prompt begins with two BOS tokens: the template or the row writes one too many"
        )
        raise RowError(RowReason.RENDER_FAILED, detail)
