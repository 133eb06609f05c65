"""The errors of a manifest, for callers of this package."""

from __future__ import annotations


class ManifestError(Exception):
    """The manifest cannot be used; the message names the file, the cause and the next step."""


class ManifestMissing(ManifestError):
    """The manifest does not exist."""


class ManifestSpaceError(ManifestError):
    """The manifest's disk is full or failing; committed data is safe."""


class PromptChanged(ManifestError):
    """A row gives a different prompt than in an earlier session."""


class ManifestDamaged(ManifestError):
    """The file holds data that this tool did not write."""
