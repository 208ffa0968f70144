"""Whether a packed state is whole and fits this run. Looks at everything before anything is changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from edgc_ddp.agreement import check_origin, check_world_size
from edgc_ddp.checkpoint import axes_of, layout_of, plain_options, progress_of, sides_of, whole
from edgc_ddp.decisions import Plan, is_count
from edgc_ddp.engine import Engine
from edgc_ddp.observer import Observer
from edgc_ddp.progress import Progress


def check(engine: Engine, packed: Mapping[str, Any], world_size: int, rank: int | None) -> None:
    """Raise ValueError unless ``packed`` is a whole state of this model, controller, ``world_size`` and
    ``rank`` (0 and None = not known yet)."""
    packed = whole(packed)
    with _damage("origin"):
        _check_origin(packed)
    _check_controller(engine, packed)
    check_world_size(packed["world_size"], world_size)
    if rank is not None:
        check_origin(packed.get("rank"), rank)
    with _damage("slots"):
        for name, entry in packed["slots"].items():
            _check_slot(name, entry)
    if packed["slots"]:
        _check_model(engine, packed["slots"], packed.get("unseen", ()))
        if engine.registry.closed:
            engine.registry.check_buckets(packed["buckets"], engine.registry.first_buckets)
    _check_feedback(engine, packed["slots"])
    with _damage("progress"):
        progress = progress_of(engine, packed)
        _check_progress(progress, packed)
    sampling = progress.plan.sampling
    if sampling is not None and sampling.estimator is None:
        raise ValueError(
            "the state samples gradients by a function, which no checkpoint holds, and this run's "
            f"{type(engine.controller).__name__} has none: give it the function as its attribute "
            "`estimator`, or start without the state"
        )
    with _damage("layout"):
        _check_layout(packed, progress.plan)
    with _damage("window"):
        _check_window(packed, progress.plan)


@contextlib.contextmanager
def _damage(part: str) -> Iterator[None]:
    """Whatever goes wrong while a part is read, the state is to blame for it."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"the state is damaged, in its {part}: {type(error).__name__}, {error}; load an earlier one"
        ) from error


def _check_origin(packed: Mapping[str, Any]) -> None:
    rank, size, buckets = packed.get("rank"), packed["world_size"], packed["buckets"]
    options = packed.get("options")
    if not (rank is None or is_count(rank)) or not is_count(size):
        raise ValueError(f"rank {rank!r} of {size!r}")
    if not isinstance(buckets, list) or not all(is_count(count) for count in buckets):
        raise ValueError(f"its buckets are {buckets!r}")
    unseen = packed.get("unseen", [])
    if not isinstance(unseen, list) or not all(isinstance(name, str) for name in unseen):
        raise ValueError(f"its parameters that were not averaged are {unseen!r}")
    if not (options is None or isinstance(options, Mapping)):
        raise ValueError(f"its controller's options are {options!r}")


def _check_controller(engine: Engine, packed: Mapping[str, Any]) -> None:
    mine = type(engine.controller).__name__
    if packed["controller"] != mine:
        raise ValueError(
            f"the state was written under controller {packed['controller']}, this run has {mine}: use "
            "the same controller, or start without the state"
        )
    # Empty, or absent from a distributed checkpoint, where a controller has none.
    theirs, here = packed.get("options") or {}, plain_options(engine.controller)
    for name, text in theirs.items():
        if here.get(name) != text:
            raise ValueError(
                f"the state was written under {mine} with {name}={text}, this run has "
                f"{name}={here.get(name)}: set {name}={text}, or start without the state"
            )


def _check_slot(name: str, entry: Mapping[str, Any]) -> None:
    residual, basis, rank = entry["residual"], entry["basis"], entry["rank"]
    sides = sides_of(entry)
    axes = axes_of(entry) or ()
    if not all(map(is_count, axes)) or len(set(axes)) != len(axes):
        raise ValueError(f"the axes of {name!r} are {axes!r}")
    if not is_count(rank) or rank > (min(sides) if sides else 0):
        raise ValueError(f"the rank of {name!r} is {rank!r}")
    if residual is not None and residual.shape != (entry["numel"],):
        raise ValueError(f"the residual of {name!r} has another size")
    if (basis is None) != (rank == 0):
        raise ValueError(f"at rank {rank} the basis of {name!r} {'lacks' if rank else 'is there'}")
    if basis is not None and (sides is None or basis.shape != (max(sides), rank)):
        raise ValueError(f"the basis of {name!r} has another shape")
    for what, tensor in (("residual", residual), ("basis", basis)):
        if tensor is None:
            continue
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ValueError(f"the {what} of {name!r} is not made of finite numbers")


