"""The contract between the plugin and the client: the files under the dump root.

Standard library only, so that a laptop without torch can read every file.

```
<root>/<boot id>/<rank>/
    READY.json              the states that this writer captures (see `Ready`)
    FAILED.json             why this writer captures nothing: {"reason": str, "pid": int}
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

import json
import os
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from server_patch.directory import Directory
from server_patch.fields import (
    MAX_INTEGER,
    Document,
    FieldError,
    array,
    boolean,
    integer,
    mapping,
    number,
    object_of,
    optional,
    text,
)

FORMAT_VERSION: Final = 1
DUMP_SUFFIX: Final = ".safetensors"
ERROR_SUFFIX: Final = ".error.json"
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
#: READY.json, FAILED.json and error records have a few kilobytes.
MAX_DOCUMENT_BYTES: Final = 1 << 20
MAX_TEXT_CHARS: Final = 4096
#: Writers of one server, and process ids (pid_t).
MAX_RANKS: Final = 1 << 12
MAX_PID: Final = (1 << 31) - 1
_MAX_BOUNDARIES: Final = 1024
_MAX_SETTINGS: Final = 1024

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
class FailedRecord:
    """A rank captures nothing: the content of FAILED.json."""

    reason: str
    pid: int | None  # of the server's process; None from an older plugin


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


#: Least and most of numbers in READY.json, where 0 and MAX_INTEGER say too little.
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "rank": (0, MAX_RANKS - 1),
    "pid": (1, MAX_PID),
    "port": (0, 65535),
    "vocab_size": (1, (1 << 31) - 1),
    "num_layers": (1, 1 << 20),
    "hidden_size": (1, MAX_HIDDEN_SIZE),
    "tp_size": (1, MAX_RANKS),
    "dp_size": (1, MAX_RANKS),
    "chunked_prefill_size": (-1, MAX_INTEGER),
    "num_writers": (0, MAX_RANKS),
}
#: The facts of READY.json by the record that holds them.
_FACTS: Final[Mapping[str, Mapping[str, Field[Any]]]] = {
    owner: {fact.name: fact for fact in fields(record)}
    for owner, record in {
        "": Ready,
        "process": ProcessInfo,
        "engine": EngineInfo,
        "model": ModelInfo,
        "weights": WeightsInfo,
        "capture": CaptureInfo,
    }.items()
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
        metadata = _require_strings(document["__metadata__"])
        if metadata["format_version"] != str(FORMAT_VERSION):
            raise DumpFormatError(
                f"dump format {metadata['format_version'][:80]}, this tool reads {FORMAT_VERSION}"
            )
        boundaries = metadata["boundaries"].split(",", _MAX_BOUNDARIES)
        header = DumpHeader(
            rid=metadata["rid"],
            start=_parse_integer(metadata["start"]),
            rows=_parse_integer(metadata["rows"]),
            layout=StateLayout(
                boundaries=tuple(_parse_integer(boundary) for boundary in boundaries),
                hidden_size=_parse_integer(metadata["hidden_size"]),
                dtype=metadata["dtype"],
                last_kind=metadata["last_kind"],
            ),
            boot_id=metadata["boot_id"],
            rank=_parse_integer(metadata["rank"]),
            counter=_parse_integer(metadata["counter"]),
            weights=metadata.get("weights"),
        )
    except DumpFormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DumpFormatError(f"unreadable dump header: {_shown(repr(error))}") from error
    spans: dict[str, TensorSpan] = {}
    end = 8 + length
    for name, expected in _tensor_entries(header).items():
        stated = document.get(name)
        if stated != expected:
            raise DumpFormatError(
                f"tensor {name!r} is stated as {_shown(str(stated))}, must be {expected}"
            )
        begin, end = (8 + length + offset for offset in expected["data_offsets"])
        spans[name] = TensorSpan(
            dtype=expected["dtype"], shape=tuple(expected["shape"]), begin=begin, end=end
        )
    extra = set(document) - set(spans) - {"__metadata__"}
    if extra:
        raise DumpFormatError(f"unexpected tensors {_shown(str(sorted(extra)))}")
    if end != file_bytes:
        raise DumpFormatError(f"file has {file_bytes} bytes, its header describes {end}")
    return Dump(header=header, tensors=spans, size_bytes=file_bytes)


def _tensor_entries(header: DumpHeader) -> dict[str, dict[str, Any]]:
    """The tensors of a dump, as its JSON header states them."""
    entries: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, (dtype, shape) in header.layout.tensor_shapes(header.rows).items():
        end = begin + _size_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return entries


def _require_strings(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ must be an object of strings")
    return metadata


def _parse_integer(value: str) -> int:
    if _INTEGER.fullmatch(value) is None:
        raise ValueError(f"{_shown(value)} is not an integer of at most 19 digits")
    return int(value)


def _shown(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:200]}..."


def read_beginning(directory: Directory, name: str, *, whole_bytes: int = 0) -> tuple[Dump, bytes]:
    """Header of a dump, and the file's first bytes: all of it where it has no more than
    `whole_bytes`, else the header at least.

    Raises OSError; UnsafeFile for anything but a regular file of the directory's owners;
    DumpFormatError, naming the path.
    """
    descriptor, facts = directory.open_file(name)
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
        raise DumpFormatError(f"{directory.path / name}: {error}") from error


_INTEGER = re.compile(r"-?[0-9]{1,19}")
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
    try:
        document = object_of(data, what="error record")
        return ErrorRecord(
            rid=_string(document, "rid", max_chars=MAX_DOCUMENT_BYTES),
            start=integer(document, "start", minimum=0),
            reason=_string(document, "reason"),
        )
    except FieldError as error:
        raise DumpFormatError(f"unreadable error record: {error}") from error


def encode_failed(record: FailedRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def decode_failed(data: bytes) -> FailedRecord:
    """Raises DumpFormatError."""
    try:
        document = object_of(data, what=FAILED_NAME)
        return FailedRecord(
            reason=_string(document, "reason", max_chars=MAX_DOCUMENT_BYTES),
            pid=optional(integer, document, "pid", minimum=1, maximum=MAX_PID),
        )
    except FieldError as error:
        raise DumpFormatError(f"unreadable {FAILED_NAME}: {error}") from error


def encode_ready(ready: Ready) -> bytes:
    document = {"format_version": FORMAT_VERSION, **ready.to_document()}
    return json.dumps(document, indent=1).encode()


def decode_ready(data: bytes) -> Ready:
    """Raises DumpFormatError, also for a READY.json of another format version."""
    try:
        document = object_of(data, what=READY_NAME)
        version = integer(document, "format_version")
        if version != FORMAT_VERSION:
            raise DumpFormatError(
                f"{READY_NAME} has dump format {version}, this tool reads {FORMAT_VERSION}: "
                "install the same version on both sides"
            )
        # Keys of a newer plugin are ignored; those that an older one lacks have defaults.
        values: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, place in _READY_KEYS.items():
            owner, _, name = place.rpartition(".")
            fact = _FACTS[owner][name]
            if key in document or fact.default is fact.default_factory is MISSING:
                values[owner][name] = _read_fact(document, key, str(fact.type))
        ready = Ready(
            process=ProcessInfo(**values["process"]),
            engine=EngineInfo(**values["engine"]),
            model=ModelInfo(**values["model"]),
            weights=WeightsInfo(**values["weights"]),
            capture=CaptureInfo(**values["capture"]),
            **values[""],
        )
        _require_layout(ready)  # here, so that no reader meets an error later
        return ready
    except FieldError as error:
        raise DumpFormatError(f"unreadable {READY_NAME}: {error}") from error


def _require_layout(ready: Ready) -> None:
    try:
        _ = ready.layout
    except DumpFormatError as error:
        raise FieldError(str(error)) from error


def _read_fact(document: Document, key: str, annotation: str) -> object:
    """The value of a key of READY.json by the type of the field that it fills."""
    minimum, maximum = _RANGES.get(key, (0, MAX_INTEGER))
    match annotation:
        case "str":
            return _string(document, key)
        case "str | None":
            return optional(_string, document, key)
        case "int":
            return integer(document, key, minimum=minimum, maximum=maximum)
        case "bool":
            return boolean(document, key)
        case "float | None":
            return optional(number, document, key, minimum=minimum, maximum=maximum)
        case "tuple[int, ...]":
            return _boundaries(document, key)
        case "Mapping[str, str]":
            return _settings(document, key)
    raise TypeError(f"no way to read {key}, which is {annotation}")


def _string(document: Document, key: str, *, max_chars: int = MAX_TEXT_CHARS) -> str:
    """The string at `key`, which may be empty."""
    value = "" if document.get(key) == "" else text(document, key)
    if len(value) > max_chars:
        raise FieldError(f"{key} has {len(value)} characters, at most {max_chars} allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FieldError(f"{key} is not text") from error  # half a surrogate pair
    return value


def _boundaries(document: Document, key: str) -> tuple[int, ...]:
    count = len(array(document, key))
    if count > _MAX_BOUNDARIES:
        raise FieldError(f"{key} has {count} entries, at most {_MAX_BOUNDARIES} allowed")
    return tuple(integer(document, f"{key}.{i}", minimum=0, maximum=1 << 20) for i in range(count))


def _settings(document: Document, key: str) -> dict[str, str]:
    found = mapping(document, key)
    if len(found) > _MAX_SETTINGS:
        raise FieldError(f"{key} has {len(found)} entries, at most {_MAX_SETTINGS} allowed")
    # A name may hold a dot, which a path must not.
    return {
        _string({"name": name}, "name"): _string({key: value}, key) for name, value in found.items()
    }


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    return size
