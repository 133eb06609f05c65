"""Writes shard files in durable order, and inspects what is on disk.

An open shard is `shards/.shard-000000.open`: header room, then samples. `sync` makes the samples
so far durable; only then may the manifest call them stored. Sealing writes the header, syncs,
and renames to the final name. After a crash the manifest says where the durable samples end;
what lies behind that is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from extractor.core.errors import UsageError
from extractor.core.identity import Identity
from extractor.core.run_options import Output
from extractor.dumps.dump_reader import DumpPiece
from extractor.shards.format import (
    encode_shard_header,
    header_room,
    sample_bytes,
    samples_that_fit,
    shard_digest,
    shard_metadata,
    shard_name,
)
from extractor.shards.sample_copy import append_sample, appended
from extractor.system.direct_io import AppendFile
from extractor.system.files import sync_directory
from manifest.records import Shard, StoredRow, StoredSample
from prompts.types import Prompt

#: Patterns of the names below.
SEALED_SHARDS = "shard-[0-9]*.safetensors"
OPEN_SHARDS = ".shard-[0-9]*.open"


def open_shard_path(directory: Path, shard: Shard) -> Path:
    return directory / f".{Path(shard.name).stem}.open"


def sealed_shard_path(directory: Path, shard: Shard) -> Path:
    return directory / shard.name


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """The properties that all shards of a data set share."""

    output: Output
    identity: Identity

    @property
    def directory(self) -> Path:
        return self.output.shards_path


class ShardWriter:
    """Appends samples to one open shard. Not thread-safe."""

    def __init__(
        self,
        settings: ShardSettings,
        shard: Shard,
        samples: Sequence[tuple[int, int]],
        digests: Sequence[str],
    ) -> None:
        self.shard = shard
        self._settings = settings
        self._layout = settings.identity.layout
        self._samples = list(samples)  # (ordinal, num_tokens), in file order
        self._digests = list(digests)  # of each
        self._path = open_shard_path(settings.directory, shard)
        self._file = AppendFile(
            self._path, position=shard.size_bytes, mode=settings.output.file_mode
        )

    @property
    def position(self) -> int:
        """Where the next sample goes. Bytes before it belong to samples of the manifest or to
        samples returned by `append` since the last `sync`."""
        return self._file.position

    @classmethod
    def create(cls, settings: ShardSettings, *, number: int, expected_samples: int) -> ShardWriter:
        """A new shard. Its file is durable by name; the manifest does not know of it yet.

        Raises UsageError when a sealed shard has its name already.
        """
        room = header_room(expected_samples, settings.identity.layout)
        shard = Shard(
            number=number,
            name=shard_name(number),
            data_start=room,
            is_sealed=False,
            size_bytes=room,
            num_samples=0,
        )
        require_not_sealed(settings.directory, shard)
        # A leftover of this name is from a crash before the manifest learnt of it.
        open_shard_path(settings.directory, shard).unlink(missing_ok=True)
        writer = cls(settings, shard, [], [])
        sync_directory(settings.directory)
        return writer

    @classmethod
    def resume(
        cls, settings: ShardSettings, shard: Shard, rows: Sequence[StoredRow]
    ) -> ShardWriter:
        """Go on with a shard that an earlier session left open, behind its durable samples."""
        position = rows[-1].sample.end if rows else shard.data_start
        return cls(
            settings,
            replace(shard, size_bytes=position, num_samples=len(rows)),
            [(row.ordinal, row.prompt.num_tokens) for row in rows],
            [row.sample.digest for row in rows],
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sample of that length may still go here. An empty shard takes any sample."""
        if not self._samples:
            return True
        end = self.position + sample_bytes(num_tokens, self._layout)
        return end <= self._settings.output.shard_bytes and len(self._samples) < samples_that_fit(
            self.shard.data_start, self._layout
        )

    def append(self, prompt: Prompt, pieces: Sequence[DumpPiece]) -> StoredSample:
        """Copy a sample behind the last. Not durable before `sync`.

        Raises SampleFault (the shard is as before), OSError.
        """
        offset = self.position
        digest = append_sample(self._file, prompt, pieces, layout=self._layout)
        self._samples.append((prompt.ordinal, prompt.num_tokens))
        self._digests.append(digest)
        return StoredSample(
            shard=self.shard.number,
            offset=offset,
            size_bytes=self.position - offset,
            digest=digest,
            num_pieces=len(pieces),
        )

    def append_stored(self, row: StoredRow, source: int) -> int | None:
        """Copy a sample of another shard behind the last; its offset here. Not durable before
        `sync`. None, and nothing kept, when its bytes are not those that were stored."""
        offset = self.position
        digest = xxhash.xxh3_128()
        try:
            for block, _ in appended(self._file, source, row.sample.offset, row.sample.end):
                digest.update(block)
        except EOFError:
            digest.reset()
        if digest.hexdigest() != row.sample.digest:
            self._file.rewind(offset)
            return None
        self._samples.append((row.ordinal, row.prompt.num_tokens))
        self._digests.append(digest.hexdigest())
        return offset

    def sync(self) -> None:
        """Make every appended sample durable."""
        self._file.sync()

    def seal(self) -> str:
        """Write the header, make the whole file durable and give it its final name; its digest.

        The manifest must know every sample. A crash leaves the open file or the sealed one
        (`sealed_on_disk`). Raises UsageError, and leaves both files, when the name is taken.
        """
        digest = xxhash.xxh3_128()
        header = encode_shard_header(
            self._samples,
            layout=self._layout,
            metadata=shard_metadata(self._settings.identity),
            room_bytes=self.shard.data_start,
        )
        self._file.finish(_digested(header, digest))
        # A look is enough: whoever writes here holds the directory's lock. (Renames that refuse
        # by themselves, and hard links, are not to be had on every file system.)
        require_not_sealed(self._settings.directory, self.shard)
        os.rename(self._path, sealed_shard_path(self._settings.directory, self.shard))
        sync_directory(self._settings.directory)
        return shard_digest(digest, self._digests)

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def discard(self) -> None:
        """Remove an open shard that holds no sample."""
        self._path.unlink(missing_ok=True)
        sync_directory(self._settings.directory)

    def close(self) -> None:
        self._file.close()


