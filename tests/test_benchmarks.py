"""The benchmarks' arithmetic, shapes and record, and that every contestant does average gradients."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

from benchmarks import network, record, step_time
from benchmarks.contestants import Contestant, line_up, select
from benchmarks.entrants import enter
from benchmarks.links import HEADER_BYTES, Link, sent
from benchmarks.mutation import MUTATIONS, ROOT, Mutation
from benchmarks.summary import quartiles, summarise, table
from benchmarks.worker import Job, merge, order, run_block
from benchmarks.workloads import WORKLOADS, Replay
from edgc_ddp.options import DTYPES

PROC_NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:  111       1    0    0    0     0          0         0      222       2    0    0
 link0: 1000      10    0    0    0     0          0         0     3000      20    0    0
"""


@pytest.mark.parametrize(
    ("text", "bits", "burst"),
    [("100mbit", 1e8, "32768b"), ("1gbit", 1e9, "125000b"), ("10gbit", 1e10, "1250000b")],
)
def test_a_rate_becomes_a_token_bucket_of_one_millisecond(
    text: str, bits: float, burst: str
) -> None:
    link = Link.parse(text)
    assert link.bits_per_second == bits
    assert link.tbf() == ["tbf", "rate", text, "burst", burst, "latency", "50ms"]
    assert link.seconds(bits / 8) == 1.0


def test_an_unshaped_link_has_no_queue_and_takes_no_time() -> None:
    link = Link.parse("unshaped")
    assert link.tbf() == [] and link.seconds(1e12) == 0.0


@pytest.mark.parametrize("text", ["", "fast", "0mbit", "100", "100 mbit", "-1gbit", "1tbit"])
def test_a_link_that_tc_would_not_understand_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"link='{text}'"):
        Link.parse(text)


def test_what_was_sent_is_in_the_transmit_columns_of_the_named_interface() -> None:
    assert sent(PROC_NET_DEV, "link0") == (3000, 20)
    assert sent(PROC_NET_DEV, "lo").bytes == 222
    with pytest.raises(ValueError, match="'link'"):
        sent(PROC_NET_DEV, "link")


@pytest.mark.parametrize("form", [network.bridged, network.rootless])
def test_missing_programs_are_named(
    form: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(network.NetworkError, match="ip, tc.* not found: install iproute2"),
        form(2, Link.parse("1gbit")),
    ):
        pytest.fail("the network was made without the programs that make it")


def test_bridged_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(network.NetworkError, match="--network rootless"),
        network.bridged(2, Link.parse("1gbit")),
    ):
        pytest.fail("a network namespace was made without root")


@pytest.mark.parametrize(
    "name",
    [
        *("none", "ddp@4", "fp16", "bf16@0.5", "auto", "auto@4", "powersgd-r16", "epfml-r4"),
        *("edgc-r64-bf16@4", "edgc-r64-int8~bf16", "edgc-r64-bf16~bf16@4"),
    ],
)
def test_contestants_read_back_their_own_names(name: str) -> None:
    assert Contestant.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "dpp",
        "ddp-r4",
        "powersgd",
        "powersgd-r0",
        "powersgd-r4@4",
        "edgc-r4",
        "edgc-r4-fp7",
        "fp16@0",
        "edgc-r4-bf16~fp16",
        "powersgd-r4~bf16",
        "auto-r4",
    ],
)
def test_contestants_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"contestant='{name}'"):
        Contestant.parse(name)


def test_the_line_up_pairs_every_rank_with_its_rivals() -> None:
    names = [c.name for c in line_up([4, 16], ["fp32", "bf16"], [None, 4], epfml=True)]
    assert len(names) == len(set(names)) == 5 + 2 * (2 + 4)
    assert {"powersgd-r16", "epfml-r16", "edgc-r16-fp32", "edgc-r16-bf16@4"} <= set(names)
    assert not any("epfml" in c.name for c in line_up([4], ["fp32"], [None], epfml=False))


