"""The doctor: advice from made-up links whose answer is known, and one real launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from edgc_ddp.doctor import __main__ as command
from edgc_ddp.doctor import experiment
from edgc_ddp.doctor.advise import Advice, Model, Setting, advise, settle
from edgc_ddp.doctor.compressor import Gradients, SilentLane, run_alone
from edgc_ddp.doctor.facts import Average, Cost, Facts, Step
from edgc_ddp.doctor.subject import find, known
from edgc_ddp.doctor.words import describe
from edgc_ddp.maths.comm_time import Link, RankTime, bucket_sizes, ring_seconds
from edgc_ddp.options import DTYPES
from edgc_ddp.reducers.bucket import Settings
from edgc_ddp.train.app import settings as typed
from edgc_ddp.train.schema import Config, register
from edgc_ddp.train.validate import check

RANKS = (4, 16, 64)
DENSE = 100e6
CAPS = (25.0, 4.0)
WORK = RankTime(0.010, 0.0005)
ENTRY = {"fp32": 4, "bf16": 2, "int8": 1}


def facts(bits_per_s: float, latency_s: float = 1e-4, forward: float = 0.05) -> Facts:
    """What would be measured on a link without noise: two ranks, backward twice as long as forward,
    nothing of the averaging hidden."""
    link = Link(latency_s, bits_per_s / 8)
    payload = {(w, r): DENSE * r / 512 * ENTRY[w] / 4 for w in DTYPES for r in RANKS}
    buckets = len(bucket_sizes(DENSE, 25.0))

    def average(rank: int, wire: str) -> float:
        if rank == 0:
            return buckets * ring_seconds(DENSE / buckets, 2, link)
        sums = 2 * buckets * ring_seconds(0.0, 2, link)
        return (
            sums
            + ring_seconds(payload[wire, rank], 2, Link(0, bits_per_s / 8))
            + WORK.seconds(rank)
        )

    def step(rank: int) -> Step:
        seconds = 3 * forward + average(rank, "fp32")
        return Step(rank, "fp32", 25.0, seconds, 0.9 * seconds, 1.1 * seconds)

    return Facts(
        model="tiny",
        named=True,
        batch=8,
        world_size=2,
        device="cpu",
        parameters=round(DENSE / 4),
        dense_bytes=DENSE,
        forward_s=forward,
        backward_s=2 * forward,
        all_reduces=tuple((size, ring_seconds(size, 2, link)) for size in (4e3, 4e5, 4e6)),
        wire="fp32",
        costs=tuple(Cost(r, w, payload[w, r], WORK.seconds(r)) for w in DTYPES for r in RANKS),
        averages=tuple(Average(rank, average(rank, "fp32")) for rank in (0, *RANKS)),
        steps=tuple(step(rank) for rank in (0, *RANKS)),
    )


def test_the_model_says_again_what_the_link_was_made_of() -> None:
    model = Model(facts(1e9))
    assert model.link.latency_s == pytest.approx(1e-4, rel=1e-6)
    assert 8 * model.link.bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert model.steps.overlap == pytest.approx(0, abs=1e-6)
    assert model.worst_error() < 1e-6
    latency, wire, work = model.parts(Setting(16))
    assert (latency, wire, work) == pytest.approx(
        (20e-4, 8 * DENSE * 16 / 512 / 1e9, WORK.seconds(16)), rel=1e-6
    )


def test_a_model_that_is_far_off_is_not_to_be_trusted() -> None:
    told = facts(1e8)
    assert "too far off" not in describe(told, advise(told, CAPS))
    plain, slow, *others = told.steps
    noisy = replace(told, steps=(plain, replace(slow, seconds=3 * slow.seconds), *others))
    assert Model(noisy).worst_error() > 0.15
    assert "too far off to be trusted" in describe(noisy, advise(noisy, CAPS))


def test_on_a_slow_link_it_says_which_rank_and_wire() -> None:
    """At 100 Mbit/s dense takes 8 s; rank 64 in int8 takes 0.25 s and 0.04 s of work."""
    advice = advise(facts(1e8), CAPS)
    assert advice.setting == Setting(64, "int8", 25.0)
    assert advice.plain_s == pytest.approx(8.15, rel=0.01)
    assert advice.step_s == pytest.approx(0.15 + 0.25 + 0.042 + 20e-4, rel=0.01)
    assert advice.speed_up == pytest.approx(advice.plain_s / advice.step_s)
    assert advice.break_even == 64
    # So slow that rank 64 would give away more than a tenth of the saving.
    slower = advise(
        replace(facts(1e8), costs=tuple(c for c in facts(1e8).costs if c.wire == "fp32")), CAPS
    )
    assert slower.setting is not None and slower.setting.rank < 64


def test_more_buckets_are_advised_where_they_hide_and_cost_nothing() -> None:
    seen = facts(1e9, latency_s=0.0)
    model = Model(seen)

    def all_hidden(step: Step) -> Step:
        parts = model.buckets(Setting(step.rank, step.wire, step.cap_mb))
        # What an ideal overlap leaves: the last bucket, and all that is longer than backward.
        ready = end = 0.0
        for size, seconds in parts:
            ready += seen.backward_s * size / seen.dense_bytes
            end = max(end, ready) + seconds
        return replace(step, seconds=seen.forward_s + end)

    hidden = replace(seen, steps=tuple(map(all_hidden, seen.steps)))
    assert Model(hidden).steps.overlap == pytest.approx(1.0)
    advice = advise(hidden, CAPS)
    assert advice.setting is not None and advice.setting.cap_mb == 4.0


def test_on_a_fast_link_it_says_plain_ddp() -> None:
    """At 100 Gbit/s dense takes 8 ms and the least work of a rank 12 ms."""
    advice = advise(facts(1e11), CAPS)
    assert advice.setting is None and advice.break_even == 0
    assert advice.step_s > advice.plain_s
    assert "worth it from 3% on" in advice.reason
    assert "plain DDP is better here" in describe(facts(1e11), advice)


def test_a_saving_within_the_noise_is_none() -> None:
    """Work of 12 ms against 16 ms of dense is a saving of 4 ms in 316, about a hundredth."""
    advice = advise(facts(5e10, forward=0.1), CAPS)
    assert advice.step_s < advice.plain_s and advice.setting is None


def test_a_rank_that_broke_its_promise_is_followed_by_lower_ones() -> None:
    seen = facts(1e8)
    found = [advise(seen, CAPS, below).setting for below in (64, 16, 4)]
    assert [setting and setting.rank for setting in found] == [16, 4, None]


def test_what_was_measured_side_by_side_has_the_last_word() -> None:
    advice = advise(facts(1e8), CAPS)
    good = settle(advice, plain_s=8.0, step_s=1.0)
    assert good.setting == advice.setting and good.speed_up == 8.0
    bad = settle(advice, plain_s=8.0, step_s=7.9)
    assert bad.setting is None and "the model expected" in bad.reason
    assert Advice.of(json.loads(json.dumps(asdict(good)))) == good


def test_facts_travel_through_a_file_and_another_file_is_refused(tmp_path: Path) -> None:
    seen = facts(1e9)
    seen.save(tmp_path / "new" / "facts.json")
    assert Facts.load(tmp_path / "new" / "facts.json") == seen
    (tmp_path / "other.json").write_text('{"model": "tiny"}')
    with pytest.raises(ValueError, match="other.json does not hold measurements"):
        Facts.load(tmp_path / "other.json")


def test_the_report_shows_every_rank_and_the_advice() -> None:
    seen = facts(1e8)
    text = describe(seen, advise(seen, CAPS))
    assert "bandwidth 0.1 Gbit/s" in text and "latency 100 us" in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith(" ms")][:1] == ["dense"]
    assert "rank up to 64, wire_dtype=int8" in text and "times as fast" in text
    assert "Every rank measured, up to 64, averages faster than dense." in text
    advice = replace(advise(seen, CAPS), break_even=20)
    slow = tuple(replace(a, seconds=99.0 if a.rank > 20 else a.seconds) for a in seen.averages)
    assert "at about rank 20." in describe(replace(seen, averages=slow), advice)


def composed(folder: Path, *overrides: str) -> Config:
    """The configuration that train would run with."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("edgc_ddp.conf", version_base="1.3"):
        path = f"hydra.searchpath=[file://{folder}]"
        config = typed(compose("config", [path, f"+experiment={experiment.NAME}", *overrides]))
    check(config, config.nproc)
    return config


