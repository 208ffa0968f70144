"""Any way of driving DDP: each against plain DistributedDataParallel driven alike, at full rank.

At full rank the hook's average is DDP's, so whatever the user does in between must end the same.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Given, Mlp, averages, draw, fingerprint, seeded, wrap
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import FixedRank, Scheduled
from edgc_ddp.lane import ThreadLane, open_lane

Pools = Callable[[int], Ranks]
Drive = Callable[[DistributedDataParallel, int, int], None]


def exact_state(**options: Any) -> EDGCState:
    return EDGCState(controller=FixedRank(512), min_compression_rate=0, **options)


def batch(step: int, rank: int, width: int = 16) -> Tensor:
    return torch.randn(4, width, generator=seeded(step, rank))


def loss_of(ddp: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = ddp(batch(step, rank)).square().mean()
    return loss


# -- ways of driving ---------------------------------------------------------------------------


def plainly(ddp: DistributedDataParallel, rank: int, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()


def accumulating(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, 10 * step, rank).backward()
            loss_of(ddp, 10 * step + 1, rank).backward()
        loss_of(ddp, 10 * step + 2, rank).backward()
        optimizer.step()


def two_backwards(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ddp, 10 * step, rank).backward()
        loss_of(ddp, 10 * step + 1, rank).backward()
        optimizer.step()


def keeping_gradients(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        loss_of(ddp, step, rank).backward()
        optimizer.step()


def clipping(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        optimizer.step()


def unevenly(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(4 + 3 * rank):
            optimizer.zero_grad()
            loss_of(ddp, step, rank).backward()
            optimizer.step()


def one_rank_without_data(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(6 if rank else 0):
            optimizer.zero_grad()
            loss_of(ddp, step, rank).backward()
            optimizer.step()


def evaluating_between(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()
        with torch.no_grad():
            metric = loss_of(ddp, 99, rank)
        dist.all_reduce(metric)


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return x


class Skipping(Mlp):
    """Leaves out other layers on other steps, and some of them on one rank only."""

    def forward(self, x: Tensor) -> Tensor:
        seed = int(x.detach().abs().sum() * 1e4)
        for place, layer in enumerate(self.layers):
            if (seed + place) % 3:
                x = x + torch.tanh(layer(x))
        return x


class OneBranch(nn.Module):
    """Each rank uses its own branch; a third one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branches[dist.get_rank()](torch.tanh(self.stem(x)))
        return out


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def mlp() -> nn.Module:
    return Mlp(width=16, depth=6)


WAYS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "plain": (mlp, plainly, {}),
    "no_sync": (mlp, accumulating, {}),
    "two backwards": (mlp, two_backwards, {}),
    "kept gradients": (mlp, keeping_gradients, {"gradient_as_bucket_view": True}),
    "clipping": (mlp, clipping, {}),
    "join": (mlp, unevenly, {}),
    "join, one rank empty": (mlp, one_rank_without_data, {}),
    "metrics between": (mlp, evaluating_between, {}),
    "static graph": (mlp, plainly, {"static_graph": True}),
    "bucket view": (mlp, plainly, {"gradient_as_bucket_view": True}),
    "bucket view, no_sync": (mlp, accumulating, {"gradient_as_bucket_view": True}),
    "tiny buckets": (mlp, plainly, {"bucket_cap_mb": 1e-6}),
    "huge buckets": (mlp, plainly, {"bucket_cap_mb": 1000}),
    "skipped layers": (lambda: Skipping(16, 6), plainly, {"find_unused_parameters": True}),
    "one branch per rank": (OneBranch, plainly, {"find_unused_parameters": True}),
    "unused, static": (OneBranch, plainly, {"static_graph": True}),
    "activation checkpointing": (lambda: Checkpointed(16, 6), plainly, {}),
    "batch norm": (BatchNorm, plainly, {}),
}


