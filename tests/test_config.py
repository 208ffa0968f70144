"""Every configuration composes and can be built; what cannot work is refused before a process starts."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import edgc_ddp.conf
from edgc_ddp.train import app, validate
from edgc_ddp.train.schema import edgc_rank, register

CONF = Path(next(iter(edgc_ddp.conf.__path__)))
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra"
)


@pytest.fixture
def hydra() -> Iterator[None]:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("edgc_ddp.conf", version_base="1.3"):
        yield


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> int:
    """The application in this process, as far as it comes without starting a rank."""

    def must_not_start(job: object) -> None:
        raise AssertionError("a rank would have been started")

    monkeypatch.setattr(app, "_launch", must_not_start)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["edgc_ddp.train", *overrides])
    GlobalHydra.instance().clear()
    try:
        app.main()
    except SystemExit as status:
        return int(status.code or 0)
    return 0


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_can_be_built(hydra: None, group: str, option: str) -> None:
    prefix = "+" if group == "experiment" else ""
    config = app.settings(compose("config", [f"{prefix}{group}={option}"]))
    validate.check(config, world_size=2)


def test_the_groups_are_all_there() -> None:
    expected = {"controller", "schedule", "hook", "model", "data", "optimizer", "experiment"}
    expected |= {"parallel"}
    assert {group for group, _ in OPTIONS} >= expected


@pytest.mark.parametrize("name", ["smoke", "default", "paper"])
def test_experiments_state_their_bounds(hydra: None, name: str) -> None:
    controller = app.settings(compose("config", [f"+experiment={name}"])).controller
    assert 0 < controller["r_min"] == controller["r_max"] // 4


def test_durations_may_be_iterations_or_shares(hydra: None) -> None:
    config = app.settings(compose("config", ["controller.window=7", "controller.warmup=0.25"]))
    assert (config.controller["window"], config.controller["warmup"]) == (7, 0.25)
    assert config.controller["total_steps"] == config.train.steps


def test_a_foreign_controller_comes_from_a_users_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, colour): self.colour = colour\n"
        "    def init(self, layout): return {}\n"
        "    def decide(self, state, observation, step): raise NotImplementedError\n"
    )
    yaml = "_target_: mine.Mine\ncolour: ${seed}\n"
    (tmp_path / "controller" / "mine.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[app.Job] = []
    monkeypatch.setattr(app, "_launch", started.append)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config-dir", str(tmp_path), "controller=mine", "trust=[mine]", "seed=3"]
    monkeypatch.setattr(sys, "argv", ["edgc_ddp.train", *arguments])
    app.main()
    assert started[0].config.controller == {"_target_": "mine.Mine", "colour": 3}
    assert started[0].controller_name == "mine"


def test_a_file_cannot_say_whom_to_trust(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "sly.yaml").write_text(
        "# @package _global_\ntrust: [os]\ncontroller: {_target_: os.getcwd}\n"
    )
    arguments = ["--config-dir", str(tmp_path), "controller=dense", "+experiment=sly"]
    assert run_main(monkeypatch, tmp_path, *arguments) == 2
    assert "trust=['os']: comes from a file" in capfd.readouterr().err
    assert run_main(monkeypatch, tmp_path, *arguments, "trust=[]") == 2
    assert "os.getcwd is no class of edgc_ddp" in capfd.readouterr().err


BAD = [
    (["controller.window=0"], "window=0"),
    (["controller=fixed", "controller.rank=0"], "rank=0"),
    (["controller.r_max=8", "controller.r_min=9"], "r_min=9"),
    (["controller.alpha=0"], "alpha=0"),
    (["controller.alpha=1.5"], "alpha=1.5"),
    (["controller.estimator=entropic"], "estimator='entropic'"),
    (["controller.policy=guess"], "policy='guess'"),
    (["controller._target_=no.such.Thing"], "no.such.Thing is no class of edgc_ddp"),
    (
        ["controller._target_=no.such.Thing", "trust=[no.such]"],
        "no.such.Thing does not exist or cannot be imported",
    ),
    (["controller._target_=edgc_ddp.controllers.Nothing"], "edgc_ddp.controllers.Nothing"),
    (["controller._target_=builtins.dict"], "'trust=[builtins]'"),
    (["controller._target_=builtins.dict", "trust=[builtins]"], "gives dict, which has no init"),
    (["controller._target_=edgc_ddp.train.app.os.getcwd"], "os.getcwd is no class of edgc_ddp"),
    (["controller._target_=edgc_ddp.train.app.main"], "app.main is no class of edgc_ddp"),
    (["controller._target_=edgc_ddpx.Mine"], "'trust=[edgc_ddpx]'"),
    (["controller.estimator={_target_:os.getcwd}"], "os.getcwd is no class"),
    (
        ["controller.estimator={_target_:hydra.utils.get_method,path:os.getcwd}"],
        "os.getcwd is no class",
    ),
    (
        ["controller.estimator={_target_:hydra.utils.get_method,path:mine.f}", "trust=[yours]"],
        "[mine]",
    ),
    (["controller.estimator={_target_:mine os.f}", "trust=[mine os]"], "'mine os.f' is no name"),
    (["controller._target_=edgc_ddp.train:app.main"], "is no class of edgc_ddp"),
    (["controller=nonsense"], "controller/nonsense"),
    (["hook.wire_dtype=fp7"], "hook.wire_dtype='fp7'"),
    (["hook.start_iter=1"], "hook.start_iter=1"),
    (["+hook._target_=os.getcwd"], "hook._target_"),
    (["nproc=0"], "nproc=0"),
    (["nproc=many"], "nproc"),
    (["seed=-1"], "seed=-1"),
    (["seed=9223372036854775808"], "seed=9223372036854775808"),
    (
        ["controller=selective", "controller.compress=['block.*']"],
        "controller.compress='block.*': expected a pattern that matches a matrix",
    ),
    (["train.steps=0"], "train.steps=0"),
    (["train.batch_size=0"], "train.batch_size=0"),
    (["train.accumulate=0"], "train.accumulate=0"),
    (["train.eval_windows=1"], "train.eval_windows=1"),
    (["train.clip=nan"], "train.clip=nan"),
    (["train.bucket_cap_mb=0"], "train.bucket_cap_mb=0"),
    (["train.resume=no/such/run"], "train.resume=no/such/run"),
    (["train.stepss=3"], "train.stepss"),
    (["+train.stepss=3"], "train.stepss"),
    (["+extra=3"], "extra"),
    (["model.heads=5"], "model.heads=5"),
    (["model.layers=0"], "model.layers=0"),
    (["optimizer.lr=0"], "optimizer.lr=0"),
    (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]"),
    (["schedule.kind=zigzag"], "schedule.kind=zigzag"),
    (["schedule.warmup=2"], "schedule.warmup=2"),
    (["data.source=novels"], "data.source=novels"),
    (["parallel.pp=0"], "parallel.pp=0"),
    (["parallel.pp=2", "nproc=3"], "nproc=3: parallel.pp=2 times parallel.dp=1 is 2"),
    (["parallel.pp=2", "parallel.dp=2"], "nproc=2: parallel.pp=2 times parallel.dp=2 is 4"),
    (["parallel.dp=1"], "nproc=2: parallel.pp=1 times parallel.dp=1 is 1"),
    (["parallel.pp=8", "nproc=8"], "parallel.pp=8: model.layers=4"),
    (["parallel=pipeline", "parallel.microbatches=3"], "parallel.microbatches=3"),
    (["parallel=pipeline", "parallel.microbatches=1"], "parallel.schedule=gpipe"),
    (["parallel=pipeline", "parallel.schedule=zigzag"], "parallel.schedule=zigzag"),
    (["parallel=pipeline", "parallel.ranks=best"], "parallel.ranks=best"),
    (["parallel=pipeline", "parallel.compressed=[2]"], "parallel.compressed=[2]"),
    (["parallel=pipeline", "parallel.calibration_steps=0"], "parallel.calibration_steps=0"),
    (["parallel=pipeline", "train.accumulate=2"], "train.accumulate=2"),
]


@pytest.mark.parametrize(("overrides", "named"), BAD, ids=[" ".join(entry[0]) for entry in BAD])
def test_bad_input_is_refused_in_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    named: str,
) -> None:
    assert run_main(monkeypatch, tmp_path, *overrides) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("edgc_ddp.train: ") and err.count("\n") == 1, err
    assert named in err


def test_pipelines_of_an_old_torch_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    assert run_main(monkeypatch, tmp_path, "parallel=pipeline") == 2
    assert "parallel.pp=2: torch 2.6.0+cu124 has no pipelines that run" in capfd.readouterr().err


def test_help_shows_groups_and_values(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, tmp_path, "--help") == 0
    text = capfd.readouterr().out
    assert re.search(r"controller: .*dense, .*edgc, edgc_code, fixed", text)
    assert "experiment: default, paper, smoke" in text
    assert "batch_size: 8" in text
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    as_rank(monkeypatch, 0)
    assert run_main(monkeypatch, tmp_path, "-m", "seed=1,2") == 2
    assert "--multirun under torchrun" in capfd.readouterr().err


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The environment that torchrun gives."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in (given | {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_of_no_torchrun_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Some clusters set it for jobs that start everything themselves."""
    monkeypatch.setenv("RANK", "0")
    assert run_main(monkeypatch, tmp_path) == 2
    said = capfd.readouterr().err
    assert "RANK=0 is set, but WORLD_SIZE, LOCAL_RANK" in said and said.count("\n") == 1