def test_train_composes_what_is_written(tmp_path: Path) -> None:
    seen = facts(1e8)
    path = experiment.write(tmp_path, seen, advise(seen, CAPS))
    assert path == tmp_path / "experiment" / "doctor.yaml"
    config = composed(tmp_path)
    assert config.controller["_target_"].endswith("EntropyController")
    assert (config.controller["r_max"], config.controller["r_min"]) == (64, 16)
    assert config.hook.register and config.hook.wire_dtype == "int8"
    assert config.train.bucket_cap_mb == 25.0 and config.train.batch_size == 8
    assert config.model.width == 64 and config.nproc == 2
    assert composed(tmp_path, "nproc=4", "train.steps=7").nproc == 4


def test_the_next_step_is_for_the_model_that_was_measured(tmp_path: Path) -> None:
    seen = facts(1e8)
    advice = advise(seen, CAPS)
    assert "\npython " + experiment.command(tmp_path) in experiment.next_step(
        tmp_path, seen, advice
    )
    # Started by nproc it would try the advice for a link on one machine.
    hosts = experiment.next_step(tmp_path, seen, advice, under_torchrun=True)
    assert "\ntorchrun ... " + experiment.command(tmp_path) in hosts and "python" not in hosts
    mine = replace(seen, model="mine:make", named=False)
    lines = experiment.next_step(tmp_path, mine, advice)
    assert "edgc_ddp.train" not in lines and "bucket_cap_mb=25)" in lines
    assert "EntropyController(r_max=64, r_min=16)" in lines and 'wire_dtype="int8"' in lines
    quick = replace(facts(1e11), model="mine:make", named=False)
    assert "without a hook" in experiment.next_step(tmp_path, quick, advise(quick, CAPS))


