"""The state as plain values and tensors, and back. Nothing here needs a process group.

``torch.load(weights_only=True)`` reads what :func:`pack` gives. :func:`check` looks at everything before
:func:`unpack` changes anything, so a damaged or foreign checkpoint leaves the state whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout, MatrixSpec, Plan, Sampling
from edgc_ddp.engine import Engine
from edgc_ddp.memory import Slot
from edgc_ddp.observer import Observer
from edgc_ddp.progress import Progress

VERSION = 1
_KEYS = {"version", "controller", "world_size", "layout", "progress", "slots", "window", "buckets"}


def pack(engine: Engine) -> dict[str, Any]:
    """This rank's state. Tensors are copies, so training may go on."""
    observer, layout = engine.observer, engine.layout
    engine.memory.free_sent()
    return {
        "version": VERSION,
        "controller": type(engine.controller).__name__,
        "world_size": layout.world_size if layout else 0,
        "layout": [[m.name, m.rows, m.cols] for m in layout.matrices] if layout else [],
        "progress": _pack_progress(engine.progress),
        "slots": {slot.name: _pack_slot(slot) for slot in engine.memory.slots.values()},
        "buckets": engine.registry.buckets(),
        "window": None if observer is None else observer.state_dict(engine.spans()),
    }


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


def check(engine: Engine, packed: Mapping[str, Any], world_size: int | None) -> None:
    """Raise ValueError unless ``packed`` is a whole state of this model and controller."""
    if not isinstance(packed, Mapping) or (missing := _KEYS - set(packed)):
        what = f"lacks {sorted(missing)}" if isinstance(packed, Mapping) else "is no dictionary"
        raise ValueError(f"this is no EDGCState.state_dict(): it {what}")
    if packed["version"] != VERSION:
        raise ValueError(
            f"the state has version {packed['version']!r}, this edgc_ddp reads {VERSION}: load it with "
            "the edgc_ddp that wrote it"
        )
    mine = type(engine.controller).__name__
    if packed["controller"] != mine:
        raise ValueError(
            f"the state was written under controller {packed['controller']}, this run has {mine}: use "
            "the same controller, or start without the state"
        )
    if world_size and packed["world_size"] and packed["world_size"] != world_size:
        raise ValueError(
            f"the state is one of {packed['world_size']} ranks, this run has {world_size}: join the "
            "states of all ranks first, edgc_ddp.checkpoint.merge([...], world_size)"
        )
    _check_slots(engine, packed["slots"])


def _check_slots(engine: Engine, slots: Mapping[str, Any]) -> None:
    expected = engine.registry.expected()
    if expected is not None and (odd := sorted(set(expected) ^ set(slots))):
        where = "the state" if odd[0] in slots else "the model"
        raise ValueError(
            f"the state is of another model: only {where} has a parameter {odd[0]!r}. Load the "
            "checkpoint of this model, with model=ddp.module given at both times or at neither"
        )
    for name, entry in slots.items():
        sides = tuple(entry["sides"]) if entry["sides"] else None
        if expected is not None and expected[name] != (entry["numel"], sides):
            raise ValueError(
                f"the state is of another model: parameter {name!r} is matrix {sides} there and "
                f"{expected[name][1]} here"
            )
        residual, basis, rank = entry["residual"], entry["basis"], entry["rank"]
        if residual is not None and residual.shape != (entry["numel"],):
            raise ValueError(f"the state is damaged: the residual of {name!r} has another size")
        if basis is not None and (sides is None or basis.shape != (max(sides), rank)):
            raise ValueError(f"the state is damaged: the basis of {name!r} has another shape")


def unpack(engine: Engine, packed: Mapping[str, Any]) -> None:
    """Put a checked state in force. Tensors go to the device when their gradient arrives."""
    # What is known of the residuals at hand says nothing of those to come.
    engine.memory.free_sent()
    progress = dict(packed["progress"])
    # Before the first decision the plan names no matrix, and torch's distributed checkpoints keep no
    # empty dictionary.
    plan = {"ranks": {}, **progress.pop("plan")}
    if (sampling := plan.pop("sampling")) is not None:
        sampling = dict(sampling)
        if sampling["estimator"] is None:
            sampling["estimator"] = getattr(engine.controller, "estimator", "gaussian")
        sampling = Sampling(**sampling)
    engine.progress = Progress(plan=Plan(**plan, sampling=sampling), **progress)
    engine.progress.history = [dict(entry) for entry in progress["history"]]
    matrices = tuple(MatrixSpec(*entry) for entry in packed["layout"])
    engine.layout = Layout(matrices, packed["world_size"]) if packed["world_size"] else None
    index = {matrix.name: place for place, matrix in enumerate(matrices)}
    engine.registry.expect(packed["buckets"])
    for name, entry in packed["slots"].items():
        slot = engine.memory.slots.get(name)
        if slot is None:
            sides = tuple(entry["sides"]) if entry["sides"] else None
            slot = engine.memory.slots[name] = Slot(name, entry["numel"], sides)
        slot.index, slot.rank = index.get(name, -1), entry["rank"]
        slot.residual, slot.basis_NR = _copy(entry["residual"]), _copy(entry["basis"])
    engine.observer = None
    if packed["window"] is not None:
        assert engine.layout is not None
        engine.observer = Observer(engine.layout, packed["window"]["sums"].device)
        engine.observer.load_state_dict(packed["window"])


def merge(states: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """One state for ``world_size`` ranks from the states of all ranks of an earlier run.

    Each new rank gets the mean of the old residuals, so the part of the average gradient that is
    still to be sent, (1/W) sum e_i, is what it was. Load the result on every rank.

    Raises:
        ValueError: not one state of each rank of one run.
    """
    if not states or any(state["world_size"] != len(states) for state in states):
        sizes = [state["world_size"] for state in states]
        raise ValueError(f"expected the states of all ranks of one run, got {sizes} (world sizes)")
    merged = dict(states[0])
    merged["world_size"] = world_size
    merged["slots"] = {}
    for name, entry in states[0]["slots"].items():
        residuals = [state["slots"][name]["residual"] for state in states]
        mean = None
        if residuals[0] is not None:
            mean = torch.stack([r.float() for r in residuals]).mean(0).to(residuals[0].dtype)
        merged["slots"][name] = {**entry, "residual": mean}
    return merged
