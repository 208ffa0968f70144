"""The state as plain values and tensors, and back. Nothing here needs a process group.

``torch.load(weights_only=True)`` reads what :func:`pack` gives. :mod:`edgc_ddp.misfit` looks at everything
before :func:`unpack` changes anything, so a damaged or foreign checkpoint leaves the state whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout, MatrixSpec, Plan, Sampling, is_controller, is_count
from edgc_ddp.engine import Engine
from edgc_ddp.memory import Slot
from edgc_ddp.observer import Observer
from edgc_ddp.progress import Progress, copied, require_between_steps

VERSION = 3
_KEYS = {"version", "controller", "world_size", "layout", "progress", "window", "buckets"}


def whole(packed: Mapping[str, Any]) -> dict[str, Any]:
    """With what torch's distributed checkpoints leave out: they keep no empty dictionary. Raises ValueError
    for what is no state of this version."""
    if not isinstance(packed, Mapping) or (missing := _KEYS - set(packed)):
        what = f"lacks {sorted(missing)}" if isinstance(packed, Mapping) else "is no dictionary"
        raise ValueError(f"this is no EDGCState.state_dict(): it {what}")
    if packed["version"] != VERSION:
        raise ValueError(
            f"the state has version {packed['version']!r}, this edgc_ddp reads {VERSION}: load it with "
            "the edgc_ddp that wrote it"
        )
    return {"slots": {}, **packed}


def pack(engine: Engine, world_size: int, rank: int | None) -> dict[str, Any]:
    """This rank's state. Tensors are copies, so training may go on. ``world_size`` 0 and ``rank`` None say
    that they are not known: then those of a state loaded before count, or of when ranks last met."""
    require_between_steps(engine.is_averaging)
    engine.end_gathered()
    observer, layout = engine.observer, engine.layout
    engine.memory.free_sent()
    return {
        "version": VERSION,
        "controller": type(engine.controller).__name__,
        "options": plain_options(engine.controller),
        "world_size": layout.world_size if layout else engine.registry.world_size or world_size,
        "rank": next((r for r in (rank, engine.origin, engine.rank) if r is not None), None),
        "layout": [[m.name, m.rows, m.cols] for m in layout.matrices] if layout else [],
        "progress": _pack_progress(engine.progress),
        "slots": {slot.name: _pack_slot(slot) for slot in engine.memory.slots.values()},
        "buckets": engine.registry.buckets(),
        "unseen": engine.registry.unseen(),
        "loss_scale": engine.loss_scale,
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
    packed = asdict(replace(progress, history=[]))
    sampling = progress.plan.sampling
    if sampling is not None and callable(sampling.estimator):
        # A function cannot travel; the controller at hand brings it again.
        packed["plan"]["sampling"]["estimator"] = None
    # Tuples are leaves to torch's distributed checkpoints, which keep no empty dictionary and make texts of
    # all keys.
    packed["controller_state"] = (packed["controller_state"],)
    packed["history"] = tuple(copied(progress.history))
    return packed


def _pack_slot(slot: Slot) -> dict[str, Any]:
    return {
        "numel": slot.numel,
        "sides": list(slot.sides) if slot.sides else None,
        "rank": slot.rank,
        "residual": _copy(slot.residual),
        "basis": _copy(slot.basis_NR),
        "axes": None if slot.axes is None else list(slot.axes),
    }


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def sides_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    rows_cols = entry["sides"]
    return (rows_cols[0], rows_cols[1]) if rows_cols else None


def axes_of(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    return tuple(entry["axes"]) if entry["axes"] else None


def layout_of(packed: Mapping[str, Any]) -> Layout:
    return Layout(tuple(MatrixSpec(*entry) for entry in packed["layout"]), packed["world_size"])


def progress_of(engine: Engine, packed: Mapping[str, Any]) -> Progress:
    progress = dict(packed["progress"])
    # Before the first decision the plan names no matrix, and torch's distributed checkpoints keep no
    # empty dictionary.
    plan = {"ranks": {}, **progress.pop("plan")}
    if (sampling := plan.pop("sampling")) is not None:
        sampling = dict(sampling)
        if sampling["estimator"] is None:
            sampling["estimator"] = own_estimator(engine.controller)
        sampling = Sampling(**sampling)
    (progress["controller_state"],) = copy.deepcopy(progress["controller_state"])
    progress["history"] = copied(progress["history"])
    return Progress(plan=Plan(**plan, sampling=sampling), **progress)


def own_estimator(controller: Any, seen: tuple[Any, ...] = ()) -> Callable[..., Any] | None:
    """The function that a controller, or one within it, samples by; None where there is none.

    >>> from edgc_ddp.controllers import EntropyController, Selective
    >>> own_estimator(Selective(EntropyController(estimator=max))), own_estimator(EntropyController())
    (<built-in function max>, None)
    """
    mine: Callable[..., Any] | str | None = getattr(controller, "estimator", None)
    if callable(mine):
        return mine
    seen = (*seen, controller)
    for part in vars(controller).values() if hasattr(controller, "__dict__") else ():
        # One within may know the one around it.
        new = is_controller(part) and not any(part is other for other in seen)
        if new and (theirs := own_estimator(part, seen)) is not None:
            return theirs
    return None


def unpack(engine: Engine, packed: Mapping[str, Any]) -> None:
    """Put a checked state in force. Tensors of parameters that have been met go to their device, others
    when their gradient arrives."""
    packed = whole(packed)
    # Ranks meet anew at the next bucket, and compare what they were given.
    engine.close()
    # What is known of the residuals at hand says nothing of those to come.
    engine.memory.free_sent()
    engine.forget_iteration()
    # Whoever asks for metrics meanwhile, in a handler say, is told of no plan: that comes last.
    engine.layout = None
    index = {entry[0]: place for place, entry in enumerate(packed["layout"])}
    slots = engine.memory.slots
    for name in set(slots) - set(packed["slots"]):
        # Of another state that was loaded before this one.
        del slots[name]
    for name, entry in packed["slots"].items():
        sides = sides_of(entry)
        slot = slots.setdefault(name, Slot(name, entry["numel"], sides))
        slot.numel, slot.sides = entry["numel"], sides
        slot.index, slot.rank = index.get(name, -1), entry["rank"]
        slot.axes, slot.strides = axes_of(entry), None
        slot.residual, slot.basis_NR = _copy(entry["residual"]), _copy(entry["basis"])
        if slot.residual is not None:
            slot.residual = slot.residual.to(engine.memory.residual_dtype)
    if slots:
        # Torch's distributed checkpoints keep no empty list.
        unseen = packed.get("unseen", [])
        engine.registry.expect(packed["buckets"], unseen, packed["world_size"])
    else:
        engine.registry.begin_again(packed["world_size"])
    device = engine.registry.settle()
    layout = engine.observer = None
    # Nothing is decided before there is a window.
    if packed["window"] is not None:
        layout = layout_of(packed)
        engine.observer = Observer(layout, device or packed["window"]["sums"].device)
        engine.observer.load_state_dict(packed["window"])
    engine.progress = progress_of(engine, packed)
    if engine.observer is not None:
        engine.observer.loss_scale = engine.progress.loss_scale or 1.0
    # That of the coming backward, which may be another than the residuals are under.
    engine.loss_scale = packed.get("loss_scale", engine.progress.loss_scale)
    engine.origin, engine.rank = packed.get("rank"), None
    engine.layout = layout


def merge(states: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """One state for ``world_size`` ranks from the states of all ranks of an earlier run.

    Each new rank gets the mean of the old residuals, so the part of the average gradient that is
    still to be sent, (1/W) sum e_i, is what it was. Load the result on every rank.

    Raises:
        ValueError: not one state of each rank of one moment of one run, or no whole number of new ranks.
    """
    if not is_count(world_size) or world_size == 0:
        raise ValueError(f"world_size={world_size!r}: expected the number of the new run's ranks")
    states = [whole(state) for state in states]
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
        residuals = [
            (residual, _to_scale_of(states[0], state))
            for state in states
            if (residual := state["slots"][name]["residual"]) is not None
        ]
        mean = None
        if residuals:
            # A rank without one owes nothing.
            device = residuals[0][0].device
            scaled = [residual.to(device).float() * factor for residual, factor in residuals]
            total = torch.stack(scaled).sum(0)
            mean = (total / len(states)).to(residuals[0][0].dtype)
        merged["slots"][name] = {**entry, "residual": mean}
    merged["window"] = _mean_window([state["window"] for state in states])
    return merged


def _mean_window(windows: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What each new rank has seen of the window: the mean, since sums are read over one another or as means
    over ranks, and probes, which have signs, add up to that of the average."""
    known = [window for window in windows if window is not None]
    if not known:
        return None
    first = known[0]

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).mean(0)

    factors = [window["factors"] for window in known]
    return {
        **first,
        "sums": mean([window["sums"] for window in known]),
        "curve": mean([window["curve"] for window in known]),
        "factors": {
            **first["factors"],
            **{key: mean([f[key] for f in factors]) for key in ("scalars", "captured", "probes")},
        },
    }


def _to_scale_of(first: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """What brings a state's residuals under the first one's loss scale: a rank that ran out of data has an
    older one."""
    mine, theirs = first["progress"]["loss_scale"], state["progress"]["loss_scale"]
    return 1.0 if mine is None or theirs is None else float(mine / theirs)


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks' states of one moment share, by what it is called."""
    progress = state["progress"]
    return {
        "controller": state["controller"],
        "options": state.get("options"),
        "step": progress["step"],
        "ranks": progress["plan"].get("ranks", {}),
        "parameters": {
            name: (slot["numel"], slot["sides"], slot["rank"], slot["axes"])
            for name, slot in state["slots"].items()
        },
    }
