"""What a run is asked to do. Frozen values; every bound is checked where the value is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from ipaddress import ip_address
from os.path import realpath
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from extractor.bounds import (
    MAX_BYTES,
    MAX_CONCURRENCY,
    MAX_COUNT,
    MAX_MOVERS,
    MAX_SECONDS,
    MAX_TOKENIZER_WORKERS,
    require_within,
)
from extractor.errors import ConfigMismatch, CorruptData, UsageError
from extractor.policy import DEFAULT_POLICY, Policy
from prompts.options import DEFAULTS, ReadingOptions
from server_patch.dump_format import LAST_TENSORS, STATE_DTYPES, Ready, bytes_per_token

DEFAULT_SERVER_URL = "http://127.0.0.1:30000"
DEFAULT_OUT = Path("extraction")
#: In place of a tokenizer's path: there are rows of ids only.
NO_TOKENIZER = "none"
DEFAULT_DUMP_ROOT = Path("/dev/shm/hidden-states")
DEFAULT_SHARD_BYTES = 4 << 30
MANIFEST_NAME = "manifest.sqlite"
DATASET_NAME = "dataset.json"
SHARDS_DIRECTORY = "shards"
MAX_HIDDEN_SIZE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of the states of one token: the same for every sample of a data set."""

    boundaries: tuple[int, ...]  # ascending boundary indices
    hidden_size: int
    dtype: str  # safetensors name: BF16, F16 or F32
    last_kind: str  # post, pre or both

    @classmethod
    def of(cls, ready: Ready) -> Layout:
        """The layout of the states that a writer announced."""
        return cls(
            boundaries=ready.layout.boundaries,
            hidden_size=ready.layout.hidden_size,
            dtype=ready.layout.dtype,
            last_kind=ready.layout.last_kind,
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, in file order."""
        return ("aux", *LAST_TENSORS[self.last_kind])

    @cached_property
    def dump_bytes_per_token(self) -> int:
        return bytes_per_token(
            num_boundaries=len(self.boundaries),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            last_kind=self.last_kind,
        )

    def require_sound(self) -> None:
        """Raise CorruptData if no model can have such states."""
        ascends = list(self.boundaries) == sorted(set(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 0 or not ascends:
            raise CorruptData(f"boundaries must ascend and not repeat: {_shown(self.boundaries)}")
        if not 1 <= self.hidden_size <= MAX_HIDDEN_SIZE:
            raise CorruptData(f"hidden_size must be 1 to {MAX_HIDDEN_SIZE}, is {self.hidden_size}")
        if self.dtype not in STATE_DTYPES:
            raise CorruptData(f"dtype must be one of {STATE_DTYPES}, is {_shown(self.dtype)}")
        if self.last_kind not in LAST_TENSORS:
            raise CorruptData(f"last_kind must be post, pre or both, is {_shown(self.last_kind)}")

    def state_width(self, name: str) -> int:
        """Elements per row of one state tensor."""
        return self.hidden_size * (len(self.boundaries) if name == "aux" else 1)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a data set is of. Two runs may share an output directory only if all of it is equal."""

    model: str  # path or name, as the server has it
    architecture: str
    config_digest: str  # of the model's config.json
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str
    boundaries: tuple[int, ...]
    last_kind: str
    quantization: str | None
    tokenizer_digest: str
    template_digest: str
    reading: Mapping[str, Any]  # how rows become prompts, where a person chooses
    inputs: tuple[str, ...]  # digest of each input file, in order

    @classmethod
    def of(
        cls,
        ready: Ready,
        *,
        tokenizer_digest: str,
        template_digest: str,
        reading: Mapping[str, Any],
        inputs: tuple[str, ...],
    ) -> Identity:
        return cls(
            model=ready.model.path,
            architecture=ready.model.architecture,
            config_digest=ready.model.config_digest,
            vocab_size=ready.model.vocab_size,
            num_layers=ready.model.num_layers,
            hidden_size=ready.model.hidden_size,
            dtype=ready.model.dtype,
            boundaries=ready.capture.boundaries,
            last_kind=ready.capture.last_kind,
            quantization=ready.model.quantization,
            tokenizer_digest=tokenizer_digest,
            template_digest=template_digest,
            reading=reading,
            inputs=inputs,
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Identity:
        """Read the identity from the manifest's document.

        Raises ConfigMismatch naming a missing field, CorruptData naming an invalid one.
        """
        if not document:
            raise UsageError(
                "no run has got as far as its first prompt here; run the same command again"
            )
        names = {field.name for field in fields(cls)}
        missing = names - set(document)
        if missing:
            raise ConfigMismatch(
                f"the manifest lacks the field(s) {', '.join(sorted(missing))}: "
                "it was begun by another version of this tool. Use a new --out."
            )
        values: dict[str, Any] = {}
        for known in fields(cls):
            value = document[known.name]
            if not _FITS[str(known.type)](value):
                raise CorruptData(f"{known.name} is {_shown(value)}, must be {known.type}")
            values[known.name] = tuple(value) if isinstance(value, list) else value
        identity = cls(**values)
        if identity.vocab_size < 1:
            raise CorruptData(f"vocab_size must be >= 1, is {identity.vocab_size}")
        identity.layout.require_sound()
        return identity

    def to_document(self) -> dict[str, Any]:
        """JSON-ready, field by field."""
        return asdict(self)

    @property
    def layout(self) -> Layout:
        return Layout(
            boundaries=self.boundaries,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            last_kind=self.last_kind,
        )

    def _comparable(self) -> dict[str, object]:
        """Every field by name; what `reading` holds, by the options that set it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # A manifest older than an option was begun with what is now the option's default.
        reading = {**DEFAULT_READING, **values.pop("reading")}
        return {**values, **{_option_of(name): value for name, value in reading.items()}}

    def require_same(
        self, begun_with: Identity, *, out: Path, other_inputs: str | None = None
    ) -> None:
        """Raise ConfigMismatch naming every field in which this run differs from the manifest's.

        `other_inputs`: in which way the inputs differ, if they do, where that is known.
        """
        # provenance.py compares the server's facts, which the user may allow to change.
        before, now = begun_with._comparable(), self._comparable()
        differences = [
            f"  {name}: {out} has {_shown(before.get(name))}, this run has {_shown(now.get(name))}"
            for name in dict.fromkeys((*before, *now))
            if name not in _OF_THE_SERVER
            and before.get(name) != now.get(name)
            and not (name == "inputs" and other_inputs)
        ]
        if other_inputs is not None:
            differences.append(f"  inputs: {other_inputs}")
        if differences:
            raise ConfigMismatch(
                f"{out} was begun with another configuration:\n"
                + "\n".join(differences)
                + "\nUse the old configuration, or another --out."
            )


#: Fields of an identity that describe the server's model. They are not compared here, since a moved
#: model is still the same; extractor/provenance.py compares what every server start announced.
_OF_THE_SERVER = ("model", "architecture", "config_digest", "quantization")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One `extractor run`: where things are, how hard to push, what to make of which rows."""

    prompts: tuple[Path, ...]
    out: Path = DEFAULT_OUT
    server_urls: tuple[str, ...] = (DEFAULT_SERVER_URL,)
    dump_root: Path = DEFAULT_DUMP_ROOT
    tokenizer: str | None = None  # default: the server's
    concurrency: int | None = None  # requests in flight with each server; None: finds itself
    shm_budget_bytes: int | None = None  # default: half of what is free under dump_root
    shard_bytes: int = DEFAULT_SHARD_BYTES
    num_movers: int = 1  # threads that copy dumps to shards
    max_attempts: int = 4  # requests per prompt and session
    request_timeout_s: float = 600.0  # one request, from sending to the answer
    dump_timeout_s: float = 60.0  # from the answer to the last piece
    server_wait_s: float = 0.0  # how long a server may take to come up
    file_mode: int = 0o644  # of shards and manifest
    # What the server must serve, where the user said so; None: whatever it does.
    model: str | None = None
    layers: str | None = None  # eagle3, or boundary indices as in "3,31,59"
    last_kind: str | None = None
    retry_failed: bool = False  # rows that an earlier session gave up are tried again
    allow_model_change: bool = False  # continue with a server that computes other states
    # What the prompts are; part of the data set's identity.
    reading: ReadingOptions = DEFAULTS
    policy: Policy = DEFAULT_POLICY
    tokenizer_workers: int | None = None  # processes; None: as many as pay

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("name at least one prompt file")
        if not self.server_urls:
            raise UsageError("name at least one --server")
        for url in self.server_urls:
            require_url(url)
        # As the clients write them, so that two spellings are one.
        urls = tuple(url.rstrip("/") for url in self.server_urls)
        object.__setattr__(self, "server_urls", urls)
        # Not `Path.resolve`, which raises for symlink loops; a later check reports those.
        if Path(realpath(self.out)).is_relative_to(realpath(self.dump_root)):
            raise UsageError(
                f"--out {self.out} lies in the dump directory {self.dump_root}, which is cleaned "
                "of what is no dump of a live server; name another"
            )
        if len({url.lower() for url in self.server_urls}) < len(self.server_urls):
            raise UsageError(f"a --server is named twice: {', '.join(self.server_urls)}")
        for name, option, least, most in (
            ("concurrency", "--concurrency", 1, MAX_CONCURRENCY),
            ("shard_bytes", "--shard-size", 1, MAX_BYTES),
            ("shm_budget_bytes", "--shm-budget", 1, MAX_BYTES),
            ("num_movers", "--movers", 1, MAX_MOVERS),
            ("max_attempts", "--max-attempts", 1, MAX_COUNT),
            ("request_timeout_s", "--request-timeout", 0.001, MAX_SECONDS),
            ("dump_timeout_s", "--dump-timeout", 0.001, MAX_SECONDS),
            ("server_wait_s", "--server-wait", 0, MAX_SECONDS),
            ("tokenizer_workers", "--tokenizer-workers", 0, MAX_TOKENIZER_WORKERS),
        ):
            require_within(option, getattr(self, name), least=least, most=most)

    def with_server(self, url: str) -> RunOptions:
        """The same run against another server."""
        return replace(self, server_urls=(url,))

    @property
    def reading_document(self) -> dict[str, Any]:
        """All that decides how rows become prompts, as the identity holds it."""
        return _reading_document(self.reading, self.policy)

    @property
    def manifest_path(self) -> Path:
        return self.out / MANIFEST_NAME

    @property
    def shards_path(self) -> Path:
        return self.out / SHARDS_DIRECTORY


def _reading_document(reading: ReadingOptions, policy: Policy) -> dict[str, Any]:
    return {**reading.to_document(), **policy.to_document()}


DEFAULT_READING: Final = _reading_document(DEFAULTS, DEFAULT_POLICY)


def require_url(url: str) -> None:
    """Raise UsageError unless `url` is a server's address as we take it."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
        is_good = is_good and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # an invalid port, an unmatched bracket
        is_good = False
    if "@" in url.partition("//")[2].partition("/")[0]:  # not quoted: it may hold a password
        raise UsageError("--server: no user or password in the address; EXTRACTOR_API_KEY is sent")
    if not is_good:
        raise UsageError(
            f"--server {url!r}: write it as http://HOST:PORT, HOST being a name, an IPv4 address, "
            "or an IPv6 address in brackets"
        )


def is_host(name: str) -> bool:
    """Whether `name` is a valid host name or IP address.

    >>> [is_host(name) for name in ("::1", "10.0.0.7", "gpu-1.lan", "256.1.1.1", "-x-", "a b", "")]
    [True, True, True, False, False, False, False]
    """
    try:
        ip_address(name)
        return True
    except ValueError:
        pass
    try:
        labels = name.encode("idna").decode().removesuffix(".").split(".")
    except UnicodeError:  # an empty or overlong label
        return False
    # A numeric last label means an IPv4 address, here an invalid one.
    return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def url_host(name: str) -> str:
    """Format a host for a URL.

    >>> url_host("::1"), url_host("gpu-1")
    ('[::1]', 'gpu-1')
    """
    return f"[{name}]" if ":" in name else name


_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?", re.IGNORECASE)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: Checks whether a JSON value fits a field of the identity, by the field's type.
_FITS: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": _is_integer,
    "tuple[int, ...]": lambda value: isinstance(value, list) and all(map(_is_integer, value)),
    "tuple[str, ...]": lambda value: (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    ),
    "Mapping[str, Any]": lambda value: isinstance(value, dict),
}


def _option_of(name: str) -> str:
    """The option that sets a field of `reading`."""
    return "--field" if name == "fields" else f"--{name.replace('_', '-')}"


def _shown(value: object) -> str:
    text = "no value" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