def driven_alike(rank: int, world: int, way: str) -> None:
    build, drive, options = WAYS[way]
    ends = []
    for state in (exact_state(), None):
        torch.manual_seed(3)
        ddp = wrap(build(), state, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})
        drive(ddp, rank)
        ends.append(list(ddp.module.state_dict().values()))
        if state is not None:
            assert int(state.metrics()["step"]) >= 5
            state.close()
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_driven_alike_it_ends_like_plain_ddp(ranks: Pools, way: str) -> None:
    ranks(2)(driven_alike, way)


# -- several models, groups, wrappers ----------------------------------------------------------


def two_models_at_once(rank: int, world: int) -> None:
    """A generator and a critic, each with its own state, their backwards interleaved."""
    ends = []
    for hooked in (True, False):
        torch.manual_seed(3)
        pair = [wrap(mlp(), exact_state() if hooked else None, SMALL_BUCKETS_MB) for _ in range(2)]
        optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in pair]
        for step in range(6):
            outputs = [ddp(batch(step, rank)) for ddp in pair]
            for ddp, optimizer, output in zip(pair, optimizers, reversed(outputs), strict=True):
                optimizer.zero_grad()
                output.square().mean().backward(retain_graph=True)
                assert ddp is not None
            for optimizer in optimizers:
                optimizer.step()
        ends.append([p.detach() for ddp in pair for p in ddp.parameters()])
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)


def test_two_models_with_a_state_each(ranks: Pools) -> None:
    ranks(2)(two_models_at_once)


def subgroup(rank: int, world: int, members: list[int]) -> bytes:
    group = dist.new_group(members)
    if rank not in members:
        return b""
    ends = []
    for state in (exact_state(process_group=group), None):
        torch.manual_seed(3)
        ddp = wrap(mlp(), state, SMALL_BUCKETS_MB, process_group=group)
        plainly(ddp, rank)
        ends.append([p.detach() for p in ddp.parameters()])
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)
    return fingerprint(ddp)


def test_a_subgroup_averages_among_itself(ranks: Pools) -> None:
    outside, *inside = ranks(3)(subgroup, [1, 2])
    assert outside == b"" and len(set(inside)) == 1


def in_overlapping_groups(rank: int, world: int) -> list[bytes]:
    """Ranks are in unequal numbers of groups, hold models for unequal times, and use states again."""
    pairs = [[0, 1], [1, 2], [0, 2], [0, 1]]
    groups = [dist.new_group(pair) for pair in pairs]
    ends, kept = [], []
    for pair, group in zip(pairs, groups, strict=True):
        if rank not in pair:
            continue
        torch.manual_seed(3)
        state = EDGCState(controller=FixedRank(2), process_group=group)
        ddp = wrap(mlp(), state, SMALL_BUCKETS_MB, process_group=group)
        plainly(ddp, rank, 4)
        state.close()
        plainly(ddp, rank, 3)
        ends.append(fingerprint(ddp.module))
        if rank == 1:
            kept.append(ddp)
    return ends


def test_groups_may_overlap_and_states_be_closed_in_them(ranks: Pools) -> None:
    """Names that torch gives a subgroup's own groups depend on how many groups a rank is in."""
    zero, one, two = ranks(3)(in_overlapping_groups)
    assert zero[0] == one[0] and one[1] == two[0] and zero[1] == two[1] and zero[2] == one[2]
    assert zero[0] == zero[2] and len({*zero, *one, *two}) == 3


def wrapped_in_fp16(rank: int, world: int) -> None:
    state = exact_state()
    ddp = DistributedDataParallel(Given([(24, 40), (9,)]), bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(state, fp16_compress_wrapper(edgc_hook))
    plain = wrap(Given([(24, 40), (9,)]), None)
    for step in range(5):
        gradients = draw([(24, 40), (9,)], seed=10 * step + rank)
        pairs = zip(averages(ddp, gradients), averages(plain, gradients), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


def test_torchs_fp16_wrapper_around_the_hook(ranks: Pools) -> None:
    ranks(2)(wrapped_in_fp16)


def compiled(rank: int, world: int) -> None:
    ends = []
    for state in (exact_state(), None):
        torch.manual_seed(3)
        ddp = wrap(mlp(), state)
        # DDP's optimizer cuts the graph at bucket borders; the backend behind it does not matter.
        plainly(torch.compile(ddp, backend="aot_eager"), rank)  # type: ignore[arg-type]
        ends.append([p.detach() for p in ddp.parameters()])
        torch._dynamo.reset()
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)


def test_torch_compile(ranks: Pools) -> None:
    ranks(2)(compiled)


def test_the_python_reducer_form_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="python_reducer.*ddp_optimizer"):
        edgc_hook(exact_state(), (torch.zeros(3), nn.Parameter(torch.zeros(3))))  # type: ignore[arg-type]


