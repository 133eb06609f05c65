"""Writes what the plugin would write, for a fake model and with faults."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.core.rids import RID_PREFIX
from extractor.system.process_id import process_start_ticks
from extractor.testing.fake_model import FakeModel, fake_states
from extractor.testing.faults import Fault
from server_patch.dump_dir import RankDir
from server_patch.dump_format import (
    READY_NAME,
    CaptureInfo,
    DumpHeader,
    EngineInfo,
    ErrorRecord,
    ModelInfo,
    ProcessInfo,
    Ready,
    WeightsInfo,
    dump_name,
    encode_error,
    encode_header,
    encode_ready,
    error_name,
)
from server_patch.settings import Settings
from server_patch.trust import open_or_make, open_trusted


class FakePlugin:
    """One rank directory and its dumps."""

    def __init__(
        self,
        dump_root: Path,
        *,
        model: FakeModel,
        chunk_tokens: int,
        boot_id: str | None,
        file_mode: int,
    ) -> None:
        """`chunk_tokens` > 0 cuts prompts into pieces of at most that many rows, out of order."""
        self.model = model
        self.boot_id = boot_id or secrets.token_hex(4)
        self.rank_dir: RankDir | None = None  # once something is written
        self._settings = Settings(dump_dir=dump_root.absolute(), file_mode=file_mode)
        self._chunk_tokens = chunk_tokens
        self._counter = count()

    @property
    def directory(self) -> Path:
        """Where this rank writes."""
        return self._settings.dump_dir / self.boot_id / "0"

    def announce(self, host: str, port: int) -> None:
        """Write READY.json for a server that listens there."""
        self.rank_dir = self._make_rank_dir()
        pid = os.getpid()
        start_ticks = process_start_ticks(pid)
        assert start_ticks is not None
        layout = self.model.layout
        ready = Ready(
            boot_id=self.boot_id,
            rank=0,
            process=ProcessInfo(
                pid=pid,
                start_ticks=start_ticks,
                started_at="1970-01-01T00:00:00+00:00",
                host=host,
                port=port,
            ),
            engine=EngineInfo(
                version="fake",
                tp_size=1,
                dp_size=1,
                chunked_prefill_size=self._chunk_tokens or -1,
                radix_cache=False,
                kv_cache_dtype=self.model.kv_cache_dtype,
                settings=self.model.settings,
            ),
            model=ModelInfo(
                path=self.model.model_path,
                architecture="FakeForCausalLM",
                config_digest="fake",
                vocab_size=self.model.vocab_size,
                num_layers=self.model.num_layers,
                hidden_size=layout.hidden_size,
                dtype=layout.dtype,
            ),
            weights=WeightsInfo(
                id=self.model.weights, layout="fake", version=self.model.weight_version
            ),
            capture=CaptureInfo(
                plugin_version="fake",
                boundaries=layout.boundaries,
                last_kind=layout.last_kind,
                method="fake",
                rid_prefix=RID_PREFIX,
                ring_bytes=0,
                num_writers=0,
            ),
        )
        self._publish(READY_NAME, encode_ready(ready))

    def dump(self, rid: str, ids: npt.NDArray[np.int32], fault: Fault | None = None) -> None:
        """Write what the plugin would write for one request, with one fault."""
        if fault is Fault.NO_DUMP:
            return
        if fault is Fault.ERROR_RECORD:
            record = ErrorRecord(rid=rid, start=0, reason="no space left on device")
            self._publish(error_name(next(self._counter)), encode_error(record))
            return
        states = fake_states(ids, self.model.layout, checkpoint=self.model.checkpoint)
        if fault is Fault.NONFINITE:
            states["aux"].view(np.uint8)[:] = 0xFF  # every dtype's all-ones pattern is a NaN
        if fault is Fault.WRONG_IDS:
            ids = ids.copy()
            ids[-1] += 1
        end = len(ids) - (fault is Fault.SHORT_DUMP)
        begin = 1 if fault is Fault.CACHED else 0
        step = self._chunk_tokens or len(ids)
        # Last piece first: nothing may depend on the order in which pieces appear.
        for start in reversed(range(begin, end, step)):
            for _ in range(2 if fault is Fault.DOUBLE_DUMP else 1):
                self._dump_piece(rid, ids, states, start, min(start + step, end), fault)

    def _dump_piece(
        self,
        rid: str,
        ids: npt.NDArray[np.int32],
        states: Mapping[str, npt.NDArray[Any]],
        start: int,
        end: int,
        fault: Fault | None,
    ) -> None:
        layout = self.model.layout
        counter = next(self._counter)
        stated = layout
        if fault is Fault.WRONG_BOUNDARIES:
            stated = replace(layout, boundaries=tuple(b + 1 for b in layout.boundaries))
        header = DumpHeader(
            rid=rid,
            start=start,
            rows=end - start,
            layout=stated,
            boot_id=self.boot_id,
            rank=0,
            counter=counter,
            weights=self.model.weights,
        )
        parts = [encode_header(header)]
        parts += [states[name][start:end].tobytes() for name in layout.state_names]
        parts.append(ids[start:end].astype("<i4").tobytes())
        data = b"".join(parts)
        if fault is Fault.TORN_DUMP:
            data = data[: len(data) // 2]
        try:
            self._publish(dump_name(counter), data)
        except OSError as error:
            # As the plugin does: an error record, or, where not even that fits, nothing.
            record = ErrorRecord(rid=rid, start=start, reason=str(error))
            with suppress(OSError):
                self._publish(error_name(next(self._counter)), encode_error(record))

    def _publish(self, name: str, data: bytes) -> None:
        if self.rank_dir is None:
            self.rank_dir = self._make_rank_dir()
        self.rank_dir.write(name, [data])

    def _make_rank_dir(self) -> RankDir:
        """The directory of this rank, which an earlier server with the same boot id may have."""
        settings = self._settings
        mode = settings.directory_mode
        with (
            open_trusted(settings.dump_dir, is_shared=settings.is_shared, make_mode=mode) as root,
            open_or_make(root, self.boot_id, mode=mode) as boot,
        ):
            return RankDir(
                directory=open_or_make(boot, "0", mode=mode),
                boot_id=self.boot_id,
                rank=0,
                file_mode=settings.file_mode,
            )
