"""Every error that people can meet has an exit code, and groups show the one that matters."""

from __future__ import annotations

import errno
import importlib
import inspect
import pkgutil

import aiohttp
import pytest

import manifest.exceptions
import prompts.types
import server_patch.dump_format
from extractor.core import errors
from extractor.core.errors import ExtractorError, exit_code, first_known
from extractor.servers.client import TRANSPORT_FAILURES, transport_problem

CODES = {
    "ExtractorError": 1,
    "UsageError": 2,
    "ConfigMismatch": 2,
    "OutputBusy": 2,
    "BadAddress": 2,
    "BadDumpDir": 2,
    "ServerError": 3,
    "ServerUnreachable": 3,
    "PluginError": 3,
    "ServerLost": 3,
    "ServerGone": 3,
    "SpaceError": 4,
    "CorruptData": 1,
    "RowRefused": 1,
    "Interrupted": 130,
}


@pytest.mark.parametrize("name", sorted(CODES))
def test_each_error_of_ours_has_its_exit_code(name: str) -> None:
    assert exit_code(getattr(errors, name)("message")) == CODES[name]


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, ExtractorError)
    }
    assert classes == set(CODES) | {"MissingExtra"}
    assert errors.__doc__ is not None
    assert {name for name in classes if name not in errors.__doc__} == set()


def test_a_missing_extra_gives_the_command_that_installs_it() -> None:
    error = errors.MissingExtra(command="extractor serve", extra="server", package="sglang")
    assert exit_code(error) == 2
    assert "pip install 'hidden-state-extractor[server]'" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        value
        for module in (manifest.exceptions, prompts.types, server_patch.dump_format)
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and value.__module__ == module.__name__
        and value is not prompts.types.RowError  # never leaves its package
    ],
)
def test_every_error_of_a_leaf_package_is_mapped(error: type[Exception]) -> None:
    assert exit_code(error("message")) is not None


def test_leaf_packages_define_errors_where_this_test_looks() -> None:
    # In order: a bug; translated by `ServeOptions`; the others by their callers.
    known = {
        "IllegalTransition", "SettingsError", "ArrayFault", "NotRegular", "WorkerDied", "_Closed",
    }  # fmt: skip
    found = set()
    for package in ("manifest", "prompts"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            loaded = importlib.import_module(f"{package}.{module.name}")
            found |= {
                name
                for name, value in vars(loaded).items()
                if inspect.isclass(value)
                and issubclass(value, Exception)
                and value.__module__ == loaded.__name__
                and loaded not in (manifest.exceptions, prompts.types)
                and not issubclass(value, prompts.types.RowError)
            }
    assert found <= known


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), 4),
        (OSError(errno.EDQUOT, "quota"), 4),
        (PermissionError(errno.EACCES, "no"), 2),
        (FileNotFoundError(errno.ENOENT, "no"), 2),
        (OSError(errno.EIO, "broken"), 4),
        (OSError(errno.EMFILE, "too many"), 2),
        (OSError(errno.ENOTSOCK, "defect"), None),
        (OSError(errno.EINVAL, "defect"), None),
        (OSError(errno.EINVAL, "of a file", "/a"), 2),
        (TimeoutError(), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), None),
        (KeyError("defect"), None),
        (manifest.exceptions.ManifestSpaceError("full"), 4),
        (manifest.exceptions.ManifestMissing("none"), 2),
    ],
)
def test_foreign_errors_are_messages_only_where_people_can_act(
    error: Exception, code: int | None
) -> None:
    assert exit_code(error) == code


def test_of_a_group_the_first_error_with_a_code_is_shown() -> None:
    known = errors.ServerLost("gone")
    group = BaseExceptionGroup("", [
        KeyError("defect"), ExceptionGroup("", [ValueError("x"), known]), errors.SpaceError("full"),
    ])  # fmt: skip
    assert first_known(group) is known
    assert first_known(known) is known


def test_of_a_group_of_defects_the_first_is_shown() -> None:
    first = KeyError("defect")
    assert first_known(ExceptionGroup("", [first, ValueError("x")])) is first


def test_every_error_of_the_http_library_has_words() -> None:
    """Fails when the library grows an error outside of what is caught."""
    for value in vars(aiohttp).values():
        if inspect.isclass(value) and issubclass(value, aiohttp.ClientError):
            assert any(kind in TRANSPORT_FAILURES for kind in value.__mro__), value
    assert transport_problem(aiohttp.ServerDisconnectedError()).startswith(
        "the server closed the connection"
    )
    assert transport_problem(TimeoutError()) == "the server did not answer in time (TimeoutError)"
    with pytest.raises(KeyError):
        transport_problem(KeyError("not of the transport"))
