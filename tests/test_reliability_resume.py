"""A run's own checkpoint is taken back, whatever DDP made of the model, and whoever looks on meanwhile."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenes import Given, averages, draw, fingerprint, plain_mean, seeded, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.controllers import AdaptiveController, FixedRank, Scheduled

Pools = Callable[[int], Ranks]


ALTERNATING = (torch.float32, torch.float64, torch.float32, torch.float64)


class TwoTypes(nn.Module):
    """With several types DDP has several buckets from the first iteration on."""

    def __init__(self, types: Sequence[torch.dtype] = ALTERNATING) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(0.2 * torch.randn(16, 16, generator=seeded(place, 0)).to(dtype))
            for place, dtype in enumerate(types)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x.to(weight.dtype) @ weight)
        return x


def trained(
    model: nn.Module, state: EDGCState, rank: int, steps: range, **options: Any
) -> list[dict[str, Any]]:
    """Its states before each step and at the end."""
    ddp = wrap(model, state, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in steps:
        seen.append(state.state_dict())
        optimizer.zero_grad()
        ddp(torch.randn(4, 16, generator=seeded(step, rank))).float().square().mean().backward()
        optimizer.step()
    return [*seen, state.state_dict()]


def two_types(rank: int, world: int, named: bool, static_graph: bool) -> None:
    def fresh() -> tuple[nn.Module, EDGCState]:
        model = TwoTypes()
        controller = Scheduled({2: 2, 5: 4, 7: 1, 9: 3})
        return model, EDGCState(controller, model=model if named else None)

    whole, state = fresh()
    saved = trained(whole, state, rank, range(12), static_graph=static_graph)
    assert [each["progress"]["step"] for each in saved] == list(range(13))
    for stop in (1, 4, 8):
        again, other = fresh()
        trained(again, other, rank, range(stop), static_graph=static_graph)
        weights = again.state_dict()
        again, other = fresh()
        again.load_state_dict(weights)
        other.load_state_dict(saved[stop])
        end = trained(again, other, rank, range(stop, 12), static_graph=static_graph)[-1]
        assert fingerprint(again) == fingerprint(whole) and end["progress"]["step"] == 12


@pytest.mark.parametrize("static_graph", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_several_types_resume_to_the_last_bit(
    ranks: Pools, named: bool, static_graph: bool
) -> None:
    """Of a static graph's first iteration DDP calls every bucket its first and none its last."""
    ranks(2)(two_types, named, static_graph)


def after_one_iteration(rank: int, world: int, how: str) -> None:
    """The one of a static graph that DDP calls no bucket the last of."""

    def fresh() -> tuple[nn.Module, EDGCState]:
        model = TwoTypes()
        return model, EDGCState(Scheduled({2: 2, 5: 4}), model=model)

    model, state = fresh()
    trained(model, state, rank, range(8), static_graph=True)
    again, other = fresh()
    ddp = wrap(again, other, static_graph=True)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    for step in range(8):
        if step == 1 and how == "close":
            other.close()
            assert other.state_dict()["progress"]["step"] == 1
        elif step == 1:
            other = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
            if how == "pickle":
                weights, (again, fresh_state) = again.state_dict(), fresh()
                again.load_state_dict(weights)
                fresh_state.load_state_dict(other.state_dict())
                other = fresh_state
            ddp = wrap(again, other, static_graph=True)
            optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        optimizer.zero_grad()
        ddp(torch.randn(4, 16, generator=seeded(step, rank))).float().square().mean().backward()
        optimizer.step()
    found = other.state_dict()["progress"]["step"]
    assert found == 8, found
    assert fingerprint(again) == fingerprint(model)


@pytest.mark.parametrize("how", ["close", "deepcopy", "pickle"])
def test_a_static_graphs_first_iteration_counts_whatever_comes_next(ranks: Pools, how: str) -> None:
    ranks(2)(after_one_iteration, how)


def copied_at_rest(rank: int, world: int) -> None:
    model = TwoTypes()
    state = EDGCState(Scheduled({2: 0}, window=None), model=model)
    trained(model, state, rank, range(5), static_graph=True)
    twin = copy.deepcopy(state)
    twin.engine.registry = copy.deepcopy(state.engine.registry)
    saved = trained(model, twin, rank, range(3), static_graph=True)[-1]
    assert saved["progress"]["step"] == 8


def test_a_copy_that_is_dense_for_good_trains_on(ranks: Pools) -> None:
    ranks(2)(copied_at_rest)