def _check_model(engine: Engine, slots: Mapping[str, Any], unseen: Sequence[str]) -> None:
    expected = engine.registry.expected()
    if expected is None:
        return
    # DDP has not brought them then. Should it now, the first bucket says so.
    missing = {name for name in unseen if name not in slots and not engine.registry.has_met(name)}
    expected = {name: sizes for name, sizes in expected.items() if name not in missing}
    # What was frozen in mid-run is kept as it is, and not brought again until it is unfrozen.
    kept = {name: sizes for name, sizes in engine.registry.named().items() if name in slots}
    expected = {**kept, **expected}
    if odd := sorted(set(expected) ^ set(slots)):
        where = "the state" if odd[0] in slots else "the model"
        raise ValueError(
            f"the state is of another model: only {where} has a parameter {odd[0]!r}. Load the "
            "checkpoint of this model, with model=ddp.module given at both times or at neither"
        )
    for name, entry in slots.items():
        sides = sides_of(entry)
        if expected[name] != (entry["numel"], sides):
            raise ValueError(
                f"the state is of another model: parameter {name!r} is matrix {sides} there and "
                f"{expected[name][1]} here"
            )


def _check_feedback(engine: Engine, slots: Mapping[str, Any]) -> None:
    owing = next((name for name, entry in slots.items() if entry["residual"] is not None), None)
    if owing is not None and not engine.settings.error_feedback:
        raise ValueError(
            f"the state holds what is still to be sent of {owing!r}, but this run has error_feedback=False "
            "and would not send it: set error_feedback=True, or start without the state"
        )


def _check_progress(progress: Progress, packed: Mapping[str, Any]) -> None:
    plan = progress.plan
    counts = (progress.step, progress.compressed_steps, plan.until, plan.probe_rank)
    if not all(is_count(count) for count in counts):
        raise ValueError(f"counts and iterations are {counts!r}")
    if progress.step and not packed["slots"]:
        raise ValueError(
            f"at step {progress.step} it knows no parameter (torch's dcp.load fills only keys that a state "
            "has before: read its folder by dcp_to_torch_save)"
        )
    sums = (progress.sent_bytes, progress.dense_bytes, progress.rank_sum)
    if not all(_is_number(value) and 0 <= value < math.inf for value in sums):
        raise ValueError(f"bytes and sums are {sums!r}")
    # Not known is nan.
    means = (progress.entropy, progress.residual, progress.span_seconds)
    if not all(_is_number(value) for value in means):
        raise ValueError(f"means are {means!r}")
    scales = (progress.loss_scale, packed.get("loss_scale"))
    if not all(s is None or (_is_number(s) and 0 < s < math.inf) for s in scales):
        raise ValueError(f"loss scales are {scales!r}")
    if not isinstance(plan.phase, str) or not isinstance(plan.reason, str):
        raise ValueError(f"phase {plan.phase!r} and reason {plan.reason!r}")
    sampling = plan.sampling
    if sampling is not None and not sampling.has_shares():
        raise ValueError(f"shares of what is sampled are {sampling.alpha!r} and {sampling.beta!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_layout(packed: Mapping[str, Any], plan: Plan) -> None:
    """Once something was decided, layout, plan and slots speak of the same matrices and ranks."""
    entries = [tuple(entry) for entry in packed["layout"]]
    if packed["window"] is None:
        if entries or plan.ranks:
            raise ValueError("there are decisions, but no window")
        return
    if not packed["world_size"]:
        raise ValueError("the world size lacks")
    slots = packed["slots"].items()
    matrices = {(n, min(e["sides"]), max(e["sides"])) for n, e in slots if e["sides"]}
    if set(entries) != matrices or len(entries) != len(matrices):
        raise ValueError("it does not name the matrices that there are")
    if dict(plan.ranks) != {name: packed["slots"][name]["rank"] for name, _, _ in matrices}:
        raise ValueError("the plan has other ranks than the matrices")


def _check_window(packed: Mapping[str, Any], plan: Plan) -> None:
    if packed["window"] is None:
        return
    observer = Observer(layout_of(packed), torch.device("cpu"))
    observer.reset(plan)
    fresh = observer.state_dict([])
    observer.load_state_dict(packed["window"])
    loaded = observer.state_dict(observer.spans)  # type: ignore[arg-type]
    if not all(_is_number(span) for span in observer.spans):
        raise ValueError(f"its times are {observer.spans!r}")
    if not is_count(observer.steps) or _shapes(loaded) != _shapes(fresh):
        raise ValueError("its sums are not those of the plan in force")


def _shapes(window: Mapping[str, Any]) -> list[Any]:
    factors = window["factors"]
    tensors = [
        window["sums"],
        window["curve"],
        *(factors[k] for k in ("scalars", "captured", "probes")),
    ]
    return [factors["ranks"], factors["heights"], *(tensor.shape for tensor in tensors)]