def test_what_the_others_are_compared_with_is_always_measured() -> None:
    chosen = select(line_up([4], ["fp32"], [None], False), ["edgc*", "edgc*"])
    assert [c.name for c in chosen] == ["none", "ddp", "edgc-r4-fp32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "epfml-r4"], "--epfml PATH"),
        (["--wires", "fp7"], "edgc-r4-fp7"),
        (["--steps", "0"], "--steps >= 1"),
        (["--link", "slow"], "link='slow'"),
        (["--name", "../x"], "name='../x'"),
    ],
)
def test_bad_options_end_with_one_line_and_before_anything_starts(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_time.main(["--out", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "numel"),
    [("gpt3m", 3_257_856), ("gpt25m", 25_416_704), ("gpt2-345m-replay", 354_823_168)],
)
def test_workloads_have_the_size_they_are_named_after(name: str, numel: int) -> None:
    assert WORKLOADS[name].numel == numel


def test_a_built_model_has_the_shapes_that_were_foretold() -> None:
    workload = WORKLOADS["tiny"]
    assert [tuple(p.shape) for p in workload.build(0).parameters()] == workload.shapes()


def test_a_replay_hands_out_gradients_last_parameter_first() -> None:
    replay = Replay([(2, 3), (4,), (2, 3)], seed=0)
    arrived = []
    for place, weight in enumerate(replay.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, place=place: arrived.append(place))
    replay(0).backward()
    first, _, last = replay.parameters()
    assert arrived == [2, 1, 0]
    assert first.grad is not None and last.grad is not None
    assert torch.equal(first.grad, last.grad) and first.grad.std() > 0.1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_round_runs_everyone_once_and_nobody_is_always_first(count: int) -> None:
    rounds = [order(count, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(range(count)) for turn in rounds)
    assert {turn[0] for turn in rounds} == set(range(count))


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(("none", "ddp"), "tiny", steps=7, block=3, interface="lo", keep=True, pin=False)
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    assert job.rounds == 3


def test_ranks_that_ran_different_blocks_are_not_put_side_by_side() -> None:
    one = {"round": 0, "seconds": [1.0], "interface_bytes": 1.0, "interface_packets": 1.0}
    one["claimed_bytes"] = None
    with pytest.raises(AssertionError, match="different blocks"):
        merge([[{**one, "contestant": "ddp"}], [{**one, "contestant": "none"}]])


@pytest.mark.parametrize("values", [[3.0], [5.0, 1.0], [2.0, 9.0, 4.0, 4.0, 1.0, 7.0]])
def test_quartiles_agree_with_torch(values: list[float]) -> None:
    exact = torch.tensor(values, dtype=torch.float64)
    want = exact.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    assert quartiles(values) == pytest.approx(want)


def _block(
    turn: int, name: str, ms: list[float], sent: float, claim: float | None
) -> dict[str, Any]:
    seconds = [9.0, *(value / 1e3 for value in ms)]
    # The second rank is quicker, so a step's time is the first one's.
    return {
        "round": turn,
        "contestant": name,
        "seconds": [seconds, [value / 2 for value in seconds]],
        "interface_bytes": [sent, sent],
        "interface_packets": [sent / 1000, sent / 1000],
        "claimed_bytes": [claim, claim],
    }


BLOCKS = [
    _block(0, "none", [50, 52], 0, 0),
    _block(0, "ddp", [200, 210], 2e6, 1.9e6),
    _block(0, "powersgd-r4", [90, 100], 1e6, 0.9e6),
    _block(0, "epfml-r4", [80, 80], 1e6, None),
    _block(0, "edgc-r4-fp32", [60, 60], 0.5e6, 0.4e6),
    _block(1, "edgc-r4-fp32", [70, 80], 0.7e6, 0.6e6),
    _block(1, "ddp", [190, 200], 2e6, 1.9e6),
    _block(1, "none", [48, 50], 0, 0),
]


def test_rows_leave_out_settling_steps_and_compare_with_the_right_rivals() -> None:
    rows = {row.name: row for row in summarise(BLOCKS, Link.parse("100mbit"), shared=False)}
    ours = rows["edgc-r4-fp32"]
    assert (ours.steps, ours.median_ms) == (4, pytest.approx(65))
    assert ours.overhead_ms == pytest.approx(65 - 50)
    assert ours.per_ddp == pytest.approx(65 / 200)
    assert ours.per_powersgd == pytest.approx(65 / 95)
    assert (ours.interface_bytes, ours.claimed_bytes) == pytest.approx((0.6e6, 0.5e6))
    assert ours.data_bytes == pytest.approx(0.6e6 - 600 * HEADER_BYTES)
    assert rows["epfml-r4"].claimed_bytes is None
    assert rows["ddp"].per_powersgd is None


def test_the_floor_is_the_wire_or_the_computation_whichever_is_longer() -> None:
    slow = {row.name: row.floor_ms for row in summarise(BLOCKS, Link.parse("100mbit"), False)}
    assert slow["ddp"] == pytest.approx(160) and slow["edgc-r4-fp32"] == pytest.approx(50)
    free = {row.name: row.floor_ms for row in summarise(BLOCKS, Link.parse("unshaped"), False)}
    assert list(free.values()) == pytest.approx([50] * 5)


def test_a_shared_interface_carries_the_sum_of_what_its_hosts_send() -> None:
    row = next(r for r in summarise(BLOCKS, Link.parse("100mbit"), shared=True) if r.name == "ddp")
    assert row.interface_bytes == pytest.approx(1e6)
    assert row.floor_ms == pytest.approx(160)


def test_without_a_base_line_there_is_no_summary() -> None:
    with pytest.raises(ValueError, match="'none'"):
        summarise([b for b in BLOCKS if b["contestant"] != "none"], Link.parse("1gbit"), False)


def test_a_commit_is_dirty_when_what_runs_differs_not_when_records_do(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, timeout=30)

    assert record.commit(tmp_path) == {"id": None, "dirty": False}
    git("init", "--quiet")
    places = [tmp_path / "benchmarks" / "results" / "kept.md", tmp_path / "src" / "code.py"]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    places[0].with_name("new.md").write_text("2")
    clean = record.commit(places[0].parent)
    assert len(clean["id"]) == 40 and not clean["dirty"]
    places[1].with_name("new.py").write_text("2")
    assert record.commit(places[0].parent) == {**clean, "dirty": True}


def _config() -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.step_time",
        "started": "2026-01-01T00:00:00+00:00",
        "commit": {"id": "abc", "dirty": False},
        "machine": record.machine(),
        "model": "gpt3m",
        "parameters": WORKLOADS["gpt3m"].numel,
        "hosts": 2,
        "contestants": list(dict.fromkeys(block["contestant"] for block in BLOCKS)),
        "steps": 30,
        "rounds": 6,
        "pin": False,
        "busy_before": {"100mbit": 0.01},
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commit": {"id": "abc", "dirty": True}}, "not a commit"),
        ({"commit": {"id": None, "dirty": False}}, "not a commit"),
        ({"steps": 29}, "29 steps"),
        ({"rounds": 2}, "2 rounds"),
        ({"busy_before": {"1gbit": 0.5}}, "50% busy with something else before 1gbit"),
    ],
)
def test_a_run_that_breaks_a_rule_is_no_record(change: dict[str, Any], reason: str) -> None:
    assert record.objections(_config()) == []
    assert len(found := record.objections({**_config(), **change})) == 1 and reason in found[0]


