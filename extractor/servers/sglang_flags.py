"""How to start SGLang so that extraction works: arguments and environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from extractor.core.address import is_host, url_host
from extractor.core.errors import UsageError
from extractor.core.locations import DEFAULT_DUMP_ROOT, DumpRoot
from extractor.core.option import MAX_SECONDS, Option, check_options
from server_patch import settings as plugin

DEFAULT_LAYERS: Final = "eagle3"
DEFAULT_LAST_KIND: Final = "post"

#: Environment and arguments, by preset.
PRESETS: Final[Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]]] = {
    "none": ({}, ()),
    # For a host whose GPUs have no fast link between them (and for one that hung without).
    "multi-gpu": (
        {
            "NCCL_PROTO": "LL",
            "NCCL_ALGO": "Ring",
            "NCCL_P2P_LEVEL": "SYS",
            "NCCL_MAX_NCHANNELS": "16",
            "NCCL_BUFFSIZE": "16777216",
            "NCCL_NTHREADS": "512",
        },
        (
            "--attention-backend", "triton",
            "--disable-custom-all-reduce",
            "--mem-fraction-static", "0.85",
        ),
    ),
}  # fmt: skip

_OPTIONS_OF_VARIABLES: Final[Mapping[str, str]] = {
    plugin.DUMP_DIR: "--dump-dir",
    plugin.BOUNDARIES: "--layers",
    plugin.LAST: "--last",
    plugin.RING_BYTES: "--ring-bytes",
    plugin.RING_SLOTS: "--ring-slots",
    plugin.WRITERS: "--writers",
    plugin.FILE_MODE: "--file-mode",
}

#: Given to SGLang by us, or at odds with extraction.
_OURS: Final = ("--model-path", "--model", "--host", "--port")
_FORBIDDEN: Final[Mapping[str, str]] = {
    "--speculative-algorithm": "a drafter changes what the target model computes",
    "--speculative-draft-model-path": "a drafter changes what the target model computes",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of SGLang itself. Raises UsageError for arguments that cannot work."""

    model: str
    host: str = "127.0.0.1"
    port: int = 30000
    radix_cache: bool = False
    preset: str = "none"
    arguments: tuple[str, ...] = ()  # for SGLang, as they are

    def __post_init__(self) -> None:
        for argument in self.arguments:
            name = argument.partition("=")[0]
            if name in _OURS:
                raise UsageError(f"give {name} to `extractor serve` itself, before the --")
            if name in _FORBIDDEN:
                raise UsageError(f"extraction does not work with {name}: {_FORBIDDEN[name]}")
        if self.preset not in PRESETS:
            raise UsageError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        if self.model.startswith(("/", ".", "~")) and not Path(self.model).is_dir():
            raise UsageError(f"--model {self.model}: no such folder")
        if not is_host(self.host):
            raise UsageError(
                f"--host {self.host!r}: write a name or an IP address, without brackets"
            )

    @property
    def url(self) -> str:
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return f"http://{url_host(loopback.get(self.host, self.host))}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Variables of the preset; and none of its output is buffered, or the log would stand still
        while the server does not."""
        return {"PYTHONUNBUFFERED": "1", **PRESETS[self.preset][0]}

    def command(self, python: str, *, engine_version: str) -> list[str]:
        """The server's command line for that version of SGLang."""
        _, preset = PRESETS[self.preset]
        command = [
            python, "-m", "sglang.launch_server",
            "--model-path", self.model,
            "--host", self.host,
            "--port", str(self.port),
            *graph_arguments(engine_version),
        ]  # fmt: skip
        if not self.radix_cache:
            command.append("--disable-radix-cache")
        return [*command, *preset, *self.arguments]


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """The options of the plugin. Raises UsageError for those that it would refuse."""

    dump_root: Path = DEFAULT_DUMP_ROOT
    layers: str = DEFAULT_LAYERS  # or boundary indices, as in "3,31,59"
    last_kind: str = DEFAULT_LAST_KIND
    ring_bytes: int | None = None
    ring_slots: int | None = None
    num_writers: int | None = None
    file_mode: str | None = None  # octal

    def __post_init__(self) -> None:
        if not self.layers.strip():
            raise UsageError("--layers is empty: write eagle3, or a list such as 3,31,59")
        # The plugin's own parser, here rather than in the server's log minutes later.
        with _naming_options():
            self._settings()

    def _settings(self) -> plugin.Settings:
        settings = plugin.Settings.from_environ(self.environment(boot_id="check"))
        assert settings is not None  # --dump-dir is given
        return settings

    @property
    def dumps(self) -> DumpRoot:
        """The dump root; shared with its group if that may write the dumps."""
        return DumpRoot(path=self.dump_root.absolute(), is_shared=self._settings().is_shared)

    @property
    def directory_mode(self) -> int:
        """Permission bits of a dump root that is made."""
        return self._settings().directory_mode

    def environment(self, *, boot_id: str) -> dict[str, str]:
        """The variables that switch the plugin on."""
        values = {
            plugin.DUMP_DIR: self.dump_root.absolute(),
            plugin.BOUNDARIES: self.layers,
            plugin.LAST: self.last_kind,
            plugin.BOOT_ID: boot_id,
            plugin.RING_BYTES: self.ring_bytes,
            plugin.RING_SLOTS: self.ring_slots,
            plugin.WRITERS: self.num_writers,
            plugin.FILE_MODE: self.file_mode,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one `extractor serve`."""

    engine: EngineOptions
    plugin: PluginOptions
    log_path: Path | None = None  # default: a temporary file
    stall_s: Annotated[
        float,
        Option("--stall", "Silence after which a stall is reported.", least=0, most=MAX_SECONDS),
    ] = 120.0

    def __post_init__(self) -> None:
        check_options(self)

    def environment(self, base: Mapping[str, str], *, boot_id: str) -> dict[str, str]:
        """The server's whole environment. `boot_id`: the name of this start below the dump root."""
        return {**base, **self.engine.environment(), **self.plugin.environment(boot_id=boot_id)}


def boundaries_of(layers: str, *, num_layers: int) -> tuple[int, ...]:
    """What a server of `num_layers` layers captures for `--layers`. Raises UsageError."""
    environ = {plugin.DUMP_DIR: "/", plugin.BOUNDARIES: layers}
    with _naming_options():
        asked = plugin.Settings.from_environ(environ)
        assert asked is not None
        return asked.resolve_boundaries(num_layers)


@contextmanager
def _naming_options() -> Iterator[None]:
    """Errors of the plugin's parser as UsageError, with our options in place of its variables."""
    try:
        yield
    except plugin.SettingsError as error:
        message = str(error)
        for variable, option in _OPTIONS_OF_VARIABLES.items():
            message = message.replace(variable, option)
        raise UsageError(message) from error


def graph_arguments(engine_version: str) -> tuple[str, ...]:
    """What turns CUDA graphs off.

    A replayed graph runs no Python, so prefill under one gives no dump; and decode, one token a
    request, is not worth the minutes of capturing. SGLang 0.5.14 gave both phases a flag each;
    before, prefill had graphs of another kind under a flag of their own.

    >>> graph_arguments("0.5.13.post1")
    ('--disable-cuda-graph', '--disable-piecewise-cuda-graph')
    >>> graph_arguments("0.5.15.post1")
    ('--cuda-graph-backend-decode=disabled', '--cuda-graph-backend-prefill=disabled')
    """
    release = tuple(int(part) for part in re.findall(r"\d+", engine_version)[:3])
    if release < (0, 5, 14):
        return ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")
    return ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")
