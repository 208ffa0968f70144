"""Which code a configuration may name. A YAML that somebody else wrote must not run what it likes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig

_OWN = "edgc_ddp"
_BY_PATH = ("hydra.utils.get_method", "hydra.utils.get_class", "hydra.utils.get_object")


def check_targets(options: Any, trust: Sequence[str]) -> None:
    """Raise ValueError unless everything that Hydra would call is a class of edgc_ddp, or lies in one of
    the modules or packages ``trust``. What :func:`hydra.utils.get_method` fetches counts likewise.

    >>> check_targets({"_target_": "edgc_ddp.controllers.FixedRank"}, trust=[])
    >>> check_targets({"_target_": "mine.Mine", "inner": {"_target_": "mine.parts.Part"}}, ["mine"])
    >>> check_targets({"_target_": "os.system", "command": "..."}, trust=["mine"])
    Traceback (most recent call last):
    ...
    ValueError: controller: os.system is no class of edgc_ddp; if you trust it, say so: 'trust=[os]'
    """
    if trust and HydraConfig.initialized() and not _is_given("trust"):
        raise ValueError(
            f"trust={list(trust)}: comes from a file; whom to trust is yours to say, on the command line"
        )
    for target, entry in _targets(options):
        fetched = target in _BY_PATH
        name = str(entry.get("path")) if fetched else target
        if not (_is_in(name, trust) or _is_own(name, functions=fetched)):
            module = name.rpartition(".")[0] or name
            raise ValueError(
                f"controller: {name} is no class of {_OWN}; if you trust it, say so: 'trust=[{module}]'"
            )


def _is_given(key: str) -> bool:
    """Whether an override on the command line sets it."""
    overrides = HydraConfig.get().overrides.task
    return any(override.lstrip("+").startswith(f"{key}=") for override in overrides)


def _targets(options: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(options, Mapping):
        if "_target_" in options:
            yield str(options["_target_"]), options
        for value in options.values():
            yield from _targets(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _targets(value)


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _is_own(name: str, functions: bool) -> bool:
    """Whether it was written in edgc_ddp: its modules have others among their names, as ``os``."""
    if not _is_in(name, [_OWN]):
        return False
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        # It does not exist: making the controller will say so.
        return True
    kinds = inspect.isclass(found) or (functions and inspect.isfunction(found))
    return kinds and _is_in(found.__module__, [_OWN])