class BucketOn:
    """As much of DDP's second bucket as is read before the device is looked at."""

    def __init__(self, device: str) -> None:
        self._buffer = torch.empty(3, device=device)

    def buffer(self) -> Tensor:
        return self._buffer

    def index(self) -> int:
        return 1

    def is_last(self) -> bool:
        return True


def two_devices(rank: int, world: int) -> None:
    state = exact_state()
    plainly(wrap(mlp(), state), rank, 3)
    state.engine._was_last = False
    with pytest.raises(RuntimeError, match="gradients on meta after gradients on cpu.*several dev"):
        state.engine.submit(BucketOn("meta"))  # type: ignore[arg-type]


def test_several_devices_in_one_model_are_a_clear_error(ranks: Pools) -> None:
    ranks(2)(two_devices)


# -- copies ------------------------------------------------------------------------------------


def rank_two() -> EDGCState:
    return EDGCState(controller=Scheduled({0: 2, 6: 4}, window=5))


def copy_of(
    ddp: DistributedDataParallel, state: EDGCState, how: str
) -> tuple[nn.Module, EDGCState]:
    if how == "deepcopy of DDP":
        twin = copy.deepcopy(ddp)
        ((_, copied),) = twin._comm_hooks
        assert isinstance(copied, EDGCState) and copied is not state
        return twin.module, copied
    if how == "pickle":
        return pickle.loads(pickle.dumps((ddp.module, state)))  # type: ignore[no-any-return]
    if how == "torch.save":
        buffer = io.BytesIO()
        torch.save((ddp.module, state), buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]
    return copy.deepcopy((ddp.module, state))


def goes_on_from_a_copy(rank: int, world: int, how: str, named: bool) -> None:
    """A copy taken after five steps must train on exactly as the original does."""
    torch.manual_seed(3)
    model = mlp()
    state = rank_two()
    if named:
        state = EDGCState(controller=state.controller, model=model)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    plainly(ddp, rank, steps=5)
    module, twin = copy_of(ddp, state, how)
    plainly(ddp, rank, steps=4)
    fresh = wrap(module, twin, SMALL_BUCKETS_MB)
    plainly(fresh, rank, steps=4)
    assert fingerprint(fresh.module) == fingerprint(ddp.module)
    assert state.metrics()["plan_digest"] == twin.metrics()["plan_digest"]
    assert state.metrics()["wire_bytes"] == twin.metrics()["wire_bytes"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "deepcopy of DDP", "pickle", "torch.save"])
def test_a_copy_goes_on_where_the_original_was(ranks: Pools, how: str, named: bool) -> None:
    ranks(2)(goes_on_from_a_copy, how, named)


