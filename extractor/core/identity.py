"""What must be equal between two runs that share a data set. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from extractor.core.errors import ConfigMismatch, CorruptData, UsageError
from extractor.core.humanize import quoted
from extractor.core.row_policy import DEFAULT_POLICY, Policy
from prompts.reading_options import DEFAULTS, ReadingOptions
from server_patch.dump_format import MODEL_KEYS, DumpFormatError, ModelInfo, StateLayout


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a data set is of. Two runs may share an output directory only if all of it is equal.

    Its document is flat: the model's facts stand beside the other fields, the path as `model`.
    """

    model: ModelInfo
    boundaries: tuple[int, ...]
    last_kind: str
    tokenizer_digest: str
    template_digest: str
    reading: Mapping[str, Any]  # how rows become prompts, where a person chooses
    inputs: tuple[str, ...]  # digest of each input file, in order

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Identity:
        """Read the identity from the manifest's document.

        Raises ConfigMismatch naming a missing field, CorruptData naming an invalid one.
        """
        if not document:
            raise UsageError(
                "no run has got as far as its first prompt here; run the same command again"
            )
        model = {"path" if name == "model" else name: document[name] for name in document}
        missing = _missing(ModelInfo, model) | _missing(cls, document)
        if missing:
            raise ConfigMismatch(
                f"the manifest lacks the field(s) {', '.join(sorted(missing))}: "
                "it was begun by another version of this tool. Use a new --out."
            )
        identity = cls(
            **{**_values(cls, document), "model": ModelInfo(**_values(ModelInfo, model))}
        )
        if identity.model.vocab_size < 1:
            raise CorruptData(f"vocab_size must be >= 1, is {identity.model.vocab_size}")
        try:
            _ = identity.layout
        except DumpFormatError as error:
            raise CorruptData(str(error)) from error
        return identity

    def to_document(self) -> dict[str, Any]:
        """JSON-ready, field by field."""
        document = asdict(self)
        model = document.pop("model")
        return {"model": model.pop("path"), **model, **document}

    @property
    def capture_text(self) -> str:
        """The captured states, for a person."""
        return f"boundaries {list(self.boundaries)}, last {self.last_kind}, {self.model.dtype}"

    @property
    def layout(self) -> StateLayout:
        """Raises DumpFormatError if no model has such states."""
        return StateLayout(
            boundaries=self.boundaries,
            hidden_size=self.model.hidden_size,
            dtype=self.model.dtype,
            last_kind=self.last_kind,
        )

    def _comparable(self) -> dict[str, object]:
        """Every compared field by name; what `reading` holds, by the options that set it."""
        values = self.to_document()
        for name in MODEL_KEYS.values():
            # Those that may change if the user allows it: provenance.py compares them.
            if name not in _DECIDE_SHAPES:
                values.pop("model" if name == "path" else name)
        # A manifest older than an option was begun with what is now the option's default.
        reading = {**DEFAULT_READING, **values.pop("reading")}
        return {**values, **{_option_of(name): value for name, value in reading.items()}}

    def require_same(
        self, begun_with: Identity, *, out: Path, other_inputs: str | None = None
    ) -> None:
        """Raise ConfigMismatch naming every field in which this run differs from the manifest's.

        `other_inputs`: in which way the inputs differ, if they do, where that is known.
        """
        before, now = begun_with._comparable(), self._comparable()
        differences = [
            f"  {name}: {out} has {quoted(before.get(name))}, this run has {quoted(now.get(name))}"
            for name in dict.fromkeys((*before, *now))
            if before.get(name) != now.get(name) and not (name == "inputs" and other_inputs)
        ]
        if other_inputs is not None:
            differences.append(f"  inputs: {other_inputs}")
        if differences:
            raise ConfigMismatch(
                f"{out} was begun with another configuration:\n"
                + "\n".join(differences)
                + "\nUse the old configuration, or another --out."
            )


#: Facts about the model on which the shape of every sample depends.
_DECIDE_SHAPES = ("vocab_size", "num_layers", "hidden_size", "dtype")


def reading_document(reading: ReadingOptions, policy: Policy) -> dict[str, Any]:
    return {**reading.to_document(), **policy.to_document()}


DEFAULT_READING: Final = reading_document(DEFAULTS, DEFAULT_POLICY)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: Checks whether a JSON value fits a field, by the field's type.
_FITS: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": _is_integer,
    "tuple[int, ...]": lambda value: isinstance(value, list) and all(map(_is_integer, value)),
    "tuple[str, ...]": lambda value: (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    ),
    "Mapping[str, Any]": lambda value: isinstance(value, dict),
    "ModelInfo": lambda value: isinstance(value, str),  # its path; the rest stands beside it
}


def _missing(kind: type, document: Mapping[str, Any]) -> set[str]:
    """Keys of fields without a default that a document lacks."""
    return {
        "model" if field.name == "path" else field.name
        for field in fields(kind)
        if field.name not in document and field.default is MISSING
    }


def _values(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kind` that a document has. Raises CorruptData for an invalid one."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in document:
            value = document[field.name]
            if not _FITS[str(field.type)](value):
                name = "model" if field.name == "path" else field.name
                raise CorruptData(f"{name} is {quoted(value)}, must be {field.type}")
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _option_of(name: str) -> str:
    """The option that sets a field of `reading`."""
    return "--field" if name == "fields" else f"--{name.replace('_', '-')}"
