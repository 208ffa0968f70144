"""The advice as an experiment that ``python -m edgc_ddp.train`` accepts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from edgc_ddp.controllers.bounds import default_r_min
from edgc_ddp.doctor.advise import Advice
from edgc_ddp.doctor.facts import Facts

NAME = "doctor"


def write(folder: Path, facts: Facts, advice: Advice) -> Path:
    """Write ``<folder>/experiment/doctor.yaml``; returns its path."""
    path = folder / "experiment" / f"{NAME}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(facts, advice))
    return path


def command(folder: Path) -> str:
    """What trains with it on this machine; under torchrun, what follows its options there."""
    return f"-m edgc_ddp.train --config-dir {shlex.quote(str(folder))} +experiment={NAME}"


def next_step(folder: Path, facts: Facts, advice: Advice, under_torchrun: bool = False) -> str:
    """What to do with the advice: a command for a model that train has, else lines for one's own script."""
    if facts.named and under_torchrun:
        return (
            "train with it, on the same hosts and with the same options of torchrun, the file on each:\n"
            f"torchrun ... {command(folder)}"
        )
    if facts.named:
        return f"train with it:\npython {command(folder)}"
    setting = advice.setting
    if setting is None:
        return "in your script: DistributedDataParallel without a hook"
    controller = f"EntropyController(r_max={setting.rank}, r_min={default_r_min(setting.rank)})"
    return f"""in your script, which has the model:
    ddp = DistributedDataParallel(model, bucket_cap_mb={setting.cap_mb:g})
    state = EDGCState({controller}, model=ddp.module, wire_dtype="{setting.wire}")
    ddp.register_comm_hook(state, edgc_hook)"""


def text(facts: Facts, advice: Advice) -> str:
    """The YAML: the advised setting, and model and batch where train has them."""
    setting = advice.setting
    defaults: list[Any] = [{"override /controller": "dense" if setting is None else "edgc"}]
    body: dict[str, Any] = {"nproc": facts.world_size}
    if facts.named:
        defaults.append({"override /model": facts.model})
        body["train"] = {"batch_size": facts.batch}
    if setting is None:
        body["hook"] = {"register": False}
    else:
        body["hook"] = {"register": True, "wire_dtype": setting.wire}
        body["train"] = {**body.get("train", {}), "bucket_cap_mb": setting.cap_mb}
        body["entropy"] = {"r_max": setting.rank, "r_min": default_r_min(setting.rank)}
    head = [
        "# @package _global_",
        f"# Written by python -m edgc_ddp.doctor for {facts.model} on {facts.world_size} ranks "
        f"({facts.device}):",
        f"# {advice.reason}.",
    ]
    return (
        "\n".join(head)
        + "\n"
        + OmegaConf.to_yaml(OmegaConf.create({"defaults": [*defaults, "_self_"], **body}))
    )