def copies_with_groups(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    state = EDGCState(controller=FixedRank(2), process_group=group)
    ddp = wrap(mlp(), state, process_group=group)
    plainly(ddp, rank, 3)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(state)
    twin = copy.deepcopy(state)
    assert twin.engine.process_group is group
    plainly(wrap(mlp(), twin, process_group=group), rank, 3)


def test_a_state_with_a_group_is_copied_but_not_pickled(ranks: Pools) -> None:
    ranks(2)(copies_with_groups)


def closed_and_used_again(rank: int, world: int) -> None:
    ends = []
    for closing in (False, True):
        torch.manual_seed(3)
        state = rank_two()
        ddp = wrap(mlp(), state, SMALL_BUCKETS_MB)
        plainly(ddp, rank, 4)
        if closing:
            state.close()
            state.close()
        plainly(ddp, rank, 4)
        ends.append(fingerprint(ddp.module))
    assert ends[0] == ends[1]


def test_a_closed_state_goes_on_when_it_is_used_again(ranks: Pools) -> None:
    ranks(2)(closed_and_used_again)


def lanes() -> int:
    return sum(thread.name == "edgc-lane" for thread in threading.enumerate())


def dropped(rank: int, world: int) -> None:
    gc.collect()
    before = lanes()
    for _ in range(15):
        ddp = wrap(mlp(), rank_two(), SMALL_BUCKETS_MB)
        plainly(ddp, rank, 3)
        # Right after the last backward, when the worker may still be busy with having told of it. Were
        # it the last owner, its thread and its groups would outlive the process group.
        del ddp
        gc.collect()
        assert lanes() <= before


def goes_on_after_a_broken_backward(rank: int, world: int) -> None:
    """An iteration begins behind what a backward that raised has left under way, on a slow rank too."""
    state = EDGCState(Scheduled({2: 2, 6: 0, 9: 3}))
    ddp = wrap(mlp(), state, SMALL_BUCKETS_MB)
    plainly(ddp, rank, 5)
    lane = state.engine._lane
    assert isinstance(lane, ThreadLane)
    wake_after = lane._wake_after

    def late(running: Any) -> None:
        time.sleep(0.02 * rank)
        wake_after(running)

    lane._wake_after = late  # type: ignore[method-assign]
    for _ in range(2):
        # The first layer's gradient comes last: other buckets are under way by then.
        handle = next(iter(ddp.parameters())).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(ddp, 0, rank).backward()
        handle.remove()
        ddp = wrap(ddp.module, state, SMALL_BUCKETS_MB)
        underway = list(lane._submitted)
        assert underway
        loss_of(ddp, 1, rank).backward()
        assert all(future.done() for future in underway)
        plainly(ddp, rank, 3)
    mine = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)


def test_a_backward_that_raised_on_all_ranks(ranks: Pools) -> None:
    ranks(2)(goes_on_after_a_broken_backward)


def broken_at_the_very_start(rank: int, world: int) -> None:
    """Without names, parameters are known by the buckets of the first iteration: of the whole one."""
    model = mlp()
    state = EDGCState(FixedRank(2))
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    handle = next(iter(ddp.parameters())).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, 0, rank).backward()
    handle.remove()
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    plainly(ddp, rank, 4)
    saved, weights = state.state_dict(), copy.deepcopy(model.state_dict())
    plainly(ddp, rank, 3)
    went_on = fingerprint(model)
    model = mlp()
    model.load_state_dict(weights)
    state = EDGCState(FixedRank(2))
    state.load_state_dict(saved)
    plainly(wrap(model, state, SMALL_BUCKETS_MB), rank, 3)
    assert fingerprint(model) == went_on


def test_a_very_first_backward_that_raised(ranks: Pools) -> None:
    ranks(2)(broken_at_the_very_start)


def without_a_lane(rank: int, world: int) -> None:
    with pytest.raises(
        RuntimeError, match="gradients on meta: it serves those on CPUs and on CUDA"
    ):
        open_lane(None, torch.device("meta"))


def test_a_device_without_a_lane_is_refused(ranks: Pools) -> None:
    ranks(1)(without_a_lane)


def fails_once(rank: int) -> None:
    class Failing(FixedRank):
        def decide(self, *_: Any) -> Any:
            raise KeyError("no plan")

    ddp = wrap(mlp(), EDGCState(Failing(2)), SMALL_BUCKETS_MB)
    try:
        plainly(ddp, rank, 4)
    except Exception as error:
        assert "no plan" in str(error)
    else:
        raise AssertionError("the controller's error did not reach the trainer")


def dropped_after_an_error(rank: int, world: int) -> None:
    gc.collect()
    before = lanes()
    for _ in range(3):
        fails_once(rank)
        gc.collect()
        # Buckets behind the one that failed may still be on their way through the worker.
        end = time.monotonic() + 20
        while lanes() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert lanes() <= before