def test_other_ranks_do_not_mind_where_they_are_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a run's own folder, say: theirs is none."""
    step = tmp_path / "checkpoints" / "step-00000005"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    as_rank(monkeypatch, 1)
    monkeypatch.setattr(app, "work", lambda job: None)
    assert run_main(monkeypatch, tmp_path) == 0


def test_only_rank_zero_owns_a_folder_and_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    as_rank(monkeypatch, 1)
    assert edgc_rank("first", "other") == "other"
    assert run_main(monkeypatch, tmp_path, "train.steps=0") == 2
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert run_main(monkeypatch, tmp_path, "train.steps=0") == 2
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1


class Payload:
    """Code that a file may hold: it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


LATE = "${oc.env:NO_SUCH_NAME,"


@pytest.mark.parametrize(
    "rank",
    [
        {"_target_": "edgc_ddp." + LATE + "train.worker.torch.load}", "f": "EVIL"},
        {"_target_": LATE + "torch.load}", "f": "EVIL"},
        '${oc.create:{_target_:torch.load,f:"EVIL",weights_only:false}}',
        [{"a": ('${oc.create:{_target_:torch.load,f:"EVIL",weights_only:false}}',)}],
        {LATE + "_target_}": "torch.load", "f": "EVIL"},
        {"_target_": "mine.torch.load", "f": "EVIL"},
        {"_target_": "hydra.utils.get_method", "path": "mine.torch.load"},
    ],
)
def test_a_strangers_file_cannot_run_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: Any
) -> None:
    """What would be filled in after the look, and what a trusted module has of others."""
    mark, evil = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save(Payload(mark), evil)
    (tmp_path / "mine.py").write_text("import torch\nclass Mine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr("edgc_ddp.train.trust._is_given", lambda key: True)
    given = ast.literal_eval(repr(rank).replace("EVIL", str(evil)))
    options = {"_target_": "edgc_ddp.controllers.FixedRank", "rank": given}
    with pytest.raises(ValueError, match=r"filled in after|was written in torch.serialization"):
        validate.make_controller(options, ["mine"])
    assert not mark.exists()
    # The file does what it says where it is let.
    torch.load(evil, weights_only=False)
    assert mark.is_dir()


def test_an_escaped_interpolation_in_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "sly.yaml").write_text(
        "_target_: edgc_ddp.controllers.FixedRank\n"
        "rank: {_target_: 'edgc_ddp.\\\\\\${oc.env:NO_SUCH_NAME,train.worker.os.mkdir}', path: made}\n"
    )
    assert run_main(monkeypatch, tmp_path, "--config-dir", str(tmp_path), "controller=sly") == 2
    assert "filled in after it was checked" in capfd.readouterr().err
    assert not list(tmp_path.rglob("made"))


def test_a_start_in_a_folder_with_checkpoints_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-00000005"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    assert run_main(monkeypatch, tmp_path, "hydra.run.dir=run") == 2
    said = capfd.readouterr().err
    assert "step-00000005" in said and "train.resume=auto" in said and said.count("\n") == 1
    monkeypatch.setattr(app.checkpoint, "check_unused", lambda run: None)
    with pytest.raises(AssertionError, match="a rank would have been started"):
        run_main(monkeypatch, tmp_path, "hydra.run.dir=run")
