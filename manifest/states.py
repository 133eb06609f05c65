"""The states of an input row, and what leads from one to another. Pure.

```
              retry, lose
               +------+
               v      |
              PLANNED ---- store ----> STORED ---+
               ^    | ^                 |  ^     |
               |    | +---- forget -----+  +move-+
               |    +------- fail ----> FAILED(reason)
               |                           |
               +--------- reopen ----------+
```

`manifest.records` has a class of each change; a row is reopened where the user asks to retry failed
rows (`--retry-failed`).

A prompt in flight is PLANNED: a crash loses its progress anyway, and `.live.json` shows it during a
run. STORED and FAILED are terminal: no run continues from them by itself. A row of the input that
gives no prompt goes straight to FAILED.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """How far one input row is."""

    PLANNED = "planned"  # read, rendered and tokenised; perhaps in flight
    STORED = "stored"  # durable in a shard
    FAILED = "failed"  # given up, with a reason

    @property
    def is_terminal(self) -> bool:
        return self in (State.STORED, State.FAILED)


class Reason(StrEnum):
    """The closed list of reasons for FAILED. The first block is the input's fault."""

    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_SHAPE = "unknown_shape"
    UNKNOWN_ROLE = "unknown_role"
    BAD_CONTENT = "bad_content"
    BAD_ORDER = "bad_order"
    CONFLICTING_FIELDS = "conflicting_fields"
    UNSUPPORTED_FIELD = "unsupported_field"
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_INPUT_IDS = "bad_input_ids"
    BAD_LOSS_MASK = "bad_loss_mask"
    EMPTY_PROMPT = "empty_prompt"
    RENDER_FAILED = "render_failed"
    MASK_FAILED = "mask_failed"
    ROW_TOO_LARGE = "row_too_large"  # exceeds the limit of bytes or of JSON nesting for a row
    THINKING_LOST = "thinking_lost"  # reasoning that was to be kept is not in the rendering
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    TOO_LONG = "too_long"
    TOO_SHORT = "too_short"  # fewer tokens than --min-tokens
    NO_SUPERVISION = "no_supervision"  # it has an answer, but no token of it is trained
    TOO_FEW_TRAINED = "too_few_trained"  # fewer trained tokens than --min-trained
    DUPLICATE = "duplicate"  # an earlier row gives the same prompt (--on-duplicate skip)
    TOO_LARGE = "too_large"  # its dump alone exceeds what /dev/shm may hold

    REJECTED = "rejected"  # the server answered 4xx
    SERVER_ERROR = "server_error"  # 5xx or an abort, on every attempt
    KILLS_SERVER = "kills_server"  # the server died with it twice, the second time with it alone
    TRUNCATED = "truncated"  # the server counted other prompt tokens than were sent
    CACHED = "cached"  # rows were served from the prefix cache and have no state
    DUMP_FAILED = "dump_failed"  # the plugin wrote an error record
    DUMP_MISSING = "dump_missing"  # answered, but no whole dump arrived
    DUMP_CORRUPT = "dump_corrupt"  # unreadable, or its pieces do not tile the prompt
    WRONG_TOKENS = "wrong_tokens"  # the dump holds other token ids than were sent
    WRONG_LAYOUT = "wrong_layout"  # other boundaries, dtype, hidden size or last kind
    NONFINITE = "nonfinite"  # NaN or infinity among the states


#: Reasons that the user asked for; such rows are not failures of the run.
ASKED_FOR: Final = frozenset({Reason.DUPLICATE})


class IllegalTransition(Exception):
    """A change that does not follow from the state of its row: a bug in the caller."""
