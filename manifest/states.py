"""What can become of an input row: a total state machine, pure.

```
            send          dump           verify            store
  PLANNED -------> SENT -------> DUMPED -------> VERIFIED -------> STORED --+
   ^ ^ |             |             ^  |              |             |   ^    |
   | | |             |             |  |              |             |   +-move
   | | +--- adopt ---|-------------+  |              |             |
   | +- retry, lose -+---- retry -----+--- retry ----+             |
   +----------------------- forget --------------------------------+
                     |                |              |
     +--- fail ------+----- fail -----+---- fail ----+-----------> FAILED(reason)
```

| event | what happened |
|---|---|
| send | a request for the row is with the server |
| dump | its pieces tile the prompt |
| adopt | so do pieces that an earlier session asked for and did not live to store |
| verify | ids, shapes and values are proven; the copy is not durable yet |
| store | the copy is durable |
| retry | this attempt is over (or its process died); the row is to be sent again |
| lose | the server died with the row's request unanswered; it is to be sent again, alone |
| fail | the row is given up, for a reason |
| forget | the stored bytes turned out to be gone or damaged; the row is to be sent again |
| move | the stored bytes were copied to another shard |
| reopen | a person asks to try a failed row again (`--retry-failed`) |

STORED and FAILED are terminal: no run goes on with them by itself. A row of the input that gives
no prompt at all goes straight from PLANNED to FAILED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where one input row stands."""

    PLANNED = "planned"  # read, rendered and tokenised; not on the wire
    SENT = "sent"  # a request for it is with the server
    DUMPED = "dumped"  # its pieces tile the prompt; they lie under the dump root
    VERIFIED = "verified"  # ids, shapes and values proven; copied, not yet durable
    STORED = "stored"  # durable in a shard
    FAILED = "failed"  # given up, with a reason

    @property
    def is_terminal(self) -> bool:
        return self in (State.STORED, State.FAILED)


class Event(StrEnum):
    """What moves a row from one state to another."""

    SEND = "send"
    DUMP = "dump"
    ADOPT = "adopt"
    VERIFY = "verify"
    STORE = "store"
    RETRY = "retry"
    LOSE = "lose"
    FAIL = "fail"
    FORGET = "forget"
    MOVE = "move"
    REOPEN = "reopen"


class Reason(StrEnum):
    """Why a row is FAILED: the closed list. The first block is the input's fault."""

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


#: Rows that are left out because the user asked for it: no failures of the run.
ASKED_FOR: Final = frozenset({Reason.DUPLICATE})


class IllegalTransition(Exception):
    """The code asked for a transition that the table does not have: a defect."""


_ATTEMPT_OVER: Final[Mapping[Event, State]] = {
    Event.RETRY: State.PLANNED,
    Event.FAIL: State.FAILED,
}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.PLANNED: {
        Event.SEND: State.SENT,
        Event.ADOPT: State.DUMPED,
        Event.LOSE: State.PLANNED,
        **_ATTEMPT_OVER,
    },
    State.SENT: {Event.DUMP: State.DUMPED, Event.LOSE: State.PLANNED, **_ATTEMPT_OVER},
    State.DUMPED: {Event.VERIFY: State.VERIFIED, **_ATTEMPT_OVER},
    State.VERIFIED: {Event.STORE: State.STORED, **_ATTEMPT_OVER},
    State.STORED: {Event.FORGET: State.PLANNED, Event.MOVE: State.STORED},
    State.FAILED: {Event.REOPEN: State.PLANNED},
}


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition for any pair not in TRANSITIONS."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"no transition {event} from {state}") from None
