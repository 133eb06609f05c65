"""Import-only stand-ins for the GPU packages that SGLang imports but does not need on a CPU.

A ``.pth`` file of the virtual environment imports this module at interpreter start. Its finder is
put *last* on ``sys.meta_path``, so a package that is really installed always wins. The stand-ins
let kernels be defined, never launched: launching one raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STUBBED = frozenset({"triton", "torchvision", "IPython", "soundfile"})


class _StubMeta(type):
    """Stub classes double as enums: ``InterpolationMode.NEAREST`` is the string ``"NEAREST"``."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StubClass(metaclass=_StubMeta):
    """Base of every stub class: may be subclassed, carries nothing."""


class _StubModule(ModuleType):
    """A module in which every name exists: capitalised ones are classes, the others are submodules.

    It can be called, because some of its "submodules" are really decorators, and it is an empty,
    false collection, because some are really constants that SGLang iterates or tests.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = _StubMeta(name, (_StubClass,), {"__module__": self.__name__})
        else:
            full_name = f"{self.__name__}.{name}"
            value = sys.modules.get(full_name) or _StubFinder.create_module(_spec(full_name))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Serves both ``@decorator`` and ``@decorator(option=...)``.
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, item: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0


class _StubFinder:
    """Finder and loader of the stand-ins, for ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return _spec(name) if name.partition(".")[0] in STUBBED else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__spec__ = spec
        for name, value in _REAL_NAMES.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing to run."""


def _spec(name: str) -> ModuleSpec:
    return ModuleSpec(name, _StubFinder, is_package=True)  # type: ignore[arg-type]


class _Kernel:
    """What ``@triton.jit`` yields: it has a name and a grid, and refuses to be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = None

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"the Triton kernel {self.__name__} was launched on a CPU")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _Kernel(function) if function is not None else _Kernel


class _Config:
    """``triton.Config``: SGLang builds tables of these at import."""

    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **_: Any):
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


class _Constexpr:
    """``triton.language.constexpr``: used in annotations and as a wrapper of constants."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __class_getitem__(cls, item: object) -> type[_Constexpr]:
        return cls


# The few names whose value matters at import: versions are compared, arithmetic helpers are called.
_REAL_NAMES: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.7.0",
        "Config": _Config,
        "jit": _jit,
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
    "triton.language": {"constexpr": _Constexpr, "dtype": _StubClass},
    "triton.runtime.jit": {"JITFunction": _Kernel},
    "torchvision": {"__version__": "0.28.0"},
}

if _StubFinder not in sys.meta_path:
    sys.meta_path.append(_StubFinder)
