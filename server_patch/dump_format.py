"""The contract between the plugin and the client: the files under the dump root.

Standard library only, so that a laptop without torch can read every file.

```
<root>/<boot id>/<rank>/
    READY.json              the states that this writer captures (see `Ready`)
    FAILED.json             why this writer captures nothing: {"reason": str}
    0000000042.safetensors  one dump: the rows one forward made for one request
    0000000042.error.json   one error record: {"rid": str, "start": int, "reason": str}
    .tmp-*                  a file being written; never read it
```

A dump is a valid safetensors file (https://github.com/huggingface/safetensors#format):

| bytes | content |
|---|---|
| 0..8 | n, unsigned 64-bit little-endian: size of the header |
| 8..8+n | JSON header, padded with spaces so that the data starts on a multiple of 64 |
| 8+n.. | tensors, in the order of `TENSOR_ORDER`, packed without holes |

| tensor | shape | dtype | holds |
|---|---|---|---|
| `aux` | [rows, k*H] | the model's | residual stream at the k boundaries, ascending |
| `last` | [rows, H] | the model's | the state after the final norm (last kind `post` or `both`) |
| `last_pre` | [rows, H] | the model's | h[n], before the final norm (last kind `pre` or `both`) |
| `input_ids` | [rows] | I32 | the token of each row, from the same batch object |

The header's `__metadata__` (strings, as safetensors demands) holds the fields of `DumpHeader`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

FORMAT_VERSION: Final = 1
DUMP_SUFFIX: Final = ".safetensors"
ERROR_SUFFIX: Final = ".error.json"
TEMPORARY_PREFIX: Final = ".tmp-"
READY_NAME: Final = "READY.json"
FAILED_NAME: Final = "FAILED.json"

DATA_ALIGNMENT: Final = 64
#: A dump header holds four tensors and a dozen short fields; anything longer is hostile or torn.
MAX_HEADER_BYTES: Final = 64 * 1024

TENSOR_ORDER: Final = ("aux", "last", "last_pre", "input_ids")
#: Bytes per element of each dtype a dump may hold.
ITEM_BYTES: Final[Mapping[str, int]] = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
STATE_DTYPES: Final = ("BF16", "F16", "F32")
MAX_HIDDEN_SIZE: Final = 1 << 24

#: Last kind -> the state tensors that it stores beside `aux`.
LAST_TENSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "post": ("last",),
    "pre": ("last_pre",),
    "both": ("last", "last_pre"),
}


class DumpFormatError(ValueError):
    """A file under the dump root does not follow the format of this module."""


@dataclass(frozen=True, kw_only=True)
class TensorSpan:
    """The place of one tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int  # one past the last byte

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The shape of the states of one token. Raises DumpFormatError if no model has such states."""

    boundaries: tuple[int, ...]  # ascending boundary indices held in `aux`
    hidden_size: int
    dtype: str  # safetensors name of the states' dtype, one of STATE_DTYPES
    last_kind: str  # post, pre or both

    def __post_init__(self) -> None:
        if not 1 <= self.hidden_size <= MAX_HIDDEN_SIZE:
            raise DumpFormatError(
                f"hidden_size must be 1 to {MAX_HIDDEN_SIZE}, is {self.hidden_size}"
            )
        ascends = list(self.boundaries) == sorted(set(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 0 or not ascends:
            shown = str(self.boundaries)[:80]
            raise DumpFormatError(f"boundaries must be >= 0, ascend and not repeat: {shown}")
        if self.dtype not in STATE_DTYPES:
            raise DumpFormatError(f"dtype must be one of {STATE_DTYPES}, is {self.dtype[:80]!r}")
        if self.last_kind not in LAST_TENSORS:
            raise DumpFormatError(
                f"last_kind must be post, pre or both, is {self.last_kind[:80]!r}"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, in file order."""
        return ("aux", *LAST_TENSORS[self.last_kind])

    def state_width(self, name: str) -> int:
        """Elements per row of one state tensor."""
        return self.hidden_size * (len(self.boundaries) if name == "aux" else 1)

    def tensor_shapes(self, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype, shape) of the tensors of `rows` tokens, in file order."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (self.dtype, (rows, self.state_width(name))) for name in self.state_names
        }
        return {**shapes, "input_ids": ("I32", (rows,))}

    @cached_property
    def bytes_per_token(self) -> int:
        """Data bytes that one token adds to a dump: its states and its id."""
        return sum(_size_bytes(dtype, shape) for dtype, shape in self.tensor_shapes(1).values())


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """The metadata of one dump."""

    rid: str  # the request's id, as the client sent it
    start: int  # position in the prompt of the first row
    rows: int  # number of rows (tokens) in this piece
    layout: StateLayout
    boot_id: str
    rank: int  # data-parallel rank
    counter: int  # number of this file within its rank; a name, never a key
    #: Id of the weights that the forward ran on, as in READY.json; None if they have no id, or
    #: from an older plugin.
    weights: str | None = None

    def __post_init__(self) -> None:
        if not self.rid:
            raise DumpFormatError("rid must not be empty")
        for name, least in (("start", 0), ("rows", 1), ("rank", 0), ("counter", 0)):
            if getattr(self, name) < least:
                raise DumpFormatError(f"{name} must be >= {least}, is {getattr(self, name)}")

    def tensor_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype, shape) of the tensors in such a dump, in file order."""
        return self.layout.tensor_shapes(self.rows)


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A dump file's header and the checked place of its tensors."""

    header: DumpHeader
    tensors: Mapping[str, TensorSpan]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """The plugin could not dump rows of request `rid`; the server continued to serve."""

    rid: str
    start: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts about a served model that determine its states.

    A new one needs a default, for the READY.json and the data sets of before, and nothing else:
    readers walk the fields.
    """

    path: str  # or its hub id, as the server was given it
    architecture: str  # class name of the causal LM
    config_digest: str  # sha256 of the model's config.json content, canonical JSON
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str  # safetensors name
    quantization: str | None = None


#: Keys of the model's facts in READY.json -> the attribute of `ModelInfo`.
MODEL_KEYS: Final[Mapping[str, str]] = {
    "model_path" if fact.name == "path" else fact.name: fact.name for fact in fields(ModelInfo)
}


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """The weights in memory of one replica of the model."""

    #: The fingerprint of their bytes at load, over all ranks. After an update in place, `+` and a
    #: suffix unique to that update follow. None if the fingerprint could not be computed; after an
    #: update then `unknown+...`.
    id: str | None = None
    #: Digest of name, dtype, shape and strides of every tensor on every rank. Fingerprints are
    #: comparable only between equal layouts: another tensor-parallel size stores other slices.
    layout: str | None = None
    seconds: float | None = None  # duration of the fingerprint
    version: str | None = None  # the engine's own label, repeated in each of its replies


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """The engine and the settings that it resolved."""

    version: str
    tp_size: int
    dp_size: int
    chunked_prefill_size: int  # tokens; -1 when prefill is not chunked
    radix_cache: bool
    kv_cache_dtype: str | None = None
    #: Settings that may change numbers: name -> value as text. A setting that is off or unset is
    #: left out; a plugin older than this field has none.
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """The scheduler process that writes the dumps."""

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat: differs if the pid is reused
    started_at: str  # ISO 8601, UTC
    host: str  # the address and port that its server was configured to listen on
    port: int
    #: Target of the link /proc/self/ns/pid: `pid` is valid only in that namespace.
    namespace: str | None = None


@dataclass(frozen=True, kw_only=True)
class CaptureInfo:
    """The states that the plugin captures, and its own configuration."""

    plugin_version: str
    boundaries: tuple[int, ...]  # read back from the armed model, not merely asked for
    last_kind: str  # post, pre or both
    method: str  # e.g. "set_eagle3_layers_to_capture"
    rid_prefix: str
    ring_bytes: int  # pinned (or plain, on CPU) staging memory
    num_writers: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The content of READY.json.

    The file is written when capture is armed and the writers run, and rewritten when the weights in
    memory or their label change.
    """

    boot_id: str
    rank: int  # data-parallel rank
    process: ProcessInfo
    engine: EngineInfo
    model: ModelInfo
    weights: WeightsInfo
    capture: CaptureInfo

    @cached_property
    def layout(self) -> StateLayout:
        """The layout of the dumps. Raises DumpFormatError if no model has such states."""
        return StateLayout(
            boundaries=self.capture.boundaries,
            hidden_size=self.model.hidden_size,
            dtype=self.model.dtype,
            last_kind=self.capture.last_kind,
        )

    def to_document(self) -> dict[str, Any]:
        """Every fact by its key in READY.json, in file order."""
        return {key: attrgetter(place)(self) for key, place in _READY_KEYS.items()}