def test_a_folder_holds_everything_and_its_table_can_be_derived_again(tmp_path: Path) -> None:
    folder = record.folder_for(tmp_path, "trial", datetime.date(2026, 1, 2))
    described = {
        "shared": False,
        "form": "x",
        "note": "y",
        "shaping": "z",
        "congestion_control": "reno",
    }
    raw = {"100mbit": {"network": described, "blocks": BLOCKS}}
    text = record.write(folder, _config(), raw)
    assert folder.name == "2026-01-02-trial"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "raw.json", "table.md", "100mbit.png"
    }  # fmt: skip
    assert json.loads((folder / "raw.json").read_text()) == raw
    assert table(summarise(BLOCKS, Link.parse("100mbit"), False)) in text
    assert (
        "| epfml-r4 | 80.0 | 80.0-80.0 | 0.400 | 0.842 | 30.0 | 1.000 | 0.934 | ? | 80.0 |" in text
    )
    (folder / "table.md").unlink()
    assert record.derive(folder) == text == (folder / "table.md").read_text()
    with pytest.raises(ValueError, match="not overwritten"):
        record.folder_for(tmp_path, "trial", datetime.date(2026, 1, 2))


def _step(rank: int, world_size: int, name: str) -> dict[str, Any]:
    workload = WORKLOADS["tiny"]
    weights = workload.build(0)
    entrant = enter(Contestant.parse(name), workload, weights, None)
    # Each rank sees text of its own, so that an average differs from what a rank had.
    entrant.module.register_forward_pre_hook(lambda _, given: (given[0] + 1000 * rank,))
    entrant.settle()
    block = run_block(entrant, steps=2, interface="lo")
    flat = torch.cat([grad.flatten() for grad in entrant.averages()])
    shared = all(
        mine.data_ptr() == theirs.data_ptr()
        for mine, theirs in zip(entrant.module.parameters(), weights.parameters(), strict=True)
    )
    entrant.close()
    return {"block": block, "average": flat, "shared": shared}


