"""The client: `extractor run` and its kin. See README.md for the map."""

__version__ = "0.1.0"
