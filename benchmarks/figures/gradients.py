"""The gradients that the figures look at: those of a tiny GPT as it learns real text, one process.

The run is short and its series are kept in a file, so that several figures share one run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edgc_ddp.maths import entropy
from edgc_ddp.maths.entropy import ESTIMATORS
from edgc_ddp.train.checkpoint import write_atomically
from edgc_ddp.train.data import Corpus, batch, cache_folder, load, prepare
from edgc_ddp.train.model import build
from edgc_ddp.train.schema import DataConfig, ModelConfig

BETAS = (1.0, 0.5, 0.25, 0.05)
"""Shares of entries that Table 4 and Figure 9 compare."""


@dataclass(frozen=True)
class Run:
    """What determines the gradients. AdamW at ``lr``, constant after ``warmup`` iterations."""

    width: int = 64
    layers: int = 2
    heads: int = 2
    context: int = 64
    batch: int = 16
    steps: int = 600
    warmup: int = 30
    lr: float = 1e-3
    seed: int = 0
    snapshots: tuple[int, ...] = (10, 100, 300, 599)
    """Iterations whose whole gradients are kept."""

    def name(self, text: Corpus) -> str:
        """The file of its series: another text or another estimator gives others."""
        told = json.dumps(asdict(self), sort_keys=True) + text.sha256 + inspect.getsource(entropy)
        return f"gradients-{hashlib.sha256(told.encode()).hexdigest()[:12]}.pt"


def series(run: Run) -> dict[str, Any]:
    """``loss`` (S), per beta ``entropy`` (S, matrices; estimator gaussian, each iteration), and
    ``snapshots``: iteration -> name -> gradient. Read from the cache when there."""
    config = DataConfig()
    prepare(config)
    text = load(config)
    path = cache_folder(config) / run.name(text)
    if path.exists():
        kept: dict[str, Any] = torch.load(path, weights_only=True)
        return kept
    print(f"training {run.steps} iterations once; kept in {path}", flush=True)
    kept = _record(run, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: torch.save(kept, temporary))
    return kept


def _record(run: Run, text: Corpus) -> dict[str, Any]:
    estimate = ESTIMATORS["gaussian"]
    losses: list[float] = []
    entropies: dict[float, list[list[float]]] = {beta: [] for beta in BETAS}
    snapshots: dict[int, dict[str, Tensor]] = {}
    names: list[str] = []
    for step, loss, gradients in _train(run, text):
        names = list(gradients)
        losses.append(loss)
        for beta in BETAS:
            entropies[beta].append([float(estimate(g, beta, step)) for g in gradients.values()])
        if step in run.snapshots:
            snapshots[step] = {name: g.clone() for name, g in gradients.items()}
    return {
        "source": text.source,
        "names": names,
        "loss": torch.tensor(losses),
        "entropy": {str(beta): torch.tensor(rows) for beta, rows in entropies.items()},
        "snapshots": snapshots,
    }


def _train(run: Run, text: Corpus) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Each iteration's loss and the gradients of its matrices, before clipping."""
    sizes = ModelConfig(run.width, run.layers, run.heads, run.context)
    model = build(sizes, run.seed, torch.device("cpu"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * min(1.0, (step + 1) / run.warmup)
        inputs_BT, targets_BT = batch(
            text.train, run.batch, run.context, seed=run.seed, rank=0, step=step
        )
        logits_BTV = model(inputs_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.dim() == 2 and parameter.grad is not None
        }
        yield step, loss.item(), gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def mean_entropy(kept: dict[str, Any], beta: float) -> Tensor:
    """The model's entropy in each iteration (S): matrices weigh as many entries as they have."""
    snapshot = next(iter(kept["snapshots"].values()))
    weights = torch.tensor([float(snapshot[name].numel()) for name in kept["names"]])
    rows: Tensor = kept["entropy"][str(beta)] @ (weights / weights.sum())
    return rows


def noise_like(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Independent normal entries in the same shapes, the same each time: what the figures hold against."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(grad.shape, generator=generator) for name, grad in gradients.items()}
