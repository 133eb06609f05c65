"""Why one attempt gave no sample. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from manifest.states import Reason


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt that gave no sample."""

    reason: Reason
    detail: str
    is_permanent: bool = False  # trying again cannot help
    is_busy: bool = False  # 429, 503 or no room for its dump: nothing is wrong with the prompt
    is_transport: bool = False  # the connection failed: the server may be gone
    is_unsent: bool = False  # the server was not even reached
    is_unanswered: bool = False  # it had the request, or may have had it, and said nothing
    is_copy: bool = False  # the server processes an earlier copy of it, whose dump may arrive
    others_served: bool = False  # meanwhile, by the same server

    @property
    def is_unserved(self) -> bool:
        """Whether the server may be at fault: a broken connection, a time-out, a 5xx, an abort."""
        return self.reason is Reason.SERVER_ERROR and not self.is_busy

    @property
    def is_not_counted(self) -> bool:
        """Whether it says nothing against the prompt, so that it costs none of its attempts."""
        return self.is_busy or self.is_transport or self.is_copy

    @property
    def is_telling(self) -> bool:
        """Whether it may be the prompt's. Where nobody was served meanwhile, a refusal tells
        nothing even of this prompt."""
        return not self.is_not_counted or self.others_served