def wrapped_anew(rank: int, world: int, controller: str) -> None:
    """Each time DDP has a first iteration, where the state has none."""
    given = {"scheduled": Scheduled({2: 2, 5: 4, 7: 0, 9: 3}), "dense": Scheduled({2: 0})}
    ends = set()
    for static_graph in (True, False):
        model = TwoTypes()
        state = EDGCState(given[controller], model=model)
        for begin, end in ((0, 3), (3, 6), (6, 12)):
            saved = trained(model, state, rank, range(begin, end), static_graph=static_graph)
            assert saved[-1]["progress"]["step"] == end
        ends.add(fingerprint(model))
    assert len(ends) == 1


@pytest.mark.parametrize("controller", ["scheduled", "dense"])
def test_a_static_graph_may_be_wrapped_anew(ranks: Pools, controller: str) -> None:
    ranks(2)(wrapped_anew, controller)


def two_in_one_backward(rank: int, world: int) -> str:
    state = EDGCState(FixedRank(2))
    first, second = (wrap(nn.Linear(16, 16), state) for _ in range(2))
    try:
        for _ in range(3):
            second(first(torch.ones(2, 16))).sum().backward()
    except RuntimeError as refused:
        return str(refused)
    return "trained"


def test_one_state_on_two_models_of_one_backward_is_refused(ranks: Pools) -> None:
    for message in ranks(2)(two_in_one_backward):
        assert "one EDGCState serves one DistributedDataParallel model" in message, message


def watched_rollback(rank: int, world: int, watched: bool) -> bytes:
    """Rank 0's handler asks for metrics in the middle of loading: between any two of its lines."""
    shapes = [(32, 48), (300,), (32, 48)]
    model = Given(shapes)
    state = EDGCState(Scheduled({2: 4, 6: 0}), model=model, wire_dtype="bf16")
    # Small tensors in a bucket of their own travel in the factors' type while anything is compressed.
    ddp = wrap(model, state, 0.001)
    saved = {}
    for step in range(9):
        averages(ddp, draw(shapes, seed=step))
        saved[step] = state.state_dict()
    looks = 0

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal looks
        if event == "line" and frame.f_code.co_filename.endswith("checkpoint.py"):
            looks += 1
            state.metrics(), state.plan(), state.history
        return look

    end = []
    for turn in range(4):
        sys.settrace(look if watched and rank == 0 else None)
        try:
            state.load_state_dict(saved[(4, 8)[turn % 2]])
        finally:
            sys.settrace(None)
        end += averages(ddp, draw(shapes, seed=100 + turn))
    assert (looks > 100) == (watched and rank == 0)
    return b"".join(each.numpy().tobytes() for each in end)


def test_who_looks_on_while_a_state_is_loaded_changes_nothing(ranks: Pools) -> None:
    first, second = ranks(2)(watched_rollback, True)
    assert [first, second] == ranks(2)(watched_rollback, False)


class WithComplex(Given):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__([(16, 24)])
        self.z = nn.Parameter(torch.ones(8, 8, dtype=dtype))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return super().forward(gradients) + (self.z * self.z.conj()).real.sum()


def complex_parameters(rank: int, world: int, dtype: torch.dtype) -> None:
    model = WithComplex(dtype)
    state = EDGCState(FixedRank(2), model=model)
    ddp = wrap(model, state)
    for step in range(4):
        averages(ddp, draw([(16, 24)], seed=step))
    EDGCState(FixedRank(2), model=model).load_state_dict(state.state_dict())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_do_not_spoil_a_checkpoint(ranks: Pools, dtype: torch.dtype) -> None:
    ranks(2)(complex_parameters, dtype)


