"""The long part of the reliability tests: many random models, and one long run with faults injected.

    python -m benchmarks.soak [--examples 300] [--steps 10000] [--out outputs/soak]

Writes ``summary.json`` (what was tried, injected and survived) and exits 1 at the first violation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import ranks
import torch
from hypothesis import HealthCheck, given, seed, settings
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Mlp, fingerprint, seeded, wrap
from test_reliability_random import Case, cases, hold

from edgc_ddp import EDGCState
from edgc_ddp.controllers import EntropyController

POISON_EVERY, STALL_EVERY, SAVE_EVERY = 97, 211, 1000


def random_models(pool: Ranks, examples: int) -> dict[str, int]:
    """As many random cases; a violation raises with the case that shows it."""
    counts = {"models": 0, "saves": 0, "weights": 0}

    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @seed(1)
    @given(case=cases)
    def check(case: Case) -> None:
        hold(pool, case)
        counts["models"] += 1
        counts["weights"] += len(case.weights)
        counts["saves"] += case.save_at > 0

    check()
    return counts


def long_run(rank: int, world: int, steps: int) -> dict[str, Any]:
    """Trains on; bad gradients, stalls and restarts from checkpoints come in between."""
    counts = {"poisoned": 0, "stalled": 0, "restarted": 0, "skipped": 0}
    torch.manual_seed(3)
    model = Mlp(width=32, depth=6)
    controller = EntropyController(window=100, warmup=200, r_max=12, r_min=2, warmup_limit=400)
    state = EDGCState(controller=controller, model=model)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    delays = random.Random(rank)
    losses: list[float] = []
    largest = 0.0
    for step in range(steps):
        if step and step % SAVE_EVERY == 0:
            saved = state.state_dict()
            state.close()
            state = EDGCState(controller=controller, model=model)
            state.load_state_dict(saved)
            ddp = wrap(model, state, SMALL_BUCKETS_MB)
            counts["restarted"] += 1
        if step % STALL_EVERY == 0:
            time.sleep(delays.random() * 0.05)
            counts["stalled"] += 1
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=seeded(step, rank))
        loss = ddp(x).square().mean()
        poisoned = step % POISON_EVERY == POISON_EVERY - 1
        if poisoned:
            counts["poisoned"] += 1
            loss = loss * (math.inf if rank == step % world else 1.0)
        loss.backward()
        # As a loss scaler does: leave out the step when any gradient is not finite.
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):  # type: ignore[arg-type]
            assert not poisoned, f"step {step}: a bad gradient came through as a good one"
            optimizer.step()
            losses.append(float(loss.detach()))
        else:
            assert poisoned, f"step {step}: a good gradient came out bad"
            counts["skipped"] += 1
        if step % 500 == 499:
            slots = state.engine.memory.slots.values()
            sizes = [float(s.residual.norm()) for s in slots if s.residual is not None]
            largest = max([largest, *sizes])
    state.close()
    metrics = state.metrics()
    return {
        **counts,
        "steps": int(metrics["step"]),
        "decisions": len(state.history),
        "largest_residual": largest,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "wire_share": float(metrics["wire_bytes"]) / float(metrics["dense_bytes"]),
        "plan_digest": metrics["plan_digest"],
        "weights": hashlib.sha256(fingerprint(model)).hexdigest()[:16],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("outputs/soak"))
    options = parser.parse_args()
    began = time.monotonic()
    pool = Ranks(2)
    try:
        models = random_models(pool, options.examples)
        print("random models:", models, flush=True)
        ranks.SECONDS = 3600
        first, second = pool(long_run, options.steps, timeout=600)
    finally:
        pool.stop()
    assert first["weights"] == second["weights"], "the ranks' weights differ"
    assert first["plan_digest"] == second["plan_digest"], "the ranks' plans differ"
    summary = {"random": models, "long": first, "seconds": round(time.monotonic() - began)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
