"""The model's tokenizer and chat template behind one class; the only importer of transformers.

transformers is imported where a tokenizer is loaded, so that reading ids needs none of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import orjson
import xxhash

from prompts.align import Encoding, Span
from prompts.turns import Turn
from prompts.types import RowError, RowReason, TokenizerError

GENERATION_BLOCK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: How much of a template's own complaint a row's detail repeats.
MAX_COMPLAINT: Final = 160


class ChatTokenizer:
    """Renders turns to text and text to tokens, adding no special token of its own."""

    def __init__(self, hf_tokenizer: Any) -> None:
        """`hf_tokenizer`: of transformers. Raises `TokenizerError` if jinja2 is missing."""
        self._hf = hf_tokenizer
        # Only the tokenizers library says where in a text its tokens lie.
        self._is_fast = bool(getattr(hf_tokenizer, "is_fast", False))
        self.template = _template_of(hf_tokenizer)
        self.has_generation_blocks = bool(GENERATION_BLOCK.search(self.template or ""))
        #: What asking for a generation prompt adds: the header of an assistant turn, or nothing.
        self.generation_prompt = "" if self.template is None else self._probe()

    @classmethod
    def load(cls, path_or_name: str, *, trust_remote_code: bool = False) -> ChatTokenizer:
        """Loads a local model folder or a hub name. Raises `TokenizerError`, saying what to do."""
        if path_or_name.startswith((os.sep, ".", "~")) and not os.path.isdir(path_or_name):
            raise TokenizerError(f"{path_or_name}: no such folder: name the model's folder")
        try:
            from transformers import AutoTokenizer
        except ImportError as exc:
            remedy = "pip install transformers jinja2"
            raise TokenizerError(f"{path_or_name}: transformers is missing: {remedy}") from exc
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(
                path_or_name, trust_remote_code=trust_remote_code
            )
        except Exception as exc:  # whatever the model's own files or code raise
            raise TokenizerError(
                f"{path_or_name}: {_load_remedy(exc)} ({_complaint(exc)})"
            ) from exc
        # For some models transformers makes an empty tokenizer where the files are missing.
        if not hf_tokenizer("Hello", add_special_tokens=False)["input_ids"]:
            remedy = "check that its tokenizer files (tokenizer.json, ...) are there"
            raise TokenizerError(f"{path_or_name}: the tokenizer knows no words: {remedy}")
        return cls(hf_tokenizer)

    def __len__(self) -> int:
        """The vocabulary size, added tokens included."""
        return len(self._hf)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        token_id = self._hf.bos_token_id
        return None if token_id is None else int(token_id)

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of everything that decides which tokens a text gives; 32 hexadecimal digits."""
        hf = self._hf
        if self._is_fast:
            state = orjson.loads(hf.backend_tokenizer.to_str())
            # Set by whoever called last, and of no effect: we never truncate and never pad.
            state.pop("truncation", None)
            state.pop("padding", None)
        else:
            state = {
                "class": type(hf).__name__,
                "vocabulary": {str(k): v for k, v in hf.get_vocab().items()},
            }
        state["special_tokens"] = {
            name: str(token) for name, token in hf.special_tokens_map.items()
        }
        return xxhash.xxh3_128_hexdigest(orjson.dumps(state, option=orjson.OPT_SORT_KEYS))

    def render(self, turns: Sequence[Turn], *, generation_prompt: bool) -> str:
        """The turns as the model's chat template writes them. Raises `RowError` (render_failed)."""
        if self.template is None:
            detail = "the model has no chat template: give text or input_ids rows"
            raise RowError(RowReason.RENDER_FAILED, detail)
        try:
            text = self._hf.apply_chat_template(
                _messages(turns), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as exc:  # a template is a program: it can raise anything
            raise RowError(RowReason.RENDER_FAILED, f"chat template: {_complaint(exc)}") from exc
        return str(text)

    def generation_spans(
        self, turns: Sequence[Turn], text: str, *, generation_prompt: bool
    ) -> list[Span]:
        """What the template's `{% generation %}` blocks wrote in `text`, the rendering of `turns`.

        Raises `RowError` (mask_failed) where rendering again gives another text.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not the mask that `apply_chat_template` returns: that ends, without a word, at the first
        # block that begins with a space, as trimmed offsets leave that space to no token.
        texts, spans = render_jinja_template(
            conversations=[_messages(turns)],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=generation_prompt,
            **self._hf.special_tokens_map,
        )
        if texts[0] != text:
            detail = "the tokenizer's class renders differently from its chat template"
            raise RowError(RowReason.MASK_FAILED, detail)
        return [(int(start), int(end)) for start, end in spans[0]]

    def encode(self, text: str) -> Encoding:
        """Tokenises the text, adding no special tokens."""
        if not self._is_fast:
            ids = self._encode_ids(text)
            return Encoding(text=text, ids=ids, offsets=None, encode_ids=self._encode_ids)
        encoded = self._hf(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return Encoding(
            text=text,
            ids=encoded["input_ids"],
            offsets=encoded["offset_mapping"],
            encode_ids=self._encode_ids,
        )

    def _encode_ids(self, text: str) -> list[int]:
        return list(self._hf(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _probe(self) -> str:
        turns = [Turn(role="user", content="Hi")]
        try:
            opened = self.render(turns, generation_prompt=True)
            closed = self.render(turns, generation_prompt=False)
        except RowError as exc:
            if isinstance(exc.__cause__, ImportError):
                raise TokenizerError(f"chat templates need jinja2: {exc.__cause__}") from exc
            return ""  # this template may still render real rows
        return opened.removeprefix(closed) if opened != closed else ""


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _template_of(hf_tokenizer: Any) -> str | None:
    # `chat_template` may also be a dict of several named templates; this picks the default one.
    try:
        return str(hf_tokenizer.get_chat_template())
    except (ValueError, NotImplementedError):  # there is none
        return None


def _load_remedy(exc: Exception) -> str:
    if isinstance(exc, ImportError):
        return "its tokenizer needs a package that is missing: install it"
    if "trust_remote_code" in str(exc):
        return "its tokenizer is code that comes with the model: allow it only if you trust it"
    if isinstance(exc, OSError):
        return (
            "no tokenizer there: name a model folder with tokenizer files, or a reachable hub name"
        )
    return "the tokenizer cannot be loaded: check the folder's tokenizer files"


def _complaint(exc: Exception) -> str:
    line = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {line}"[:MAX_COMPLAINT]
