"""Extracts hidden states from SGLang servers, and verifies what it stored.

The names in `__all__` are public and stay; everything else may change. They are loaded when they
are first used, so that `import extractor` is cheap, and they work beside a user's own packages
named `manifest`, `prompts` or `server_patch` (see `extractor.core.own_packages`).
"""

from __future__ import annotations

import logging

from extractor.core.version import __version__

__all__ = [
    "Audit",
    "BadAddress",
    "BadDumpDir",
    "ConfigMismatch",
    "CorruptData",
    "DataSet",
    "DumpFormatError",
    "ExtractorError",
    "FakeModel",
    "FakeServer",
    "Fault",
    "Finding",
    "FindingKind",
    "Identity",
    "Input",
    "InputError",
    "Interrupted",
    "Load",
    "ManifestError",
    "MissingExtra",
    "Output",
    "OutputBusy",
    "Patience",
    "PluginError",
    "Policy",
    "ReadingOptions",
    "Reporter",
    "RowRefused",
    "RunOptions",
    "RunSummary",
    "ServerError",
    "ServerGone",
    "ServerLost",
    "ServerUnreachable",
    "Servers",
    "SpaceError",
    "Status",
    "TokenizerError",
    "UsageError",
    "__version__",
    "audit",
    "exit_code",
    "read_data_set",
    "read_status",
    "run",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from extractor.core.errors import (
        BadAddress,
        BadDumpDir,
        ConfigMismatch,
        CorruptData,
        ExtractorError,
        Interrupted,
        MissingExtra,
        OutputBusy,
        PluginError,
        RowRefused,
        ServerError,
        ServerGone,
        ServerLost,
        ServerUnreachable,
        SpaceError,
        UsageError,
        exit_code,
    )
    from extractor.core.events import Reporter
    from extractor.core.identity import Identity
    from extractor.core.row_policy import Policy
    from extractor.core.run_options import Input, Load, Output, Patience, RunOptions, Servers
    from extractor.pipeline.run import run
    from extractor.pipeline.summary import RunSummary
    from extractor.status.data_set import DataSet, read_data_set
    from extractor.status.overview import Status, read_status
    from extractor.testing.fake_model import FakeModel
    from extractor.testing.fake_server import FakeServer
    from extractor.testing.faults import Fault
    from extractor.verify.audit import audit
    from extractor.verify.findings import Audit, Finding, FindingKind
    from manifest.exceptions import ManifestError
    from prompts.reading_options import ReadingOptions
    from prompts.types import InputError, TokenizerError
    from server_patch.dump_format import DumpFormatError

# Module -> its public names: the imports above, for the interpreter.
_HOMES = {
    "extractor.core.errors": """BadAddress BadDumpDir ConfigMismatch CorruptData ExtractorError
        Interrupted MissingExtra OutputBusy PluginError RowRefused ServerError ServerGone ServerLost
        ServerUnreachable SpaceError UsageError exit_code""",
    "extractor.core.events": "Reporter",
    "extractor.core.identity": "Identity",
    "extractor.core.row_policy": "Policy",
    "extractor.core.run_options": "Input Load Output Patience RunOptions Servers",
    "extractor.pipeline.run": "run",
    "extractor.pipeline.summary": "RunSummary",
    "extractor.status.data_set": "DataSet read_data_set",
    "extractor.status.overview": "Status read_status",
    "extractor.testing.fake_model": "FakeModel",
    "extractor.testing.fake_server": "FakeServer",
    "extractor.testing.faults": "Fault",
    "extractor.verify.audit": "audit",
    "extractor.verify.findings": "Audit Finding FindingKind",
    "manifest.exceptions": "ManifestError",
    "prompts.reading_options": "ReadingOptions",
    "prompts.types": "InputError TokenizerError",
    "server_patch.dump_format": "DumpFormatError",
}

# Silent, unless the program that imports this asks for its log.
logging.getLogger(__name__).addHandler(logging.NullHandler())


if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        from extractor.core.own_packages import importing_own

        for home, names in _HOMES.items():
            if name in names.split():
                with importing_own():
                    value = globals()[name] = getattr(import_module(home), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
