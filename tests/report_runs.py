"""Run folders as ``python -m edgc_ddp.train`` leaves them, made without training anything."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = {
    "attention.qkv.weight": [576, 192],
    "attention.out.weight": [192, 192],
    "mlp.up.weight": [768, 192],
    "mlp.down.weight": [192, 768],
}


@dataclass
class Recipe:
    """What kind of run. Loss, entropy and residual follow smooth curves; ranks fall by 4."""

    controller: str = "EntropyController"
    steps: int = 400
    window: int = 20
    warmup: int = 60
    calibration: tuple[int, ...] = ()
    r_max: int = 32
    r_min: int = 8
    layers: int = 1
    per_matrix: bool = False
    prefix: str = "blocks"
    summary: bool = True
    evals: int = 4
    loss_end: float = 1.5
    later: tuple[tuple[str, int], ...] | None = None
    """Phase and rank of what stage 1 of a pipeline decides from the warm-up's end on, window by window."""

    def shapes(self) -> dict[str, list[int]]:
        shapes = {"embedding.weight": [256, 192]}
        for layer in range(self.layers):
            shapes |= {f"{self.prefix}.{layer}.{name}": shape for name, shape in BLOCK.items()}
        return shapes

    def timetable(self) -> list[tuple[int, str, int]]:
        """(step, phase, rank) of every decision."""
        if self.controller == "Dense":
            return []
        if self.controller == "FixedRank":
            return [(2, "fixed", self.r_max)]
        plans = [(step, "warmup", 0) for step in range(2, self.warmup, self.window)]
        plans += [
            (self.warmup + 5 * place, "calibration", rank)
            for place, rank in enumerate(self.calibration)
        ]
        begin = self.warmup + 5 * len(self.calibration)
        for place, step in enumerate(range(begin, self.steps, self.window)):
            plans.append((step, "compress", max(self.r_min, self.r_max - 4 * place)))
        return plans

    def rows(self) -> list[dict[str, Any]]:
        noise = np.random.default_rng(0)
        shapes, plans, rows = self.shapes(), {p[0]: p for p in self.timetable()}, []
        numel = sum(math.prod(shape) for shape in shapes.values())
        phase, rank = ("start", 0) if self.controller != "Dense" else ("dense", 0)
        wire = dense = 0.0
        measured: dict[str, float | None] = dict.fromkeys(("entropy", "residual", "span_seconds"))
        for step in range(self.steps):
            decided = []
            if step in plans:
                at, phase, rank = plans[step]
                share = 0.25 + 0.4 * step / self.steps - 0.004 * rank if rank else 0.0
                measured = {
                    "entropy": -3.1 - 1.4 * (1 - math.exp(-3 * step / self.steps)),
                    "residual": share,
                    "span_seconds": 0.011 + 0.0004 * rank if rank else 0.031,
                }
                ranks = {
                    name: min(max(rank - (4 * (place % 3) if self.per_matrix else 0), 0), *shape)
                    for place, (name, shape) in enumerate(shapes.items())
                }
                told = f"entropy {measured['entropy']:.2f}: rank {rank} (step limit 4)"
                decided = [
                    {"kind": "decision", "step": at, "phase": phase, "reason": told, "ranks": ranks}
                    | measured
                ]
            dense += 4 * numel
            wire += 4 * sum(rank * sum(s) for s in shapes.values()) if rank else 4 * numel
            loss = self.loss_end + (5.5 - self.loss_end) * math.exp(-6 * step / self.steps)
            rows.append(
                {
                    "kind": "step",
                    "step": step,
                    "loss": loss + 0.08 * noise.standard_normal(),
                    "lr": 1e-3,
                    "grad_norm": 1.0,
                    "seconds": 0.25,
                    "phase": phase,
                    "mean_rank": float(rank),
                    "wire_bytes": round(wire),
                    "dense_bytes": round(dense),
                    "plan_digest": "0123456789abcdef",
                }
                | measured
            )
            # A step is told of before what was decided at its head.
            rows += decided
            if self.evals and (step + 1) % (self.steps // self.evals) == 0:
                rows.append({"kind": "eval", "step": step, "val_loss": loss + 0.05})
        if self.summary:
            rows.append(
                {
                    "kind": "summary",
                    "controller": self.controller,
                    "steps": self.steps,
                    "val_loss": 1.5678,
                    "seconds": 252.0,
                    "wire_bytes": round(wire),
                    "dense_bytes": round(dense),
                    "mean_rank": 17.25,
                    "final_plan_digest": "feedc0de00000000",
                }
            )
        return rows

    def staged(self) -> list[dict[str, Any]]:
        """The rows of a pipeline of two stages, of which the second sent three times as much."""
        rows = self.rows()
        decisions = [
            {
                "kind": "decision",
                "stage": 1,
                "step": self.warmup + place * self.window + 1,
                "phase": phase,
                "reason": f"<stage 1 at {rank}>",
                "ranks": dict.fromkeys(self.shapes(), rank),
            }
            for place, (phase, rank) in enumerate(self.later or ())
        ]
        for row in rows:
            if row["kind"] == "step":
                row["stages"] = 2
            if row["kind"] == "decision":
                row["stage"] = 0
            if row["kind"] == "summary":
                row["stages"] = [
                    {
                        "stage": stage,
                        "rank": rank,
                        "phase": "compress" if rank else "dense",
                        "reason": f"<stage {stage} at {rank}>",
                        "mean_rank": 2.0 * rank,
                        "backward_seconds": 0.001,
                        "backward_end_seconds": 0.02,
                        "finish_seconds": 0.03,
                        "residual": 0.25 if rank else None,
                        "wire_bytes": row["wire_bytes"] * share // 4,
                        "dense_bytes": row["dense_bytes"] // 2,
                    }
                    for stage, (rank, share) in enumerate([(8, 1), (0, 3)])
                ]
        # Later stages are told of at the next exchange, so behind steps that come after theirs.
        return rows[:-1] + decisions + rows[-1:]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        rows = self.rows() if self.later is None else self.staged()
        lines = [json.dumps(row) for row in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "config.yaml").write_text(
            f"controller:\n  _target_: edgc_ddp.controllers.{self.controller}\n"
            f"  window: {self.window}\n  r_max: {self.r_max}\n  r_min: {self.r_min}\n"
            f"train:\n  steps: {self.steps}\n  batch_size: 8\nseed: 0\n"
        )
        (folder / "environment.json").write_text(
            json.dumps(
                {
                    "git": "abc1234",
                    "torch": "2.13.0",
                    "data": {"source": "shakespeare"},
                    "world_size": 2,
                    "parameters": self.shapes(),
                }
            )
        )
        return folder