def test_advice_is_told_though_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = facts(1e8)
    (tmp_path / "doctor").write_text("a file, where a folder is wanted")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "launch", lambda *_: (seen, advise(seen, CAPS)))
    monkeypatch.setattr(command, "told", lambda answer: answer)
    assert command.main([]) == 1
    out, err = capsys.readouterr()
    assert "rank up to 64, wire_dtype=int8" in out and "give another place" in err


def test_train_runs_plain_ddp_when_told_to(tmp_path: Path) -> None:
    seen = replace(facts(1e11), model="mine:make", named=False)
    experiment.write(tmp_path, seen, advise(seen, CAPS))
    config = composed(tmp_path)
    assert not config.hook.register and config.controller["_target_"].endswith("Dense")
    # The model of another program is not train's business.
    assert config.train.batch_size == Config().train.batch_size


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_silent_lane_counts_the_bytes_of_the_wire(wire: str, world_size: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    lane = SilentLane(world_size, torch.device("cpu"))
    gradients = Gradients(model, 4, Settings(DTYPES[wire]), 25.0, torch.device("cpu"))
    run_alone(gradients.tasks(lane))
    factors = 2 * 4 * (64 + 64)
    # Biases and scales come on top, and a flag for each matrix.
    least = lane.traffic(factors * ENTRY[wire])
    assert least < lane.sent_bytes < least + lane.traffic(4 * (128 + 64))
    for bucket in gradients.buckets:
        assert torch.isfinite(bucket.buffer).all()


def test_models_are_found_by_name_and_by_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known() == ["gpt", "small", "tiny"]
    for name in ("tiny", "doctor_model:make"):
        model, loss = find(name)(torch.device("cpu"), 2)
        assert loss(model, 0).shape == ()
    for name, problem in (
        ("huge", "expected one of gpt, small, tiny"),
        ("nowhere:make", "No module named 'nowhere'"),
        ("doctor_model:absent", "no attribute 'absent'"),
        ("doctor_model:NOT_A_FUNCTION", "not a function"),
    ):
        with pytest.raises(ValueError, match=problem):
            find(name)


@pytest.mark.parametrize(
    "bad",
    [["--nproc", "1"], ["--ranks", "4,x"], ["--caps", "0"], ["--steps", "0"], ["--model", "no"]],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    bad: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(bad) == 2
    said = capsys.readouterr().err
    assert bad[0] in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize("model", ["tiny", "doctor_model:make"])
def test_a_real_launch_measures_advises_and_writes_what_train_composes(
    tmp_path: Path, model: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    options = ["--model", model, "--batch", "2", "--steps", "2", "--block", "2", "--ranks", "4,8"]
    done = subprocess.run(
        [sys.executable, "-m", "edgc_ddp.doctor", *options, "--json", "facts.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "advice" in done.stdout and "T(r)" in done.stdout
    seen = Facts.load(tmp_path / "facts.json")
    assert seen.world_size == 2 and {step.rank for step in seen.steps} == {0, 4, 8}
    assert all(step.seconds > seen.forward_s > 0 for step in seen.steps)
    config = composed(tmp_path / "doctor")
    assert config.nproc == 2 and config.hook.register == ("rank up to" in done.stdout)
