"""What can be wrong with a manifest, for the people who call this package."""

from __future__ import annotations


class ManifestError(Exception):
    """The manifest cannot be used; the message says which file, why and what to do."""


class ManifestMissing(ManifestError):
    """There is no manifest where one is needed."""


class ManifestSpaceError(ManifestError):
    """The manifest's disk is full or failing; committed data is safe."""


class PromptChanged(ManifestError):
    """A row gives a different prompt than in an earlier session."""


class ManifestDamaged(ManifestError):
    """The file holds data that this tool did not write."""
