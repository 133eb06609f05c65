"""Writes shard files in durable order, and inspects what is on disk.

An open shard is `shards/.shard-000000.open`: header room, then samples. `sync` makes the samples
so far durable; only then may the manifest call them stored. Sealing writes the header, syncs,
and renames to the final name. After a crash the manifest says where the durable samples end;
what lies behind that is overwritten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from extractor.core.errors import UsageError
from extractor.core.identity import Identity
from extractor.dumps.dump_reader import DumpPiece
from extractor.shards.format import (
    encode_shard_header,
    header_room,
    sample_bytes,
    samples_that_fit,
    shard_digest,
    shard_metadata,
)
from extractor.shards.sample_copy import append_sample, appended
from extractor.system.direct_io import AppendFile
from manifest.records import Shard, StoredRow, StoredSample
from prompts.types import Prompt
from server_patch.directory import Directory

_SEALED = re.compile(r"shard-\d+\.safetensors")
_OPEN = re.compile(r"\.shard-\d+\.open")


def open_shard_name(shard: Shard) -> str:
    return f".{shard.name.removesuffix('.safetensors')}.open"


def sealed_names(directory: Directory) -> list[str]:
    """The sorted names of sealed shards, known to the manifest or not."""
    return sorted(filter(_SEALED.fullmatch, directory.names()))


def open_names(directory: Directory) -> list[str]:
    """The sorted names of open shards."""
    return sorted(filter(_OPEN.fullmatch, directory.names()))


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """The properties that all shards of a data set share."""

    directory: Directory  # of the shards
    file_mode: int
    shard_bytes: int
    identity: Identity


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
        self._name = open_shard_name(shard)
        self._file = AppendFile(
            settings.directory.open_to_write(self._name, mode=settings.file_mode),
            position=shard.size_bytes,
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
            data_start=room,
            is_sealed=False,
            size_bytes=room,
            num_samples=0,
        )
        require_not_sealed(settings.directory, shard)
        # A leftover of this name is from a crash before the manifest learnt of it.
        settings.directory.unlink(open_shard_name(shard))
        writer = cls(settings, shard, [], [])
        settings.directory.sync()
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
        return end <= self._settings.shard_bytes and len(self._samples) < samples_that_fit(
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
        self._settings.directory.rename(self._name, self.shard.name)
        self._settings.directory.sync()
        return shard_digest(digest, self._digests)

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def discard(self) -> None:
        """Remove an open shard that holds no sample."""
        self._settings.directory.unlink(self._name)
        self._settings.directory.sync()

    def close(self) -> None:
        self._file.close()


def _digested(blocks: Iterable[bytes], digest: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in blocks:
        digest.update(block)
        yield block


def require_not_sealed(directory: Directory, shard: Shard) -> None:
    """Raise UsageError when a sealed file has the name of a shard that is about to take it."""
    if directory.exists(shard.name):
        raise UsageError(
            f"{directory.path / shard.name} exists already and is not the shard that would be "
            "written there. Restore the manifest that knows of it, move the file away, or name "
            "another --out."
        )


def sealed_on_disk(directory: Directory, shard: Shard, rows: Sequence[StoredRow]) -> str | None:
    """The digest of a shard whose sealing got as far as the rename, whatever the manifest says."""
    try:
        descriptor, _ = directory.open_file(shard.name)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        header = xxhash.xxh3_128(file.read(shard.data_start))
        return shard_digest(header, (row.sample.digest for row in rows))


def is_whole_on_disk(directory: Directory, shard: Shard) -> bool:
    """Whether the sealed file is there and reaches to the end of the shard's last sample."""
    size = _size_of(directory, shard.name)
    return size is not None and size >= shard.size_bytes


def reopen_on_disk(directory: Directory, shard: Shard) -> None:
    """Take a sealed shard's final name away, because samples of it are lost."""
    if directory.exists(shard.name):
        directory.rename(shard.name, open_shard_name(shard))
        directory.sync()


def remove_unknown(directory: Directory, shards: Sequence[Shard]) -> None:
    """Remove open shards that the manifest never learnt of: none of their samples is stored."""
    known = {open_shard_name(shard) for shard in shards}
    for name in open_names(directory):
        if name not in known:
            directory.unlink(name)


def lost_rows(directory: Directory, shard: Shard, rows: Sequence[StoredRow]) -> list[StoredRow]:
    """The samples, given in file order, whose bytes are gone: a file is cut at its end only."""
    size = _size_of(directory, shard.name)
    if size is None:
        size = _size_of(directory, open_shard_name(shard))
    return [row for row in rows if size is None or row.sample.end > size]


def _size_of(directory: Directory, name: str) -> int | None:
    """The size of a shard; None where nothing has the name. Raises UnsafeFile for anything but a
    regular file: its samples are not lost, they are somewhere else."""
    try:
        descriptor, facts = directory.open_file(name)
    except FileNotFoundError:
        return None
    os.close(descriptor)
    return facts.st_size
