"""What the configuration may contain: a misspelt key or a wrong type is refused with its full name.

The schemas are stored as ``schema/<group>/<name>`` and inherited by ``conf/<group>/*.yaml``. The field
``controller`` alone is open, so that a user's own YAML can name a class of the user's, from a module that
``trust`` lists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from edgc_ddp.train.controller_schema import CONTROLLERS


@dataclass
class HookConfig:
    """Whether the hook is registered, and the keyword arguments of EDGCState."""

    register: bool = True
    start_iter: int = 2
    wire_dtype: str = "fp32"
    dense_dtype: str = "fp32"
    residual_dtype: str = "fp32"
    error_feedback: bool = True
    min_compression_rate: float = 1.0
    seed: int = 0


@dataclass
class ModelConfig:
    """Sizes of the GPT: ``width`` is split over ``heads``; ``context`` is in bytes of text."""

    width: int = 192
    layers: int = 4
    heads: int = 6
    context: int = 128


@dataclass
class DataConfig:
    """``source`` is shakespeare or stdlib; ``cache`` None is the user's cache folder."""

    source: str = "shakespeare"
    cache: str | None = None


@dataclass
class OptimizerConfig:
    """AdamW."""

    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass
class ScheduleConfig:
    """Learning rate over the run: ``warmup`` is a share of the steps, ``floor`` of the peak rate."""

    kind: str = "cosine"
    warmup: float = 0.05
    floor: float = 0.1


@dataclass
class ParallelConfig:
    """A pipeline of ``pp`` stages, each on ``dp`` processes (null: ``nproc / pp``); ``pp`` 1 is none.

    A step's ``train.batch_size`` texts pass in ``microbatches`` parts, in the order of ``schedule``
    (1f1b or gpipe). ``ranks``: the first stage follows the controller, and the others its rank, aligned
    so that all finish together ("aligned") or as it is ("common"); or only the stages ``compressed`` do
    and the others are dense ("selective"); or each has a controller of its own ("own").
    """

    pp: int = 1
    dp: int | None = None
    schedule: str = "1f1b"
    microbatches: int = 4
    ranks: str = "aligned"
    compressed: list[int] = field(default_factory=lambda: [0])
    calibration_steps: int = 5


@dataclass
class EntropyConfig:
    """What the controllers edgc and edgc_code share. An experiment sets it here, so that any other
    controller can take their place in it. Durations: whole numbers are iterations, fractions are shares
    of the run. Bounds of null are measured on the live job."""

    window: int | float = 0.05
    warmup: int | float = 0.1
    warmup_limit: int | float | None = None
    r_max: int | None = None
    r_min: int | None = None
    step_limit: int = 4
    alpha: float = 0.1
    beta: float = 0.25
    scope: str = "stage"


@dataclass
class TrainConfig:
    """``batch_size`` is per rank and micro-batch; a period of 0 means only at the end, or never for
    checkpoints; ``clip`` 0 means no clipping. ``resume`` is a run's folder or a checkpoint, or "auto": this
    run's own newest checkpoint, and the start where there is none yet."""

    steps: int = 1000
    batch_size: int = 8
    accumulate: int = 1
    eval_every: int = 200
    eval_windows: int = 128
    checkpoint_every: int = 0
    resume: str | None = None
    bf16: bool = False
    clip: float = 1.0
    bucket_cap_mb: float = 25.0


@dataclass
class Config:
    """The whole configuration. Only ``controller`` is ever instantiated; the rest is plain data. It may
    name classes of edgc_ddp, and code of the modules in ``trust``, which the command line alone can set."""

    nproc: int = 2
    seed: int = 0
    controller: Any = MISSING
    trust: list[str] = field(default_factory=list)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    hook: HookConfig = field(default_factory=HookConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def edgc_rank(first: Any, other: Any) -> Any:
    """``first`` on rank 0 or outside torchrun, ``other`` on all other ranks.

    >>> edgc_rank("log", "nothing")
    'log'
    """
    return first if os.environ.get("RANK", "0") == "0" else other


def register() -> None:
    """Make schemas and the resolver known to Hydra. Idempotent."""
    OmegaConf.register_new_resolver("edgc_rank", edgc_rank, replace=True)
    store = ConfigStore.instance()
    store.store(name="edgc_config", node=Config)
    for group, schema in {
        "hook": HookConfig,
        "model": ModelConfig,
        "data": DataConfig,
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
        "parallel": ParallelConfig,
    }.items():
        store.store(group=f"schema/{group}", name="base", node=schema)
    for name, controller in CONTROLLERS.items():
        store.store(group="schema/controller", name=name, node=controller)