def test_a_state_given_up_after_an_error_leaves_no_thread(ranks: Pools) -> None:
    ranks(2)(dropped_after_an_error)


def group_made_anew(rank: int, world: int, fewer: int, store: str) -> str | None:
    model = mlp()
    state = EDGCState(FixedRank(2), model=model)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    plainly(ddp, rank, 4)
    del ddp
    dist.destroy_process_group()
    if rank >= world - fewer:
        return None
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world - fewer
    )
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    if fewer:
        with pytest.raises(Exception) as caught:
            plainly(ddp, rank, 1)
        return str(caught.value)
    plainly(ddp, rank, 4)
    lane = state.engine._lane
    assert lane is not None and lane.group is dist.group.WORLD
    return str(state.metrics()["step"])


@pytest.mark.parametrize(("world", "fewer"), [(2, 0), (2, 1), (3, 1)])
def test_a_process_group_made_anew(ranks: Pools, tmp_path: Path, world: int, fewer: int) -> None:
    told = ranks(world)(group_made_anew, fewer, str(tmp_path / "store"))
    for answer in told[: world - fewer]:
        if fewer:
            assert answer is not None and f"the state is one of {world} ranks" in answer
            assert "merge" in answer
        else:
            assert answer == "8"


def test_states_that_are_dropped_leave_no_thread(ranks: Pools) -> None:
    ranks(2)(dropped)


def test_a_lane_that_its_worker_closes_is_waited_for_at_exit() -> None:
    script = Path(__file__).parent / "reliability" / "dropped_lane.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive: 0\n"), done.stderr


# -- buckets that differ between runs ----------------------------------------------------------


def other_buckets(rank: int, world: int, named: bool) -> str:
    """A checkpoint resumed with other buckets: right with names, refused without."""
    shapes = [(300, 300)] * 6
    first, second = Given(shapes), Given(shapes)
    state = EDGCState(controller=FixedRank(2), model=first if named else None)
    averages_of(first, state, SMALL_BUCKETS_MB, 4)
    twin = EDGCState(controller=FixedRank(2), model=second if named else None)
    twin.load_state_dict(state.state_dict())
    try:
        averages_of(second, twin, 1000, 1)
    except (ValueError, RuntimeError) as refused:
        return str(refused)
    for (name, mine), (_, theirs) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        slots = [state.engine.registry.slots([mine])[0], twin.engine.registry.slots([theirs])[0]]
        name = slots[0].name if not named else name
        assert [slot.name for slot in slots] == [name] * 2, [slot.name for slot in slots]
    return ""


def averages_of(model: nn.Module, state: EDGCState, bucket_cap_mb: float, steps: int) -> None:
    # Only then is the first iteration cut into buckets at all.
    ddp = wrap(model, state, bucket_cap_mb, find_unused_parameters=True)
    for step in range(steps):
        averages(ddp, draw([p.shape for p in model.parameters()], seed=step))


def test_other_buckets_are_right_with_names_and_refused_without(ranks: Pools) -> None:
    assert ranks(2)(other_buckets, True) == ["", ""]
    for message in ranks(2)(other_buckets, False):
        assert "bucket_cap_mb" in message and "model=ddp.module" in message


def ignored_parameters(rank: int, world: int) -> None:
    """Parameters that DDP was told to leave alone are no part of the state."""
    model = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.0.weight"])
    state = EDGCState(controller=FixedRank(2), model=model)
    ddp = wrap(model, state)
    plainly(ddp, rank, 3)
    # Their names are those within the model, also where DDP itself or its compiled form is given.
    for given in (model, ddp, torch.compile(ddp)):
        again = EDGCState(controller=FixedRank(2), model=given)  # type: ignore[arg-type]
        again.load_state_dict(state.state_dict())
        assert "layers.0.weight" not in state.plan() and "layers.1.weight" in again.plan()


def test_parameters_that_ddp_ignores(ranks: Pools) -> None:
    ranks(2)(ignored_parameters)