def _model_places(*, is_optional: bool) -> dict[str, str]:
    """The keys of the model's facts with a default, or without one, and their attributes."""
    names = {
        fact.name for fact in fields(ModelInfo) if (fact.default is not MISSING) == is_optional
    }
    return {key: f"model.{name}" for key, name in MODEL_KEYS.items() if name in names}


#: Keys of READY.json after `format_version`, in file order -> the attribute of `Ready`.
_READY_KEYS: Final[Mapping[str, str]] = {
    "boot_id": "boot_id",
    "rank": "rank",
    "pid": "process.pid",
    "pid_start_ticks": "process.start_ticks",
    "started_at": "process.started_at",
    "plugin_version": "capture.plugin_version",
    "engine_version": "engine.version",
    "host": "process.host",
    "port": "process.port",
    **_model_places(is_optional=False),
    "boundaries": "capture.boundaries",
    "last_kind": "capture.last_kind",
    "capture_method": "capture.method",
    "tp_size": "engine.tp_size",
    "dp_size": "engine.dp_size",
    "rid_prefix": "capture.rid_prefix",
    "chunked_prefill_size": "engine.chunked_prefill_size",
    "radix_cache": "engine.radix_cache",
    "ring_bytes": "capture.ring_bytes",
    "num_writers": "capture.num_writers",
    **_model_places(is_optional=True),
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "pid_namespace": "process.namespace",
    "weights": "weights.id",
    "weights_layout": "weights.layout",
    "weights_s": "weights.seconds",
    "weight_version": "weights.version",
    "settings": "engine.settings",
}


