"""The id of the model's weights, which READY.json and every dump carry.

At load, each tensor-parallel rank publishes the fingerprint of its own part in the key-value store
of the process group and continues; only the ranks that write dumps wait for the other parts. This
needs no collective operation, so a failing rank, or a node without the plugin, cannot hang the
others: the weights then have no id.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final

from server_patch.dump_format import WeightsInfo
from server_patch.fingerprint import Fingerprint, combine, fingerprint

logger = logging.getLogger(__name__)

#: Timeout for the fingerprint of another rank, in addition to the time that the own one took. All
#: ranks reach this point together, since the engine has just synchronised them.
_PATIENCE_S: Final = 60.0
_rounds = itertools.count()  # counts fingerprints; the same on every rank
#: Weights without a fingerprint.
UNKNOWN: Final = WeightsInfo()


class WeightsError(RuntimeError):
    """The weights have no id; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that share one model, and their common key-value store."""

    rank: int
    ranks: Sequence[int]  # in their order in the tensor-parallel group
    store: Any  # a torch.distributed.Store; None if there is only one rank


class Weights:
    """The id and label of one model's current weights."""

    def __init__(
        self, *, boot_id: str, found: WeightsInfo = UNKNOWN, version: str | None = None
    ) -> None:
        """found: as loaded, without a label. version: the label."""
        self._boot_id = boot_id
        self._watcher: Callable[[], None] = lambda: None
        self._num_updates = 0
        self._loaded = found.id  # the id before any update
        self.info = replace(found, version=version)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every change; it replaces an earlier watcher."""
        self._watcher = watcher

    def loaded(self, found: WeightsInfo) -> None:
        """Set the fingerprint of weights that were loaded late."""
        self._loaded = found.id
        self.info = replace(found, version=self.info.version)
        self._watcher()

    def updated(self) -> None:
        """Set a new id, because the weights in memory change.

        The id is unique to this server, and the same on all its ranks.
        """
        self._num_updates += 1
        update = hashlib.sha256(f"{self._boot_id}/{self._num_updates}".encode()).hexdigest()[:8]
        self.info = replace(self.info, id=f"{self._loaded or 'unknown'}+{update}")
        self._watcher()

    def labelled(self, version: str) -> None:
        """Set the engine's label for the weights."""
        if version != self.info.version:
            self.info = replace(self.info, version=version)
            self._watcher()


class Measured:
    """The fingerprint of this rank's weights, published to the other ranks.

    The constructor never raises; `gather` reports its error.
    """

    def __init__(self, find_ranks: Callable[[], Ranks], model: Any) -> None:
        self._round = next(_rounds)
        self._ranks: Ranks | None = None
        self._error: Exception | None = None
        self._own: Fingerprint | None = None
        begun = time.perf_counter()
        try:
            self._ranks = find_ranks()
            self._own = fingerprint(model)
        except Exception as error:
            self._error = error
        self._seconds = time.perf_counter() - begun
        try:
            if self._ranks is not None and self._ranks.store is not None:
                value = asdict(self._own) if self._own else {"error": repr(self._error)}
                self._ranks.store.set(self._key(self._ranks.rank), json.dumps(value))
        except Exception as error:
            self._error = self._error or error

    def gather(self) -> WeightsInfo:
        """The fingerprint of all ranks' weights; `UNKNOWN`, with a warning, if any rank has none.

        Waits a limited time for the other ranks.
        """
        begun = time.perf_counter()
        try:
            if self._error is not None:
                raise self._error
            assert self._own is not None and self._ranks is not None
            parts = [self._own]
            if len(self._ranks.ranks) > 1:
                parts = self._others(self._ranks)
            whole = combine(parts)
            seconds = round(self._seconds + time.perf_counter() - begun, 4)
            return WeightsInfo(id=whole.content, layout=whole.layout, seconds=seconds)
        except Exception as error:
            logger.warning(
                "hidden states: the weights have no fingerprint, so a checkpoint that is replaced "
                "under the same path goes unnoticed here: %s",
                error,
                exc_info=None if isinstance(error, WeightsError) else error,
            )
            return UNKNOWN

    def _others(self, ranks: Ranks) -> list[Fingerprint]:
        """The fingerprints of all ranks, in order. Raises WeightsError."""
        keys = [self._key(rank) for rank in ranks.ranks]
        patience = timedelta(seconds=_PATIENCE_S + self._seconds)
        parts = []
        for rank, key in zip(ranks.ranks, keys, strict=True):
            try:
                ranks.store.wait([key], patience)
            except Exception as error:
                raise WeightsError(
                    f"rank {rank} has not published its part within {patience.seconds} s: is the "
                    "plugin installed, and SGLANG_HS_DUMP_DIR set, on every node?"
                ) from error
            value = json.loads(ranks.store.get(key))
            if "error" in value:
                raise WeightsError(f"rank {rank}: {value['error']}")
            parts.append(Fingerprint(**value))
        return parts

    def _key(self, rank: int) -> str:
        return f"hidden-states/weights/{self._round}/{rank}"