def delayed(rank: int, world: int) -> tuple[str, str]:
    """DDP averages a parameter by itself, behind all others, where it is told to."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    late: Any = {
        "delay_all_reduce_named_params": [("0.weight", model[0].weight)],
        "param_to_hook_all_reduce": model[2].weight,
    }
    state = EDGCState(FixedRank(2), model=model)
    saved = trained(model, state, rank, range(4), **late)[-1]
    again = EDGCState(FixedRank(2), model=model)
    again.load_state_dict(saved)
    # Whether it has been trained with or not.
    again = copy.deepcopy(again)
    saved = again.state_dict()
    assert saved["unseen"] == ["0.weight"]
    dist.barrier()
    refused = []
    brought = EDGCState(FixedRank(2), model=model)
    trained(model, brought, rank, range(3))
    with pytest.raises(ValueError, match="only the model has a parameter '0.weight'"):
        brought.load_state_dict(saved)
    for asked in (again, EDGCState(FixedRank(2), model=nn.Sequential(*model, nn.Linear(16, 4)))):
        try:
            asked.load_state_dict(saved)
            trained(model, asked, rank, range(1))
        except (ValueError, RuntimeError) as error:
            refused.append(str(error))
    return refused[0], refused[1]


def test_a_parameter_that_ddp_averages_itself_is_not_missed(ranks: Pools) -> None:
    for now_brought, another_model in ranks(2)(delayed):
        assert "it has no parameter '0.weight'" in now_brought
        assert "only the model has a parameter '3.bias'" in another_model


def loggers_habit(rank: int, world: int) -> None:
    shapes = [(16, 24)]
    state = EDGCState(FixedRank(3, window=2))
    ddp = wrap(Given(shapes), state)
    for step in range(8):
        averages(ddp, draw(shapes, seed=step))
        if rank == 0:
            for row in [*state.history, *state.state_dict()["progress"]["history"]]:
                row["ranks"].clear()
                row.pop("ranks")
    assert all(row["ranks"] == {"parameter_0000": 3} for row in state.history)


def test_what_a_logger_takes_from_a_decision_is_still_there(ranks: Pools) -> None:
    ranks(2)(loggers_habit)


def cut_otherwise(rank: int, world: int) -> None:
    shapes = [(16, 24)] * 6
    gradients = draw(shapes, seed=rank)
    first, second = EDGCState(FixedRank(3)), EDGCState(FixedRank(3))
    # Only so does DDP cut its buckets before the first iteration.
    many = wrap(Given(shapes), first, 0.002, find_unused_parameters=True)
    one = wrap(Given(shapes), second, 25, find_unused_parameters=True)
    for ddp in (many, one):
        for _ in range(4):
            averages(ddp, gradients)
    owed = copy.deepcopy(second.state_dict()["slots"])
    with pytest.raises(ValueError, match="bucket 0 held 2 parameters there and 6 here"):
        second.load_state_dict(first.state_dict())
    for name, slot in second.state_dict()["slots"].items():
        assert torch.equal(slot["residual"], owed[name]["residual"])
    first.load_state_dict(first.state_dict())
    averages(many, gradients)


def test_a_state_in_use_is_not_given_residuals_of_another_cut(ranks: Pools) -> None:
    ranks(2)(cut_otherwise)


def long_planned(rank: int, world: int) -> None:
    shapes = [(16, 24)]
    state = EDGCState(Scheduled({0: 3, 100_000: 2}))
    ddp = wrap(Given(shapes), state)
    gradients = draw(shapes, seed=rank)
    averages(ddp, gradients)
    observer = state.engine.observer
    while observer is None:
        averages(ddp, gradients)
        observer = state.engine.observer
    for _ in range(1500):
        observer.note_span(0.5, 0.75)  # type: ignore[arg-type]
    averages(ddp, gradients)
    assert len(observer.spans) == 1000 and observer.spans[-1] != (0.5, 0.75)


def test_a_plan_of_100000_iterations_does_not_keep_all_their_times(ranks: Pools) -> None:
    ranks(2)(long_planned)


def asked_for_twice_fewer(rank: int, world: int) -> list[dict[str, int]]:
    shapes = [(32, 32), (32, 256)]
    controller = AdaptiveController(window=2, budget=0.9)
    state = EDGCState(controller, min_compression_rate=2.0)
    ddp = wrap(Given(shapes), state)
    plans = []
    for step in range(40):
        averages(ddp, draw(shapes, seed=10 * step + rank))
        if step > 2:
            assert state.plan() == dict(state.engine.progress.plan.ranks)
        plans.append(state.plan())
    return plans


def test_ranks_by_energy_stay_where_matrices_are_compressed(ranks: Pools) -> None:
    first, second = ranks(2)(asked_for_twice_fewer)
    assert first == second
    # 7 * 64 + 1 entries are less than half of 1024, 8 * 64 + 1 are not.
    assert max(plan["parameter_0000"] for plan in first[4:]) == 7


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda weight: weight.contiguous(),
    "channels_last": lambda weight: weight.contiguous(memory_format=torch.channels_last),
    "turned": lambda weight: weight.t().contiguous().t(),
}
CONVERTED = [
    ((6, 5, 3, 3), "plain", "channels_last"),
    ((6, 5, 3, 3), "channels_last", "plain"),
    ((60, 2, 3, 3), "plain", "channels_last"),
    ((12, 12), "plain", "turned"),
]


def laid_out(shape: Sequence[int], how: str) -> Given:
    model = Given([shape])
    model.weights[0].data = FORMATS[how](model.weights[0].data)
    return model


def converted(
    rank: int, world: int, shape: Sequence[int], before: str, after: str, loaded: bool
) -> float:
    """All is paid in the end, whatever the memory format: what is missing of what was given."""
    model = laid_out(shape, before)
    state = EDGCState(Scheduled({2: 2, 9: 0}), model=model)
    ddp = wrap(model, state, gradient_as_bucket_view=True)
    given, received = torch.zeros(shape), torch.zeros(shape)
    for step in range(12):
        if step == 6:
            saved = state.state_dict()
            model.weights[0].data = FORMATS[after](model.weights[0].data)
            if loaded:
                state = EDGCState(Scheduled({2: 2, 9: 0}), model=model)
                state.load_state_dict(saved)
            ddp = wrap(model, state, gradient_as_bucket_view=True)
        (gradient,) = draw([shape], seed=10 * step + rank)
        given += plain_mean([gradient])[0]
        received += averages(ddp, [gradient])[0]
        if step == 8:
            assert float((received - given).norm() / given.norm()) > 0.1
    return float((received - given).norm() / given.norm())


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(("shape", "before", "after"), CONVERTED)
def test_what_is_owed_follows_the_memory_format(
    ranks: Pools, shape: Sequence[int], before: str, after: str, loaded: bool
) -> None:
    for missing in ranks(2)(converted, shape, before, after, loaded):
        assert missing < 1e-5


def converted_after_wrapping(rank: int, world: int) -> None:
    """DDP's first buckets then have the old format, its others the new one."""
    shape = (6, 5, 3, 3)

    def fresh() -> tuple[EDGCState, DistributedDataParallel]:
        model = Given([shape])
        state = EDGCState(Scheduled({2: 2, 9: 0}), model=model)
        ddp = wrap(model, state, gradient_as_bucket_view=True)
        model.weights[0].data = FORMATS["channels_last"](model.weights[0].data)
        return state, ddp

    ends = []
    for stop in (None, 6):
        state, ddp = fresh()
        for step in range(9):
            if step == stop:
                saved = state.state_dict()
                state, ddp = fresh()
                state.load_state_dict(saved)
            (got,) = averages(ddp, draw([shape], seed=10 * step + rank))
        ends.append(got)
    # Columns are added up in another order once.
    torch.testing.assert_close(*ends)


