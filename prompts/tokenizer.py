"""The model's tokenizer and chat template behind one class; the only importer of transformers.

transformers is imported where a tokenizer is loaded, so that reading ids needs none of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import orjson
import xxhash

from prompts.ambient import CLOCK, clock_at, current_moment, draws_at_random, reads_clock
from prompts.conversation_parser import REASONING_KEYS, ChatTurn
from prompts.messages import (
    PROBE_DEFINITION,
    PROBE_IDS,
    PROBE_THOUGHT,
    PROBE_TOOL,
    TOOL_FORMS,
    MessageForm,
    as_messages,
    probe_turns,
    shows_tool_call,
)
from prompts.reading_options import TemplateOptions
from prompts.token_bound import BYTES_PER_TOKEN, TokenBound
from prompts.token_offsets import Encoding, Span, TokenPlaces
from prompts.types import RowError, RowReason, TokenizerError

GENERATION_BLOCK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
RANDOM_FAULT: Final = (
    "it draws random values (lipsum or the filter random): prompts would not be reproducible"
)
#: How much of a template's own complaint a row's detail repeats.
MAX_COMPLAINT: Final = 160
#: Characters to tokenise at a time when only the number of tokens is needed.
PIECE_CHARS: Final = 1 << 14
#: A token followed by this many words no longer depends on the text after them.
WORDS_BEHIND: Final = 16
#: The space character of tokenizers that do not split text into words.
_SPACE: Final = "\u2581"
_WITHOUT: Final = "Rows of ids need none: --tokenizer none"
#: Where a tokenizer's own ways would show: spaces, control tokens, several bytes, line breaks.
_SAMPLE: Final = "Hello,  world\n\n é漢🙂 1234 def f(x):\n\treturn x"

#: The shortest conversation, to try a template with.
_GREETING: Final = (ChatTurn(role="user", content="Hi"),)


class ChatTokenizer:
    """Renders turns to text and text to tokens, adding no special token of its own."""

    def __init__(self, hf_tokenizer: Any, template: TemplateOptions) -> None:
        """`hf_tokenizer`: one of transformers. Raises `TokenizerError` if jinja2 is missing."""
        self._hf = hf_tokenizer
        # Only the tokenizers library says where in a text its tokens lie.
        self._is_fast = bool(getattr(hf_tokenizer, "is_fast", False))
        self.template = _template_of(hf_tokenizer) if template.text is None else template.text
        self._kwargs = dict(template.kwargs)
        if self.reads_clock:
            # A value of this name overrides the function that transformers passes.
            self._kwargs.setdefault(CLOCK, clock_at(template.now or current_moment()))
        self.has_generation_blocks = bool(GENERATION_BLOCK.search(self.template or ""))
        #: What asking for a generation prompt adds: the header of an assistant turn, or nothing.
        self.generation_prompt = ""
        #: What the chat template takes.
        self.form = MessageForm()
        if self.template is not None:
            self.generation_prompt = self._probe()
            self.form = self._probed_form()
        self._encode_fast = self._backend() if self._is_fast else None

    @classmethod
    def load(cls, path_or_name: str, template: TemplateOptions) -> ChatTokenizer:
        """Loads a local model folder or a hub name. Raises `TokenizerError`, saying what to do."""
        if path_or_name.startswith((os.sep, ".", "~")) and not os.path.isdir(path_or_name):
            raise TokenizerError(f"{path_or_name}: no such folder: name the model's folder")
        _require_regular_files(path_or_name)
        try:
            from transformers import AutoTokenizer
        except ImportError as exc:
            remedy = "pip install transformers jinja2"
            raise TokenizerError(f"{path_or_name}: transformers is missing: {remedy}") from exc
        try:
            # Otherwise transformers asks at the terminal whether to run a model's own code.
            hf_tokenizer = AutoTokenizer.from_pretrained(path_or_name, trust_remote_code=False)
        except Exception as exc:  # whatever the model's own files or code raise
            raise TokenizerError(
                f"{path_or_name}: {_load_remedy(exc)} ({_complaint(exc)}). {_WITHOUT}"
            ) from exc
        # For some models transformers makes an empty tokenizer where the files are missing.
        if not hf_tokenizer("Hello", add_special_tokens=False)["input_ids"]:
            remedy = "check that its tokenizer files (tokenizer.json, ...) are there"
            raise TokenizerError(
                f"{path_or_name}: the tokenizer knows no words: {remedy}. {_WITHOUT}"
            )
        return cls(hf_tokenizer, template)

    def __len__(self) -> int:
        """The vocabulary size, added tokens included."""
        return len(self._hf)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        token_id = self._hf.bos_token_id
        return None if token_id is None else int(token_id)

    @property
    def reads_clock(self) -> bool:
        """Whether the chat template may ask for the time."""
        return self.template is not None and reads_clock(self.template)

    @cached_property
    def _draws_at_random(self) -> bool:
        try:
            return self.template is not None and draws_at_random(self.template)
        except Exception:  # rendering fails as well, with a better message
            return False

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template writes tool definitions."""
        try:
            text = self.render(_GREETING, generation_prompt=True, tools=[PROBE_DEFINITION])
        except RowError:
            return False
        return PROBE_TOOL in text

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """The texts of all tokens that stand for themselves, the longest first."""
        added = getattr(self._hf, "added_tokens_decoder", {})
        texts = {str(token) for token in added.values()} | set(
            map(str, self._hf.all_special_tokens)
        )
        return tuple(sorted(filter(None, texts), key=len, reverse=True))

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
        if getattr(hf, "split_special_tokens", False):
            # An attribute of the Python object, not part of the tokenizer's JSON.
            state["split_special_tokens"] = True
        state["special_tokens"] = {
            name: str(token) for name, token in hf.special_tokens_map.items()
        }
        return xxhash.xxh3_128_hexdigest(orjson.dumps(state, option=orjson.OPT_SORT_KEYS))

    def render(
        self,
        turns: Sequence[ChatTurn],
        *,
        generation_prompt: bool = False,
        tools: Sequence[Any] = (),
        form: MessageForm | None = None,
    ) -> str:
        """The turns as the model's chat template writes them. Raises `RowError` (render_failed).

        `form`: to be tried instead of the template's own.
        """
        if self.template is None:
            detail = "the model has no chat template: give text or input_ids rows"
            raise RowError(RowReason.RENDER_FAILED, detail)
        if self._draws_at_random:
            raise RowError(RowReason.RENDER_FAILED, f"chat template: {RANDOM_FAULT}")
        try:
            text = self._hf.apply_chat_template(
                as_messages(turns, form or self.form),
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._kwargs,
            )
        except Exception as exc:  # a template is a program: it can raise anything
            raise RowError(RowReason.RENDER_FAILED, f"chat template: {_complaint(exc)}") from exc
        return str(text)

    def generation_spans(
        self,
        turns: Sequence[ChatTurn],
        text: str,
        *,
        generation_prompt: bool,
        tools: Sequence[Any] = (),
    ) -> list[Span]:
        """What the template's `{% generation %}` blocks wrote in `text`, the rendering of `turns`.

        Raises `RowError` (mask_failed) where rendering again gives another text.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not the mask that `apply_chat_template` returns: that ends, without a word, at the first
        # block that begins with a space, as trimmed offsets leave that space to no token.
        texts, spans = render_jinja_template(
            conversations=[as_messages(turns, self.form)],
            tools=list(tools) or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=generation_prompt,
            **{**self._hf.special_tokens_map, **self._kwargs},
        )
        if texts[0] != text:
            detail = "the tokenizer's class renders differently from its chat template"
            raise RowError(RowReason.MASK_FAILED, detail)
        return [(int(start), int(end)) for start, end in spans[0]]

    def encode(self, text: str) -> Encoding:
        """Tokenises the text, adding no special tokens."""
        if self._encode_fast is None:
            ids = self._encode_ids(text)
            return Encoding(text=text, ids=ids, places=None, encode_ids=self._encode_ids)
        return self._encoding(text, self._encode_fast(text))

    def _encoding(self, text: str, encoded: Any) -> Encoding:
        places = TokenPlaces(
            all=lambda: encoded.offsets,
            token_at=encoded.char_to_token,
            of_token=encoded.token_to_chars,
        )
        return Encoding(text=text, ids=encoded.ids, places=places, encode_ids=self._encode_ids)

    def has_more_tokens(self, texts: Sequence[str], num_tokens: int) -> bool:
        """Whether the texts, tokenised in pieces, give more than `num_tokens` tokens.

        Stops as soon as they do. An empty text counts as one token, since its turn has a header.
        """
        count = 0
        for text in texts:
            for start in range(0, max(1, len(text)), PIECE_CHARS):
                count += max(1, len(self.encode(text[start : start + PIECE_CHARS]).ids))
                if count > num_tokens:
                    return True
        return False

    def encode_beginning(self, text: str, bound: TokenBound) -> Encoding:
        """Tokenise enough of the beginning of a text to fix its first `bound.max_tokens` tokens.

        They are fixed once enough words follow, since a tokenizer looks ahead at most into the next
        word. Raises `RowError` (too_long) if that takes more than `bound.max_whole_chars`
        characters.
        """
        num_chars = BYTES_PER_TOKEN * bound.max_tokens
        while num_chars < len(text):
            beginning = text[:num_chars]
            if self._encode_fast is not None:
                encoded = self._encode_fast(beginning)
                if self._num_words(encoded, bound.max_tokens) > WORDS_BEHIND:
                    return self._encoding(beginning, encoded)
                if num_chars >= bound.max_whole_chars:
                    detail = f"more than {num_chars} characters without words: cut it before"
                    raise RowError(RowReason.TOO_LONG, detail)
            num_chars *= 2
        return self.encode(text)

    def _num_words(self, encoded: Any, start: int) -> int:
        """A lower bound for the number of words that begin after token `start`."""
        num_words = len(set(encoded.word_ids[start:])) - 1
        if num_words > WORDS_BEHIND or not self._words_begin_with_space:
            return num_words
        tokens = encoded.tokens[start:]
        return sum(
            token.startswith(_SPACE) and not before.endswith(_SPACE)
            for before, token in pairwise(tokens)
        )

    @cached_property
    def _words_begin_with_space(self) -> bool:
        """Whether every token of the vocabulary has spaces only at its start."""
        control = set(self.control_tokens)
        return not any(
            _SPACE in token.lstrip(_SPACE) for token in self._hf.get_vocab() if token not in control
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        text = self._hf.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _encode_ids(self, text: str) -> list[int]:
        return list(self._hf(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _backend(self) -> Callable[[str], Any]:
        """The tokenizers library itself, where transformers adds nothing of its own to it."""
        backend = self._hf.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str) -> Any:
            return backend.encode(text, add_special_tokens=False)

        sample = _SAMPLE + "".join(self.control_tokens[:64])
        if encode(sample).ids == self._encode_ids(sample):
            return encode

        def encode_slowly(text: str) -> Any:
            return self._hf(text, add_special_tokens=False, verbose=False).encodings[0]

        return encode_slowly

    def _probe(self) -> str:
        try:
            opened = self.render(_GREETING, generation_prompt=True)
            closed = self.render(_GREETING)
        except RowError as exc:
            if isinstance(exc.__cause__, ImportError):
                raise TokenizerError(f"chat templates need jinja2: {exc.__cause__}") from exc
            return ""  # this template may still render real rows
        return opened.removeprefix(closed) if opened != closed else ""

    def _probed_form(self) -> MessageForm:
        """Try what a template may take until its rendering shows it; cheap, once a tokenizer."""
        form = next(filter(self._shows_tool_call, TOOL_FORMS), MessageForm())
        for key in REASONING_KEYS:
            trial = replace(form, reasoning_key=key, takes_reasoning=True)
            answer = ChatTurn(role="assistant", content="Hello", reasoning=PROBE_THOUGHT)
            if PROBE_THOUGHT in self._trial([*_GREETING, answer], trial):
                return trial
        return form

    def _shows_tool_call(self, form: MessageForm) -> bool:
        texts = [self._trial(probe_turns(call_id), form) for call_id in PROBE_IDS]
        plain = self._trial(_GREETING, form)
        return any(
            shows_tool_call(text) and text.count("None") <= plain.count("None") for text in texts
        )

    def _trial(self, turns: Sequence[ChatTurn], form: MessageForm) -> str:
        try:
            return self.render(turns, form=form)
        except RowError:
            return ""


def check_template(template: str) -> None:
    """Raises `TokenizerError` where the chat template's text is no template."""
    try:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as exc:
        raise TokenizerError(f"chat templates need transformers and jinja2: {exc}") from exc
    try:
        render_jinja_template(conversations=[[]], chat_template=template)
    except jinja2.TemplateSyntaxError as exc:
        raise TokenizerError(
            f"the chat template cannot be compiled, line {exc.lineno}: {exc.message}: mend it"
        ) from exc
    except Exception:  # of a conversation without turns it may say anything
        pass
    if draws_at_random(template):
        raise TokenizerError(f"{RANDOM_FAULT}: use another")


def _template_of(hf_tokenizer: Any) -> str | None:
    # `chat_template` may also be a dict of several named templates; this picks the default one.
    try:
        return str(hf_tokenizer.get_chat_template())
    except (ValueError, NotImplementedError):  # there is none
        return None


def _require_regular_files(folder: str) -> None:
    """Raises `TokenizerError` for a pipe or a device in a model's folder."""
    if not os.path.isdir(folder):
        return  # a hub name
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file() or entry.is_dir() or entry.is_symlink():
                continue
            raise TokenizerError(f"{entry.path}: not a regular file: remove it. {_WITHOUT}")


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
    if isinstance(exc, MemoryError):
        return "it needs more memory than a worker process may take"
    line = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {line}"[:MAX_COMPLAINT]