@pytest.fixture(scope="module")
def local(ranks: Callable[[int], Ranks]) -> list[torch.Tensor]:
    """The gradients that the two ranks would have averaged."""
    return [answer["average"] for answer in ranks(2)(_step, "none")]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ddp", 1e-6),
        ("ddp@0.01", 1e-6),
        ("fp16", 1e-3),
        ("bf16", 1e-2),
        ("powersgd-r4", 1.0),
        *((f"edgc-r4-{wire}", 1.0) for wire in DTYPES),
        ("edgc-r4-bf16@0.01", 1.0),
    ],
)
def test_contestants_average_and_claim_no_more_than_dense(
    ranks: Callable[[int], Ranks], local: list[torch.Tensor], name: str, error: float
) -> None:
    answers = ranks(2)(_step, name)
    mean = (local[0] + local[1]) / 2
    for answer in answers:
        assert (answer["average"] - mean).norm() < error * mean.norm()
        assert torch.equal(answer["average"], answers[0]["average"])
        assert answer["shared"] and len(answer["block"]["seconds"]) == 3
        dense = 4.0 * WORKLOADS["tiny"].numel
        claimed = answer["block"]["claimed_bytes"]
        assert (claimed == dense) if name.startswith("ddp") else (0 < claimed < dense)
        # Loopback is shared with whatever else runs here: it carried at least what both ranks sent.
        assert answer["block"]["interface_bytes"] > 1.9 * claimed


def test_auto_is_measured_once_it_has_decided(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(_step, "auto")
    assert torch.equal(first["average"], second["average"])
    # Dense or not, a plan's agreement is all that comes on top.
    assert 0 < first["block"]["claimed_bytes"] < 4.1 * WORKLOADS["tiny"].numel


def test_no_communication_averages_nothing(local: list[torch.Tensor]) -> None:
    assert (local[0] - local[1]).norm() > 0.1 * local[0].norm()
    assert all(math.isfinite(gradient.norm().item()) for gradient in local)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.name))
def test_a_mutation_breaks_the_code_as_it_is_now(mutation: Mutation) -> None:
    """`python -m benchmarks.mutation` runs them; here only that each still finds its place and compiles."""
    text = (ROOT / "src" / "edgc_ddp" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert all((ROOT / "tests" / name).exists() for name in mutation.tests)
