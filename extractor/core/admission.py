"""Which prompts a run or a dry run sends: limits of the server, wishes of the user. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from extractor.core.errors import RowRefused
from extractor.core.request import Limits, dump_bytes
from extractor.core.row_policy import OnBadRow, OnDuplicate, OnTooLong, Policy
from manifest.states import Reason
from prompts.token_bound import TokenBound
from prompts.types import BadRow, Prompt, RowReason
from server_patch.dump_format import StateLayout


@dataclass(frozen=True, kw_only=True)
class Room:
    """What dumps may take under the dump root."""

    layout: StateLayout
    budget_bytes: int


class Admission:
    """Judges rows in the order of the input."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits | None,
        room: Room | None,
        *,
        seen: dict[bytes, int] | None = None,
    ) -> None:
        """`limits`, `room`: None where no server tells them.

        `seen`: key of each prompt that earlier sessions planned and the first row that gave it.
        """
        self._policy = policy
        self._limits = limits
        self._room = room
        self._seen = {} if seen is None else seen
        self._longest = _longest(policy, limits)

    def judge(self, row: Prompt | BadRow) -> Prompt | Refusal:
        """The prompt to send, perhaps cut, or why there is none.

        Raises RowRefused where the policy asks for a stop.
        """
        if isinstance(row, BadRow) and row.reason is RowReason.TOO_LONG:
            return self._refuse_long(row, f"{row.detail}, {self._why_too_long()}")
        if isinstance(row, BadRow):
            if self._policy.on_bad_row is OnBadRow.FAIL:
                raise _stop(row, row.reason.value, row.detail, "--on-bad-row fail")
            return Refusal(reason=Reason(row.reason.value), detail=row.detail)
        if row.num_tokens < self._policy.min_tokens:
            return Refusal(
                reason=Reason.TOO_SHORT,
                detail=f"{row.num_tokens} tokens, --min-tokens is {self._policy.min_tokens}",
            )
        prompt = row
        if self._longest is not None and row.num_tokens > self._longest:
            if self._policy.on_too_long is not OnTooLong.TRUNCATE:
                return self._refuse_long(row, f"{row.num_tokens} tokens, {self._why_too_long()}")
            prompt = row.cut(self._longest)
        return self._refusal(row, prompt) or prompt

    def _refusal(self, row: Prompt, prompt: Prompt) -> Refusal | None:
        if prompt.has_answer and not prompt.num_trained:
            detail = "no token of its answers is trained"
            if prompt is not row:
                detail += f": they lie behind token {prompt.num_tokens}, where it was cut"
            return Refusal(reason=Reason.NO_SUPERVISION, detail=detail)
        if prompt.num_trained < self._policy.min_trained:
            detail = f"{prompt.num_trained} trained tokens"
            if prompt is not row:
                detail += f" in the first {prompt.num_tokens}, where it was cut"
            detail += f", --min-trained is {self._policy.min_trained}"
            return Refusal(reason=Reason.TOO_FEW_TRAINED, detail=detail)
        if self._limits is not None and (refused := refusal(prompt, self._limits)) is not None:
            return refused
        if self._limits is not None and self._room is not None:
            size = dump_bytes(prompt.num_tokens, self._room.layout, self._limits)
            if size > self._room.budget_bytes:
                detail = (
                    f"its dumps take {size} bytes, the budget under the dump root is "
                    f"{self._room.budget_bytes} (--shm-budget)"
                )
                return Refusal(reason=Reason.TOO_LARGE, detail=detail)
        if self._policy.on_duplicate is OnDuplicate.SKIP:
            first = self._seen.setdefault(bytes.fromhex(prompt.key), prompt.ordinal)
            if first < prompt.ordinal:
                return Refusal(reason=Reason.DUPLICATE, detail=f"row {first} gives the same prompt")
        return None

    def _refuse_long(self, row: Prompt | BadRow, detail: str) -> Refusal:
        if self._policy.on_too_long is OnTooLong.FAIL:
            raise _stop(row, Reason.TOO_LONG.value, detail, "--on-too-long fail")
        return Refusal(reason=Reason.TOO_LONG, detail=detail)

    def _why_too_long(self) -> str:
        if self._longest is None:
            return "longer than any server is known to take"
        if self._longest == self._policy.max_tokens:
            return f"--max-tokens is {self._longest}"
        return f"the server takes {self._longest}"


def token_bound(policy: Policy, limits: Limits | None) -> TokenBound:
    """The bound that rows are rendered within, so that overlong rows cannot exhaust memory.

    `Admission` decides on each prompt; the bound only saves the work of rendering what it rejects.
    """
    longest = _longest(policy, limits)
    if longest is None:
        return TokenBound()
    keeps_beginning = policy.on_too_long is OnTooLong.TRUNCATE
    return TokenBound(max_tokens=longest, keeps_beginning=keeps_beginning)


def _longest(policy: Policy, limits: Limits | None) -> int | None:
    bounds = [policy.max_tokens, None if limits is None else limits.max_prompt_tokens]
    return min((bound for bound in bounds if bound is not None), default=None)


def _stop(row: Prompt | BadRow, reason: str, detail: str, option: str) -> RowRefused:
    return RowRefused(
        f"{row.origin}: {reason}: {detail}. Mend the row, or leave {option} out. "
        "What was stored stays; the same command goes on."
    )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a prompt must not be sent."""

    reason: Reason
    detail: str


def refusal(prompt: Prompt, limits: Limits) -> Refusal | None:
    """Why the server must not get this prompt; None if it may.

    An id outside the vocabulary indexes the embedding without a check and kills the server; a
    prompt over the limit is cut silently by some configurations.
    """
    if prompt.num_tokens > limits.max_prompt_tokens:
        return Refusal(
            reason=Reason.TOO_LONG,
            detail=f"{prompt.num_tokens} tokens, the server takes {limits.max_prompt_tokens}",
        )
    outside = (prompt.input_ids < 0) | (prompt.input_ids >= limits.vocab_size)
    if outside.any():
        position = int(outside.argmax())
        return Refusal(
            reason=Reason.TOKEN_OUT_OF_RANGE,
            detail=f"token {position} is {int(prompt.input_ids[position])}, "
            f"the vocabulary has {limits.vocab_size}",
        )
    return None