def encode_header(header: DumpHeader) -> bytes:
    """The bytes before the data: the length word and the padded JSON header."""
    document: dict[str, Any] = {
        "__metadata__": {
            "format_version": str(FORMAT_VERSION),
            "rid": header.rid,
            "start": str(header.start),
            "rows": str(header.rows),
            "boundaries": ",".join(map(str, header.layout.boundaries)),
            "hidden_size": str(header.layout.hidden_size),
            "dtype": header.layout.dtype,
            "last_kind": header.layout.last_kind,
            "boot_id": header.boot_id,
            "rank": str(header.rank),
            "counter": str(header.counter),
            **({} if header.weights is None else {"weights": header.weights}),
        },
        **_tensor_entries(header),
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % DATA_ALIGNMENT
    encoded = struct.pack("<Q", len(text) + padding) + text + b" " * padding
    if len(encoded) > MAX_HEADER_BYTES:
        raise DumpFormatError(f"header of rid {header.rid[:64]!r} exceeds {MAX_HEADER_BYTES} bytes")
    return encoded


def decode_header(prefix: bytes, *, file_bytes: int) -> Dump:
    """Parse and check a dump from its first bytes.

    `prefix` holds at least the whole header (`MAX_HEADER_BYTES` are always enough), `file_bytes`
    is the size of the file. Raises DumpFormatError when anything differs from this module's
    description: the tensors and their places are recomputed, never believed.
    """
    if len(prefix) < 8:
        raise DumpFormatError(f"file of {file_bytes} bytes is too short for a header")
    (length,) = struct.unpack_from("<Q", prefix)
    if length > MAX_HEADER_BYTES - 8:
        raise DumpFormatError(f"header claims {length} bytes, at most {MAX_HEADER_BYTES} allowed")
    if len(prefix) < 8 + length:
        raise DumpFormatError(f"header claims {length} bytes, file ends after {len(prefix)}")
    try:
        document = json.loads(prefix[8 : 8 + length])
        metadata = document["__metadata__"]
        if metadata["format_version"] != str(FORMAT_VERSION):
            raise DumpFormatError(
                f"dump format {metadata['format_version']}, this tool reads {FORMAT_VERSION}"
            )
        header = DumpHeader(
            rid=str(metadata["rid"]),
            start=int(metadata["start"]),
            rows=int(metadata["rows"]),
            layout=StateLayout(
                boundaries=tuple(int(b) for b in metadata["boundaries"].split(",")),
                hidden_size=int(metadata["hidden_size"]),
                dtype=str(metadata["dtype"]),
                last_kind=str(metadata["last_kind"]),
            ),
            boot_id=str(metadata["boot_id"]),
            rank=int(metadata["rank"]),
            counter=int(metadata["counter"]),
            weights=str(metadata["weights"]) if "weights" in metadata else None,
        )
    except DumpFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DumpFormatError(f"unreadable dump header: {error!r}") from error
    spans: dict[str, TensorSpan] = {}
    end = 8 + length
    for name, expected in _tensor_entries(header).items():
        stated = document.get(name)
        if stated != expected:
            raise DumpFormatError(f"tensor {name!r} is stated as {stated}, must be {expected}")
        begin, end = (8 + length + offset for offset in expected["data_offsets"])
        spans[name] = TensorSpan(
            dtype=expected["dtype"], shape=tuple(expected["shape"]), begin=begin, end=end
        )
    extra = set(document) - set(spans) - {"__metadata__"}
    if extra:
        raise DumpFormatError(f"unexpected tensors {sorted(extra)}")
    if end != file_bytes:
        raise DumpFormatError(f"file has {file_bytes} bytes, its header describes {end}")
    return Dump(header=header, tensors=spans, size_bytes=file_bytes)


def _tensor_entries(header: DumpHeader) -> dict[str, dict[str, Any]]:
    """The tensors of a dump, as its JSON header states them."""
    entries: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, (dtype, shape) in header.tensor_shapes().items():
        end = begin + _size_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return entries


def open_dump(path: Path) -> int:
    """A descriptor to read a dump or an error record; the caller closes it.

    Anything but a regular file is refused, not waited for or followed: whoever may write to the
    directory can put a pipe or a link there. Raises OSError, DumpFormatError.
    """
    return _open_regular(path)[0]


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DumpFormatError(f"{path} is no regular file") from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise DumpFormatError(f"{path} is no regular file")
    return descriptor, facts


def read_header(path: Path) -> Dump:
    """Header of the dump at `path`. Raises OSError, DumpFormatError (naming the path)."""
    return read_beginning(path)[0]


def read_beginning(path: Path, *, whole_bytes: int = 0) -> tuple[Dump, bytes]:
    """Header of the dump at `path`, and the file's first bytes: all of it where it has no more than
    `whole_bytes`, else the header at least. Raises OSError, DumpFormatError (naming the path).
    """
    descriptor, facts = _open_regular(path)
    try:
        prefix = os.read(descriptor, facts.st_size if facts.st_size <= whole_bytes else 4096)
        if len(prefix) >= 8:
            (length,) = struct.unpack_from("<Q", prefix)
            missing = min(8 + length, MAX_HEADER_BYTES) - len(prefix)
            if missing > 0:
                prefix += os.read(descriptor, missing)
    finally:
        os.close(descriptor)
    try:
        return decode_header(prefix, file_bytes=facts.st_size), prefix
    except DumpFormatError as error:
        raise DumpFormatError(f"{path}: {error}") from error


_DUMP_NAME = re.compile(r"\d{10}\.safetensors")
_ERROR_NAME = re.compile(r"\d{10}\.error\.json")


def dump_name(counter: int) -> str:
    return f"{counter:010d}{DUMP_SUFFIX}"


def error_name(counter: int) -> str:
    return f"{counter:010d}{ERROR_SUFFIX}"


def is_dump_name(name: str) -> bool:
    return _DUMP_NAME.fullmatch(name) is not None


def is_error_name(name: str) -> bool:
    return _ERROR_NAME.fullmatch(name) is not None


def encode_error(record: ErrorRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def decode_error(data: bytes) -> ErrorRecord:
    """Raises DumpFormatError."""
    document = _decode_object(data, what="error record")
    try:
        return ErrorRecord(
            rid=str(document["rid"]), start=int(document["start"]), reason=str(document["reason"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DumpFormatError(f"unreadable error record: {error!r}") from error


def encode_ready(ready: Ready) -> bytes:
    document = {"format_version": FORMAT_VERSION, **ready.to_document()}
    return json.dumps(document, indent=1).encode()


def decode_ready(data: bytes) -> Ready:
    """Raises DumpFormatError, also for a READY.json of another format version."""
    document = _decode_object(data, what=READY_NAME)
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise DumpFormatError(
            f"{READY_NAME} has dump format {version}, this tool reads {FORMAT_VERSION}: "
            "install the same version on both sides"
        )
    try:
        document["boundaries"] = tuple(int(b) for b in document["boundaries"])
        settings = document.get("settings", {})
        document["settings"] = {str(name): str(value) for name, value in settings.items()}
        # Keys of a newer plugin are ignored; those that an older one lacks have defaults.
        values: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, place in _READY_KEYS.items():
            if key in document:
                owner, _, name = place.rpartition(".")
                values[owner][name] = document[key]
        ready = Ready(
            process=ProcessInfo(**values["process"]),
            engine=EngineInfo(**values["engine"]),
            model=ModelInfo(**values["model"]),
            weights=WeightsInfo(**values["weights"]),
            capture=CaptureInfo(**values["capture"]),
            **values[""],
        )
        _ = ready.layout  # checked here, so that no reader meets an error later
        return ready
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DumpFormatError(f"unreadable {READY_NAME}: {error!r}") from error


def _decode_object(data: bytes, *, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DumpFormatError(f"unreadable {what}: {error!r}") from error
    if not isinstance(document, dict):
        raise DumpFormatError(f"unreadable {what}: not a JSON object")
    return document


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    return size