def test_a_model_converted_after_it_was_wrapped_resumes_alike(ranks: Pools) -> None:
    ranks(2)(converted_after_wrapping)


def saved_from_a_hook(rank: int, world: int) -> None:
    model = Given([(16, 24)] * 4)
    state = EDGCState(FixedRank(3), model=model)
    ddp = wrap(model, state, 0.001)
    told: list[str] = []

    def save(gradient: Tensor) -> None:
        try:
            state.state_dict()
        except RuntimeError as error:
            told.append(str(error))
            with pytest.raises(RuntimeError, match="within a backward"):
                copy.deepcopy(state)

    gradients = draw([(16, 24)] * 4, seed=rank)
    for _ in range(3):
        averages(ddp, gradients)
    # The last gradients of a backward are those of the first parameters.
    handles = [weight.register_hook(save) for weight in model.weights]
    averages(ddp, gradients)
    assert told and all("within a backward" in text for text in told)
    for handle in handles:
        handle.remove()
    resumed = EDGCState(FixedRank(3), model=model)
    resumed.load_state_dict(state.state_dict())


def owed_after_an_error(rank: int, world: int) -> None:
    """What was found to lie otherwise, and not turned since an error came first, is found again."""
    model = laid_out((6, 5, 3, 3), "plain")
    state = EDGCState(FixedRank(2), model=model)
    ddp = wrap(model, state)
    for _ in range(4):
        averages(ddp, draw([(6, 5, 3, 3)], seed=rank))
    registry = state.engine.registry
    slots = tuple(registry.memory.slots.values())
    weights, buffer = list(model.weights), torch.zeros(270)
    assert registry.moved(weights, slots, buffer) == []
    weights[0].data = FORMATS["channels_last"](weights[0].data)
    for _ in range(2):
        (turn,) = registry.moved(weights, slots, buffer)
    turn()
    assert registry.moved(weights, slots, buffer) == []
    one = nn.Parameter(torch.zeros(1, 5, 3, 4))
    (slot,) = EDGCState(model=nn.ParameterList([one])).engine.registry.slots([one])
    one.data = FORMATS["channels_last"](one.data)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"as matrix \(3, 20\) now, and what .* as \(5, 12\)"):
            registry.moved([one], [slot], buffer)


