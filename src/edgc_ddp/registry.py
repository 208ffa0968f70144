"""Finds the slot of a parameter, by name when the model is known, else by order of arrival."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp.decisions import Layout
from edgc_ddp.memory import ParameterMemory, Slot, axes_in_memory, matrix_shape

_LOG = logging.getLogger("edgc_ddp")
_ODD = 3
_WRAPPERS = ("module.", "_orig_mod.")


class Registry:
    """Slots by parameter. Filled while the first iteration passes; then closed."""

    def __init__(self, model: torch.nn.Module | None, memory: ParameterMemory) -> None:
        self.memory = memory
        self.closed = False
        """Whether every parameter has been seen."""
        self.loaded = False
        """Whether the slots came from a checkpoint."""
        self.first_buckets: list[int] = []
        """How many parameters each bucket of the first iteration had."""
        self._broken_off = 0
        """Backwards in a row that did not come to their last bucket."""
        self._met_now: set[int] = set()
        """Parameters of the buckets of the iteration under way."""
        self._expected_buckets: list[int] = []
        self._expected_unseen: list[str] = []
        self.world_size = 0
        """Ranks of the run whose checkpoint was loaded; 0 when none was, or it did not say."""
        self._by_id: dict[int, tuple[Tensor, Slot]] = {}
        # Parameters are kept, since an id may be given again once its object is gone.
        self._names: dict[int, tuple[Tensor, str]] | None = None
        self._sparse: set[str] = set()
        if model is not None:
            model = _bare(model)
            # By names within what DDP wraps, be that compiled or not.
            ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
            ignored |= {name.removeprefix(_WRAPPERS[1]) for name in ignored}
            named = [(n, p) for n, p in model.named_parameters() if n not in ignored]
            names = _plain([name for name, _ in named])
            self._names = {id(p): (p, n) for (_, p), n in zip(named, names, strict=True)}
            self._sparse = {self._names[i][1] for i in _sparse_ids(model) if i in self._names}

    def expect(self, first_buckets: Sequence[int], unseen: Sequence[str], world_size: int) -> None:
        """The slots now come from a checkpoint of a run of that size whose first buckets, and whose
        parameters in none of them, were these."""
        self.loaded = True
        self.world_size = world_size
        self._expected_buckets, self._expected_unseen = list(first_buckets), list(unseen)

    def begin_again(self, world_size: int) -> None:
        """A checkpoint was written before the first gradient came: parameters that were met keep their
        names and nothing else."""
        self.loaded = False
        self._expected_buckets, self._expected_unseen = [], []
        self.world_size = world_size
        for key, (parameter, slot) in self._by_id.items():
            fresh = Slot(slot.name, slot.numel, slot.sides, axes=slot.axes, strides=slot.strides)
            self.memory.slots[slot.name] = fresh
            self._by_id[key] = (parameter, fresh)

    def settle(self) -> torch.device | None:
        """Bring loaded slots to the parameters that were met before; their device, None before any."""
        for parameter, slot in self._by_id.values():
            slot.move_to(parameter.device)
        return next((parameter.device for parameter, _ in self._by_id.values()), None)

    def begin_iteration(self, is_next: bool) -> None:
        """A backward begins; ``is_next`` where the one before came to its last bucket. One that was broken
        off in the first iteration does not count."""
        self._broken_off = 0 if is_next else self._broken_off + 1
        if self._broken_off == _ODD:
            _LOG.warning(
                "DDP has called no bucket of the last %d iterations its last, so none of them counts and "
                "no rank will be decided on: either their backwards raised, or the model is wrapped with "
                "skip_all_reduce_unused_params=True and does not use its last bucket; leave that out",
                _ODD,
            )
        self._met_now.clear()
        if not self.closed:
            self.first_buckets.clear()

    def end_iteration(self) -> None:
        """All buckets came. Raises ValueError where a loaded state's run had others, without names."""
        if not self.closed:
            self.check_buckets(self._expected_buckets, self.first_buckets)
            self.closed = True

    @property
    def known(self) -> int:
        """How many parameters were met."""
        return len(self._by_id)

    def goes_on(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a bucket goes on with the iteration under way, though DDP calls it the first one: then
        others were before it, and its parameters are not among theirs."""
        return bool(self._met_now) and self._met_now.isdisjoint(map(id, parameters))

    def buckets(self) -> list[int]:
        """How many parameters each bucket of the first iteration had, in this run or the one loaded."""
        return list(self.first_buckets if self.closed else self._expected_buckets)

    def slots(self, parameters: Sequence[Tensor], buffer: Tensor | None = None) -> tuple[Slot, ...]:
        """The slots of a bucket's parameters, made on first sight."""
        if not self.closed:
            self._note_bucket(len(parameters))
        self._met_now.update(map(id, parameters))
        return tuple(self._slot(parameter, buffer) for parameter in parameters)

    def moved(
        self, parameters: Sequence[Tensor], slots: Sequence[Slot], buffer: Tensor
    ) -> list[Callable[[], None]]:
        """What turns all that is kept of parameters which lie in this bucket otherwise: converted since to
        another memory format (channels_last, say), or since the run that wrote the checkpoint."""
        found: list[Callable[[], None]] = []
        for parameter, slot in zip(parameters, slots, strict=True):
            if slot.sides is None or (strides := _strides(parameter, buffer, slot)) == slot.strides:
                continue
            axes = axes_in_memory(parameter.shape, strides)
            if axes == slot.axes:
                slot.strides = strides
                continue
            sides = _sides(parameter, axes)
            if slot.axes is None or sides != slot.sides or sorted(axes) != sorted(slot.axes):
                raise ValueError(
                    f"parameter {slot.name!r} of shape {tuple(parameter.shape)} lies in memory as matrix "
                    f"{sides} now, and what is kept of it as {slot.sides}: convert the model "
                    "(channels_last, say) before the first iteration, or make a new state"
                )
            # Noted as done when it is: an error may come before.
            found.append(partial(slot.turn, parameter.shape, axes, strides))
        return found

    def _note_bucket(self, size: int) -> None:
        self.first_buckets.append(size)
        place = len(self.first_buckets)
        self.check_buckets(self._expected_buckets[:place], self.first_buckets[:place])

    def check_buckets(self, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Raise ValueError where a checkpoint's run had other first buckets than this one: without names,
        the order of arrival must be that of the run which wrote it. Of none, nothing is known."""
        if self._names is not None or not theirs or not mine:
            return
        for place, (there, here) in enumerate(zip_longest(theirs, mine, fillvalue=0)):
            if there != here:
                raise ValueError(
                    "the loaded state was written without model= and knows parameters by the buckets they "
                    f"first came in, but bucket {place} held {there} parameters there and {here} here: use "
                    "the same model, bucket_cap_mb and frozen parameters, or pass model=ddp.module at both "
                    "times"
                )

    def _slot(self, parameter: Tensor, buffer: Tensor | None) -> Slot:
        known = self._by_id.get(id(parameter))
        if known is not None:
            return known[1]
        # One that was frozen when the state was loaded, and no longer is, has its place.
        if self.closed and self._known_name(parameter) not in self.memory.slots:
            raise RuntimeError(
                "edgc_hook met a parameter that was not there in the first iteration: one EDGCState "
                "serves one DistributedDataParallel model and the parameters it began with. Make a new "
                "EDGCState for each model, and after unfreezing layers."
            )
        name = self._name_of(parameter)
        sides, strides, axes = None, None, None
        # A sparse gradient has no matrix in the bucket to factorise.
        if buffer is None or not buffer.is_sparse:
            strides = _strides(parameter, buffer, None)
            axes = axes_in_memory(parameter.shape, strides)
            sides = _sides(parameter, axes)
        slot = self.memory.slots.get(name)
        if slot is None and self.loaded:
            raise ValueError(
                f"the loaded state is of another model: it has no parameter {name!r}. Load the checkpoint "
                "of this model."
            )
        if slot is None:
            axes = None if sides is None else axes
            slot = Slot(name, _entries(parameter), sides, axes=axes, strides=strides)
            self.memory.slots[name] = slot
        elif (slot.numel, slot.sides) != (_entries(parameter), sides):
            raise ValueError(
                f"the loaded state is of another model: it has parameter {name!r} as matrix "
                f"{slot.sides}, this model as {sides}. Load the checkpoint of this model."
            )
        slot.move_to(parameter.device)
        self._by_id[id(parameter)] = (parameter, slot)
        return slot

    def _known_name(self, parameter: Tensor) -> str | None:
        named = None if self._names is None else self._names.get(id(parameter))
        return None if named is None else named[1]

    def _name_of(self, parameter: Tensor) -> str:
        if self._names is None:
            return f"parameter_{len(self._by_id):04d}"
        if id(parameter) not in self._names:
            raise ValueError(
                f"model= had no parameter of shape {tuple(parameter.shape)} that DDP averages: pass "
                "the module that DistributedDataParallel wraps, EDGCState(model=ddp.module), and make the "
                "state when the model has its parameters (load_state_dict(assign=True) makes new ones)"
            )
        return self._names[id(parameter)][1]

    def expected(self) -> dict[str, tuple[int, tuple[int, int] | None]] | None:
        """Entries and matrix sides of every parameter by name; None while they are not known."""
        if self.closed:
            # What was frozen since then is in DDP's buckets still.
            return {slot.name: (slot.numel, slot.sides) for _, slot in self._by_id.values()}
        if self._names is not None:
            return {n: self._sizes(p, n) for p, n in self._names.values() if p.requires_grad}
        return None

    def _sizes(self, parameter: Tensor, name: str) -> tuple[int, tuple[int, int] | None]:
        return _entries(parameter), None if name in self._sparse else _sides(parameter)

    def has_met(self, name: str) -> bool:
        """Whether DDP has brought this parameter."""
        return any(slot.name == name for _, slot in self._by_id.values())

    def unseen(self) -> list[str]:
        """Parameters of the model that DDP, in the first iteration, has not brought: it was told to average
        them otherwise (``delay_all_reduce_named_params``), say."""
        if self._names is None or not self.closed:
            return list(self._expected_unseen)
        return [
            name
            for parameter, name in self._names.values()
            if parameter.requires_grad and id(parameter) not in self._by_id
        ]

    def named(self) -> dict[str, tuple[int, tuple[int, int] | None]]:
        """Entries and matrix sides of all the model's parameters, trained or not, by name."""
        known = () if self._names is None else self._names.values()
        return {n: self._sizes(p, n) for p, n in known}

    def __getstate__(self) -> dict[str, Any]:
        # A copy serves another DDP model, whose parameters it has yet to meet; ids mean nothing there.
        names = None if self._names is None else list(self._names.values())
        return {
            "memory": self.memory,
            "closed": False,
            "loaded": self.loaded or self.closed,
            "first_buckets": [],
            "_broken_off": 0,
            "_met_now": set(),
            "_expected_buckets": self.buckets(),
            "_expected_unseen": self.unseen(),
            "world_size": self.world_size,
            "_by_id": {},
            "_names": names,
            "_sparse": self._sparse,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if (names := state["_names"]) is not None:
            self._names = {id(parameter): (parameter, name) for parameter, name in names}

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        state = self.__getstate__()
        names = state.pop("_names")
        if names is not None:
            # The copied model's parameters when it is copied too, else the same ones: never new ones.
            names = [(memo.get(id(parameter), parameter), name) for parameter, name in names]
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__setstate__({**copy.deepcopy(state, memo), "_names": names})
        return twin

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


def _entries(parameter: Tensor) -> int:
    # DDP brings complex gradients as pairs of real numbers.
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _strides(parameter: Tensor, buffer: Tensor | None, slot: Slot | None) -> tuple[int, ...]:
    """Of its gradient in the bucket, where a parameter that was converted after it had been wrapped lies as
    it did before. Gradients that are views of the bucket tell, and hold for as long as the bucket lives: a
    rank that has no gradient now must not see another layout than the others."""
    strides, grad = parameter.stride(), parameter.grad
    moved = grad is not None and not grad.is_sparse and grad.stride() != strides
    if buffer is None or not (moved or (slot is not None and slot.viewed is not None)):
        return strides
    bucket = buffer.untyped_storage().data_ptr()
    if grad is not None and not grad.is_sparse and grad.untyped_storage().data_ptr() == bucket:
        if slot is not None:
            slot.viewed = bucket if moved else None
        return grad.stride()
    if slot is not None and slot.viewed == bucket and slot.strides is not None:
        return slot.strides
    return strides


def _sides(parameter: Tensor, axes: Sequence[int] | None = None) -> tuple[int, int] | None:
    # Complex gradients are always averaged dense.
    if not parameter.dtype.is_floating_point:
        return None
    if axes is None:
        axes = axes_in_memory(parameter.shape, parameter.stride())
    return matrix_shape([parameter.shape[axis] for axis in axes])


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module within DDP's and torch.compile's."""
    inner: object = model
    while isinstance(inner, torch.nn.Module):
        wrapped = isinstance(inner, DistributedDataParallel)
        model, inner = inner, inner.module if wrapped else getattr(inner, "_orig_mod", None)
    return model


def _sparse_ids(model: torch.nn.Module) -> Iterator[int]:
    """Parameters that DDP will bring as sparse gradients, by its own rule."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            yield id(module.weight)


def _plain(names: Sequence[str]) -> list[str]:
    """The names without what DDP and torch.compile put before them.

    A model's own child may be called ``module`` too: what only some names have stays where two names
    would become one.

    >>> _plain(["module.fc.weight", "module._orig_mod.head.weight"])
    ['fc.weight', 'head.weight']
    >>> _plain(["module.module.head.weight", "module.head.weight"])
    ['module.head.weight', 'head.weight']
    """
    plain = [_stripped(name) for name in names]
    if len(set(plain)) == len(plain):
        return plain
    common = list(names)
    for wrapper in _WRAPPERS * max(name.count(".") for name in names):
        if all(name.startswith(wrapper) for name in common):
            common = [name.removeprefix(wrapper) for name in common]
    return common


def _stripped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.removeprefix(_WRAPPERS[0]).removeprefix(_WRAPPERS[1])
    return name
