"""Which code a configuration may name. A YAML that somebody else wrote must not run what it likes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig

_OWN = "edgc_ddp"
_BY_PATH = ("hydra.utils.get_method", "hydra.utils.get_class", "hydra.utils.get_object")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_targets(options: Any, trust: Sequence[str]) -> None:
    """Raise ValueError unless everything that Hydra would call is a class of edgc_ddp, or was written in
    one of the modules or packages ``trust``, and exists. What :func:`hydra.utils.get_method` fetches
    counts likewise. ``options`` are resolved: a ``${`` in them is refused, since Hydra would resolve it
    after this look.

    >>> check_targets({"_target_": "edgc_ddp.controllers.FixedRank"}, trust=[])
    >>> check_targets({"_target_": "fractions.Fraction"}, trust=["fractions"])
    >>> check_targets({"_target_": "os.system", "command": "..."}, trust=["mine"])
    Traceback (most recent call last):
    ...
    ValueError: controller: os.system is no class of edgc_ddp; if you trust it, say so: 'trust=[os]'
    """
    if trust and HydraConfig.initialized() and not _is_given("trust"):
        raise ValueError(
            f"trust={list(trust)}: comes from a file; whom to trust is yours to say, on the command line"
        )
    for text in _texts(options):
        if "${" in text:
            raise ValueError(
                f"controller: {text!r} would be filled in after it was checked; write the value itself, "
                "or an interpolation without a backslash"
            )
    for target, entry in _targets(options):
        fetched = target in _BY_PATH
        name = str(entry.get("path")) if fetched else target
        if _is_in(name, trust):
            _check_trusted(name, trust)
        elif not _is_own(name, functions=fetched):
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
    elif isinstance(options, Sequence) and not isinstance(options, str):
        for value in options:
            yield from _targets(value)


def _texts(options: Any) -> Iterator[str]:
    """Every text among the keys and values."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for pair in options.items():
            yield from _texts(pair)
    elif isinstance(options, Sequence):
        for value in options:
            yield from _texts(value)


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _written_in(found: Any) -> str:
    """The module that a class or function was written in: modules have others among their names."""
    return str(getattr(found, "__module__", None))


def _check_trusted(name: str, trust: Sequence[str]) -> None:
    home = _written_in(_resolve(name))
    if not _is_in(home, trust):
        wider = ",".join([*trust, home])
        raise ValueError(
            f"controller: {name} was written in {home}, which trust={list(trust)} does not name; if you "
            f"trust it, say so: 'trust=[{wider}]'"
        )


def _is_own(name: str, functions: bool) -> bool:
    if not (_is_in(name, [_OWN]) and _NAME.fullmatch(name)):
        return False
    found = _resolve(name)
    kinds = inspect.isclass(found) or (functions and inspect.isfunction(found))
    return kinds and _is_in(_written_in(found), [_OWN])


def _resolve(name: str) -> Any:
    if not _NAME.fullmatch(name):
        raise ValueError(f"controller: {name!r} is no name; write it as package.module.Class")
    try:
        return resolve_name(name)
    except Exception as error:
        # A stranger's module may fail in any way while it is imported.
        raise ValueError(
            f"controller: {name} does not exist or cannot be imported ({error}); correct the name"
        ) from error
