"""The state as plain values and tensors, and back. Nothing here needs a process group.

``torch.load(weights_only=True)`` reads what :func:`pack` gives. :func:`check` looks at everything before
:func:`unpack` changes anything, so a damaged or foreign checkpoint leaves the state whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.agreement import check_origin, check_world_size
from edgc_ddp.decisions import Layout, MatrixSpec, Plan, Sampling
from edgc_ddp.engine import Engine
from edgc_ddp.memory import Slot
from edgc_ddp.observer import Observer
from edgc_ddp.progress import Progress

VERSION = 1
_KEYS = {"version", "controller", "world_size", "layout", "progress", "window", "buckets"}


def _whole(packed: Mapping[str, Any]) -> dict[str, Any]:
    """With what torch's distributed checkpoints leave out: they keep no empty dictionary."""
    return {"slots": {}, **packed}


def pack(engine: Engine, world_size: int, rank: int | None) -> dict[str, Any]:
    """This rank's state. Tensors are copies, so training may go on. ``world_size`` 0 and ``rank`` None say
    that they are not known: then those of a state loaded before count."""
    observer, layout = engine.observer, engine.layout
    engine.memory.free_sent()
    return {
        "version": VERSION,
        "controller": type(engine.controller).__name__,
        "options": plain_options(engine.controller),
        "world_size": layout.world_size if layout else engine.registry.world_size or world_size,
        "rank": engine.origin if rank is None else rank,
        "layout": [[m.name, m.rows, m.cols] for m in layout.matrices] if layout else [],
        "progress": _pack_progress(engine.progress),
        "slots": {slot.name: _pack_slot(slot) for slot in engine.memory.slots.values()},
        "buckets": engine.registry.buckets(),
        "window": None if observer is None else observer.state_dict(engine.spans()),
    }


def plain_options(controller: Any) -> dict[str, str]:
    """What the fields of a controller that is a dataclass say, as texts, but for functions and objects.

    >>> from edgc_ddp.controllers import Dense, Selective
    >>> plain_options(Selective(Dense(), dense=("*wte*",)))
    {'inner': 'Dense', 'inner.window': 'None', 'compress': "('*',)", 'dense': "('*wte*',)"}
    """
    options: dict[str, str] = {}
    if not is_dataclass(controller):
        return options
    for option in fields(controller):
        value = getattr(controller, option.name)
        # A finished run may go on for longer.
        if option.name == "total_steps":
            continue
        if is_dataclass(value) and not isinstance(value, type):
            options[option.name] = type(value).__name__
            inner = plain_options(value).items()
            options.update({f"{option.name}.{name}": text for name, text in inner})
        elif _is_plain(value):
            options[option.name] = repr(value)
    return options


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | str)


def _pack_progress(progress: Progress) -> dict[str, Any]:
    packed = asdict(progress)
    sampling = progress.plan.sampling
    if sampling is not None and callable(sampling.estimator):
        # A function cannot travel; the controller at hand brings it again.
        packed["plan"]["sampling"]["estimator"] = None
    return packed


def _pack_slot(slot: Slot) -> dict[str, Any]:
    return {
        "numel": slot.numel,
        "sides": list(slot.sides) if slot.sides else None,
        "rank": slot.rank,
        "residual": _copy(slot.residual),
        "basis": _copy(slot.basis_NR),
    }


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def check(engine: Engine, packed: Mapping[str, Any], world_size: int, rank: int | None) -> None:
    """Raise ValueError unless ``packed`` is a whole state of this model, controller, ``world_size`` and
    ``rank`` (0 and None = not known yet)."""
    if not isinstance(packed, Mapping) or (missing := _KEYS - set(packed)):
        what = f"lacks {sorted(missing)}" if isinstance(packed, Mapping) else "is no dictionary"
        raise ValueError(f"this is no EDGCState.state_dict(): it {what}")
    packed = _whole(packed)
    if packed["version"] != VERSION:
        raise ValueError(
            f"the state has version {packed['version']!r}, this edgc_ddp reads {VERSION}: load it with "
            "the edgc_ddp that wrote it"
        )
    _check_controller(engine, packed)
    check_world_size(packed["world_size"], world_size)
    origin = packed.get("rank")
    if origin is not None and not _is_count(origin):
        raise ValueError(f"the state is damaged: its rank is {origin!r}")
    if rank is not None:
        check_origin(origin, rank)
    with _damage("slots"):
        for name, entry in packed["slots"].items():
            _check_slot(name, entry)
    if packed["slots"]:
        _check_model(engine, packed["slots"])
    with _damage("progress"):
        progress = _progress(engine, packed)
        if not (_is_count(progress.step) and _is_count(progress.plan.until)):
            raise ValueError(f"step {progress.step!r}, next decision {progress.plan.until!r}")
        if progress.step and not packed["slots"]:
            raise ValueError(f"at step {progress.step} it knows no parameter")
    with _damage("layout"):
        _check_layout(packed, progress.plan)
    with _damage("window"):
        _check_window(packed, progress.plan)
    if not all(_is_count(size) for size in packed["buckets"]):
        raise ValueError(f"the state is damaged: its buckets are {packed['buckets']!r}")