def _digested(blocks: Iterable[bytes], digest: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in blocks:
        digest.update(block)
        yield block


def require_not_sealed(directory: Path, shard: Shard) -> None:
    """Raise UsageError when a sealed file has the name of a shard that is about to take it."""
    path = sealed_shard_path(directory, shard)
    if path.exists():
        raise UsageError(
            f"{path} exists already and is not the shard that would be written there. Restore the "
            "manifest that knows of it, move the file away, or name another --out."
        )


def sealed_on_disk(directory: Path, shard: Shard, rows: Sequence[StoredRow]) -> str | None:
    """The digest of a shard whose sealing got as far as the rename, whatever the manifest says."""
    try:
        with open(sealed_shard_path(directory, shard), "rb") as file:
            header = xxhash.xxh3_128(file.read(shard.data_start))
            return shard_digest(header, (row.sample.digest for row in rows))
    except FileNotFoundError:
        return None


def is_whole_on_disk(directory: Path, shard: Shard) -> bool:
    """Whether the sealed file is there and reaches to the end of the shard's last sample."""
    try:
        return sealed_shard_path(directory, shard).stat().st_size >= shard.size_bytes
    except FileNotFoundError:
        return False


def reopen_on_disk(directory: Path, shard: Shard) -> None:
    """Take a sealed shard's final name away, because samples of it are lost."""
    sealed = sealed_shard_path(directory, shard)
    if sealed.exists():
        os.rename(sealed, open_shard_path(directory, shard))
        sync_directory(directory)


def remove_unknown(directory: Path, shards: Sequence[Shard]) -> None:
    """Remove open shards that the manifest never learnt of: none of their samples is stored."""
    known = {open_shard_path(directory, shard) for shard in shards}
    for path in directory.glob(OPEN_SHARDS):
        if path not in known:
            path.unlink()


def lost_rows(directory: Path, shard: Shard, rows: Sequence[StoredRow]) -> list[StoredRow]:
    """The samples, given in file order, whose bytes are gone: a file is cut at its end only."""
    sealed = sealed_shard_path(directory, shard)
    path = sealed if sealed.exists() else open_shard_path(directory, shard)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return list(rows)
    return [row for row in rows if row.sample.end > size]
