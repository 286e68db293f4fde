"""Train the same model, the same day. `sameday.train`, `evaluate`, `verify` and `load` are the commands for Python;
`sameday.api` has them with their types. Nothing heavy is loaded before one of them is called."""

from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


class _Room(ModuleType):
    """A package that is also a command of its name: `sameday.train(...)`, beside `sameday.train.loop`."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return getattr(import_module("sameday.api"), self.__name__.rpartition(".")[2])(*args, **named)


for _name in ("train", "evaluate", "verify"):
    import_module(f"sameday.{_name}").__class__ = _Room


def __getattr__(name: str) -> Any:
    if name in ("load", "Run", "Loaded", "Verdict", "BadInput", "RunStopped"):
        return getattr(import_module("sameday.api"), name)
    raise AttributeError(f"module 'sameday' has no attribute {name!r}")