@contextlib.contextmanager
def _damage(part: str) -> Iterator[None]:
    """Whatever goes wrong while a part is read, the state is to blame for it."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"the state is damaged, in its {part}: {type(error).__name__}, {error}; load an earlier one"
        ) from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_controller(engine: Engine, packed: Mapping[str, Any]) -> None:
    mine = type(engine.controller).__name__
    if packed["controller"] != mine:
        raise ValueError(
            f"the state was written under controller {packed['controller']}, this run has {mine}: use "
            "the same controller, or start without the state"
        )
    # Absent where an earlier version wrote the state, or a controller has none.
    theirs, here = packed.get("options") or {}, plain_options(engine.controller)
    for name, text in theirs.items():
        if here.get(name) != text:
            raise ValueError(
                f"the state was written under {mine} with {name}={text}, this run has "
                f"{name}={here.get(name)}: set {name}={text}, or start without the state"
            )


def _check_slot(name: str, entry: Mapping[str, Any]) -> None:
    residual, basis, rank = entry["residual"], entry["basis"], entry["rank"]
    sides = tuple(entry["sides"]) if entry["sides"] else None
    if not _is_count(rank) or rank > (min(sides) if sides else 0):
        raise ValueError(f"the rank of {name!r} is {rank!r}")
    if residual is not None and residual.shape != (entry["numel"],):
        raise ValueError(f"the residual of {name!r} has another size")
    if (basis is None) != (rank == 0):
        raise ValueError(f"at rank {rank} the basis of {name!r} {'lacks' if rank else 'is there'}")
    if basis is not None and (sides is None or basis.shape != (max(sides), rank)):
        raise ValueError(f"the basis of {name!r} has another shape")
    for what, tensor in (("residual", residual), ("basis", basis)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"the {what} of {name!r} is not finite")


def _check_model(engine: Engine, slots: Mapping[str, Any]) -> None:
    expected = engine.registry.expected()
    if expected is None:
        return
    if odd := sorted(set(expected) ^ set(slots)):
        where = "the state" if odd[0] in slots else "the model"
        raise ValueError(
            f"the state is of another model: only {where} has a parameter {odd[0]!r}. Load the "
            "checkpoint of this model, with model=ddp.module given at both times or at neither"
        )
    for name, entry in slots.items():
        sides = tuple(entry["sides"]) if entry["sides"] else None
        if expected[name] != (entry["numel"], sides):
            raise ValueError(
                f"the state is of another model: parameter {name!r} is matrix {sides} there and "
                f"{expected[name][1]} here"
            )


def _check_layout(packed: Mapping[str, Any], plan: Plan) -> None:
    """Once something was decided, layout, plan and slots speak of the same matrices and ranks."""
    if packed["window"] is None:
        return
    if not packed["world_size"]:
        raise ValueError("the world size lacks")
    slots = packed["slots"].items()
    matrices = {(n, min(e["sides"]), max(e["sides"])) for n, e in slots if e["sides"]}
    if {tuple(entry) for entry in packed["layout"]} != matrices:
        raise ValueError("it does not name the matrices that there are")
    if dict(plan.ranks) != {name: packed["slots"][name]["rank"] for name, _, _ in matrices}:
        raise ValueError("the plan has other ranks than the matrices")


def _check_window(packed: Mapping[str, Any], plan: Plan) -> None:
    if packed["window"] is None:
        return
    observer = Observer(_layout(packed), torch.device("cpu"))
    observer.reset(plan)
    fresh = observer.state_dict([])
    observer.load_state_dict(packed["window"])
    loaded = observer.state_dict(observer.spans)  # type: ignore[arg-type]
    if not _is_count(observer.steps) or _shapes(loaded) != _shapes(fresh):
        raise ValueError("its sums are not those of the plan in force")


def _shapes(window: Mapping[str, Any]) -> list[Any]:
    factors = window["factors"]
    tensors = [
        window["sums"],
        window["curve"],
        *(factors[k] for k in ("scalars", "captured", "probes")),
    ]
    return [factors["ranks"], factors["heights"], *(tensor.shape for tensor in tensors)]


def _layout(packed: Mapping[str, Any]) -> Layout:
    return Layout(tuple(MatrixSpec(*entry) for entry in packed["layout"]), packed["world_size"])


def _progress(engine: Engine, packed: Mapping[str, Any]) -> Progress:
    progress = dict(packed["progress"])
    # Before the first decision the plan names no matrix, and torch's distributed checkpoints keep no
    # empty dictionary.
    plan = {"ranks": {}, **progress.pop("plan")}
    if (sampling := plan.pop("sampling")) is not None:
        sampling = dict(sampling)
        if sampling["estimator"] is None:
            sampling["estimator"] = getattr(engine.controller, "estimator", "gaussian")
        sampling = Sampling(**sampling)
    progress["history"] = [dict(entry) for entry in progress["history"]]
    return Progress(plan=Plan(**plan, sampling=sampling), **progress)


def unpack(engine: Engine, packed: Mapping[str, Any]) -> None:
    """Put a checked state in force. Tensors of parameters that have been met go to their device, others
    when their gradient arrives."""
    packed = _whole(packed)
    # Ranks meet anew at the next bucket, and compare what they were given.
    engine.close()
    # What is known of the residuals at hand says nothing of those to come.
    engine.memory.free_sent()
    engine.progress = _progress(engine, packed)
    engine.origin = packed.get("rank")
    engine.may_rest = False
    # Nothing is decided before there is a window.
    decided = packed["window"] is not None
    engine.layout = _layout(packed) if decided else None
    index = {entry[0]: place for place, entry in enumerate(packed["layout"])}
    slots = engine.memory.slots
    for name in set(slots) - set(packed["slots"]):
        # Of another state that was loaded before this one.
        del slots[name]
    for name, entry in packed["slots"].items():
        sides = tuple(entry["sides"]) if entry["sides"] else None
        slot = slots.setdefault(name, Slot(name, entry["numel"], sides))
        slot.numel, slot.sides = entry["numel"], sides
        slot.index, slot.rank = index.get(name, -1), entry["rank"]
        slot.residual, slot.basis_NR = _copy(entry["residual"]), _copy(entry["basis"])
    if slots:
        engine.registry.expect(packed["buckets"], packed["world_size"])
    else:
        engine.registry.begin_again(packed["world_size"])
    device = engine.registry.settle()
    engine.observer = None
    if engine.layout is not None:
        engine.observer = Observer(engine.layout, device or packed["window"]["sums"].device)
        engine.observer.load_state_dict(packed["window"])


def merge(states: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """One state for ``world_size`` ranks from the states of all ranks of an earlier run.

    Each new rank gets the mean of the old residuals, so the part of the average gradient that is
    still to be sent, (1/W) sum e_i, is what it was. Load the result on every rank.

    Raises:
        ValueError: not one state of each rank of one moment of one run, or no whole number of new ranks.
    """
    if not _is_count(world_size) or world_size == 0:
        raise ValueError(f"world_size={world_size!r}: expected the number of the new run's ranks")
    states = [_whole(state) for state in states]
    if not states or any(state["world_size"] != len(states) for state in states):
        sizes = [state["world_size"] for state in states]
        raise ValueError(f"expected the states of all ranks of one run, got {sizes} (world sizes)")
    ranks = [rank for state in states if (rank := state.get("rank")) is not None]
    if ranks and sorted(ranks) != list(range(len(states))):
        raise ValueError(f"expected one state of each rank, got those of ranks {ranks}")
    first = _common(states[0])
    for rank, state in enumerate(states):
        for what, value in _common(state).items():
            if value != (here := first[what]):
                raise ValueError(
                    f"expected the states of all ranks at one moment of one run, but state 0 has {what} "
                    f"{here!r} and state {rank} {value!r}: save on all ranks after the same step"
                )
    merged = dict(states[0])
    merged["world_size"] = world_size
    merged["rank"] = None
    merged["slots"] = {}
    for name, entry in states[0]["slots"].items():
        given = [state["slots"][name]["residual"] for state in states]
        residuals = [residual for residual in given if residual is not None]
        mean = None
        if residuals:
            # A rank without one owes nothing.
            total = torch.stack([residual.float() for residual in residuals]).sum(0)
            mean = (total / len(states)).to(residuals[0].dtype)
        merged["slots"][name] = {**entry, "residual": mean}
    return merged


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks' states of one moment share, by what it is called."""
    progress = state["progress"]
    return {
        "controller": state["controller"],
        "options": state.get("options"),
        "step": progress["step"],
        "ranks": progress["plan"].get("ranks", {}),
        "parameters": {
            name: (slot["numel"], slot["sides"], slot["rank"])
            for name, slot in state["slots"].items()
        },
    }
