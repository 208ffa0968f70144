"""Finds the slot of a parameter, by name when the model is known, else by order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout
from edgc_ddp.memory import ParameterMemory, Slot, matrix_shape, stored_shape

_WRAPPERS = ("module.", "_orig_mod.")


class Registry:
    """Slots by parameter. Filled while the first iteration passes; then closed."""

    def __init__(self, model: torch.nn.Module | None, memory: ParameterMemory) -> None:
        self.memory = memory
        self.closed = False
        """Whether every parameter has been seen."""
        self.loaded = False
        """Whether the slots came from a checkpoint."""
        self._by_id: dict[int, tuple[Tensor, Slot]] = {}
        # Parameters are kept, since an id may be given again once its object is gone.
        self._names: dict[int, tuple[Tensor, str]] | None = None
        if model is not None:
            self._names = {id(p): (p, _plain(n)) for n, p in model.named_parameters()}

    def slots(self, parameters: Sequence[Tensor]) -> tuple[Slot, ...]:
        """The slots of a bucket's parameters, made on first sight."""
        return tuple(self._slot(parameter) for parameter in parameters)

    def _slot(self, parameter: Tensor) -> Slot:
        known = self._by_id.get(id(parameter))
        if known is not None:
            return known[1]
        if self.closed:
            raise RuntimeError(
                "edgc_hook met a parameter that was not there in the first iteration: one EDGCState "
                "serves one DistributedDataParallel model. Make a new EDGCState for each model."
            )
        name = self._name_of(parameter)
        sides = _sides(parameter)
        slot = self.memory.slots.get(name)
        if slot is None and self.loaded:
            raise ValueError(
                f"the loaded state is of another model: it has no parameter {name!r}. Load the checkpoint "
                "of this model."
            )
        if slot is None:
            slot = self.memory.slots[name] = Slot(name, parameter.numel(), sides)
        elif (slot.numel, slot.sides) != (parameter.numel(), sides):
            raise ValueError(
                f"the loaded state is of another model: it has parameter {name!r} as matrix "
                f"{slot.sides}, this model as {sides}. Load the checkpoint of this model."
            )
        slot.move_to(parameter.device)
        self._by_id[id(parameter)] = (parameter, slot)
        return slot

    def _name_of(self, parameter: Tensor) -> str:
        if self._names is None:
            return f"parameter_{len(self._by_id):04d}"
        if id(parameter) not in self._names:
            raise ValueError(
                f"model= has no parameter of shape {tuple(parameter.shape)} that DDP averages: pass "
                "the module that DistributedDataParallel wraps, EDGCState(model=ddp.module)"
            )
        return self._names[id(parameter)][1]

    def expected(self) -> dict[str, tuple[int, tuple[int, int] | None]] | None:
        """Entries and matrix sides of every parameter by name; None while they are not known."""
        if self._names is not None:
            return {
                name: (parameter.numel(), _sides(parameter))
                for parameter, name in self._names.values()
                if parameter.requires_grad
            }
        if self.closed:
            return {slot.name: (p.numel(), slot.sides) for p, slot in self._by_id.values()}
        return None

    def layout(self, world_size: int) -> Layout:
        """All compressible matrices, in the model's order (else in order of arrival)."""
        names = list(self.memory.slots)
        if self._names is not None:
            position = {name: place for place, (_, name) in enumerate(self._names.values())}
            names.sort(key=lambda name: position.get(name, len(position)))
        specs = [self.memory.slots[name].spec for name in names]
        layout = Layout(tuple(spec for spec in specs if spec is not None), world_size)
        for index, matrix in enumerate(layout.matrices):
            self.memory.slots[matrix.name].index = index
        return layout


def _sides(parameter: Tensor) -> tuple[int, int] | None:
    # Complex gradients are always averaged dense.
    if not parameter.dtype.is_floating_point:
        return None
    return matrix_shape(stored_shape(parameter.shape, parameter.stride()))


def _plain(name: str) -> str:
    """The name without what DDP and torch.compile put before it."""
    while name.startswith(_WRAPPERS):
        name = name.removeprefix(_WRAPPERS[0]).removeprefix(_WRAPPERS[1])
    return name