def test_a_conversion_is_not_forgotten_over_an_error(ranks: Pools) -> None:
    ranks(2)(owed_after_an_error)


def frozen_without_names(rank: int, world: int) -> None:
    shapes = [(16, 24)] * 4
    state = EDGCState(FixedRank(2))
    options = {"find_unused_parameters": True}
    ddp = wrap(Given(shapes), state, 0.001, **options)
    for _ in range(4):
        averages(ddp, draw(shapes, seed=rank))
    model = Given(shapes)
    # DDP brings the last one first.
    model.weights[3].requires_grad_(False)
    other = EDGCState(FixedRank(2))
    other.load_state_dict(state.state_dict())
    ddp = wrap(model, other, 0.001, **options)
    with pytest.raises(
        (ValueError, RuntimeError), match="bucket 3 held 1 parameters there and 0 here"
    ):
        ddp(draw(shapes, seed=rank)).backward()


def test_without_names_a_frozen_parameter_moves_all_others(ranks: Pools) -> None:
    ranks(2)(frozen_without_names)


def test_half_an_iteration_is_not_saved(ranks: Pools) -> None:
    ranks(2)(saved_from_a_hook)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        for place, layer in enumerate(self.layers):
            layer.weight.data = 0.2 * torch.randn(16, 16, generator=seeded(place, 0))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = x if place == skipped else torch.tanh(layer(x))
        return x


def left_out(rank: int, world: int, skipped: Sequence[int]) -> tuple[int, int, list[str]]:
    """Steps counted, futures kept, what the log says."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("edgc_ddp").addHandler(handler)
    try:
        model = Skipping()
        state = EDGCState(FixedRank(3), model=model)
        ddp = wrap(
            model,
            state,
            0.0001,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
        for step in range(12):
            # All are used first, so that DDP cuts its buckets again.
            x = torch.randn(4, 16, generator=seeded(step, rank))
            ddp(x, skipped[step % len(skipped)] if step > 2 else None).square().mean().backward()
        kept = len(state.engine._lane._submitted)  # type: ignore[union-attr]
        return int(state.metrics()["step"]), kept, records
    finally:
        logging.getLogger("edgc_ddp").removeHandler(handler)


@pytest.mark.skipif(
    "skip_all_reduce_unused_params"
    not in inspect.signature(DistributedDataParallel.__init__).parameters,
    reason="this torch has no such option",
)
@pytest.mark.parametrize(
    ("skipped", "steps", "warnings"),
    # The bucket of the first layer is DDP's last, without which an iteration does not count.
    [([0], 3, 1), ([1], 12, 0), ([2], 12, 0), ([3], 12, 0), ([3, 0], 7, 0), ([3, 2], 12, 0)],
)
def test_buckets_that_ddp_leaves_out(
    ranks: Pools, skipped: Sequence[int], steps: int, warnings: int
) -> None:
    for counted, kept, told in ranks(2)(left_out, skipped):
        assert kept <= 8 and counted == steps
        assert len(told) == warnings
        assert all("skip_all_reduce_unused_params=True" in text for text in told)


def other_buckets_after_one_iteration(rank: int, world: int, static_graph: bool) -> None:
    saved = EDGCState(FixedRank(2))
    other = TwoTypes((torch.float32, torch.float32, torch.float32, torch.float64))
    trained(other, saved, rank, range(4), static_graph=static_graph)
    state = EDGCState(FixedRank(2))
    trained(TwoTypes(), state, rank, range(1), static_graph=static_graph)
    with pytest.raises(ValueError, match="bucket . held . parameters there and . here"):
        state.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("static_graph", [False, True])
def test_one_iteration_is_enough_to_know_the_buckets(ranks: Pools, static_graph: bool) -> None:
    ranks(2)(other_buckets_after_one_iteration, static_graph)
