"""What must be equal between two runs that share a data set. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from extractor.core.errors import ConfigMismatch, CorruptData, UsageError
from extractor.core.humanize import quoted
from extractor.core.layout import Layout
from extractor.core.row_policy import DEFAULT_POLICY, Policy
from prompts.reading_options import DEFAULTS, ReadingOptions
from server_patch.dump_format import Ready


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
            model=ready.model_path,
            architecture=ready.architecture,
            config_digest=ready.config_digest,
            vocab_size=ready.vocab_size,
            num_layers=ready.num_layers,
            hidden_size=ready.hidden_size,
            dtype=ready.dtype,
            boundaries=ready.boundaries,
            last_kind=ready.last_kind,
            quantization=ready.quantization,
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
                raise CorruptData(f"{known.name} is {quoted(value)}, must be {known.type}")
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
            f"  {name}: {out} has {quoted(before.get(name))}, this run has {quoted(now.get(name))}"
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
#: model is still the same; dispatch/provenance.py compares what every server start announced.
_OF_THE_SERVER = ("model", "architecture", "config_digest", "quantization")


def reading_document(reading: ReadingOptions, policy: Policy) -> dict[str, Any]:
    return {**reading.to_document(), **policy.to_document()}


DEFAULT_READING: Final = reading_document(DEFAULTS, DEFAULT_POLICY)


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
