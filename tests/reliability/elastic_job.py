"""A training script as a user would write it for ``torchrun --max-restarts``: it goes on from the last
checkpoint there is. Its own process number stands in a file, so that a test can kill it."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from scenes import SMALL_BUCKETS_MB, Mlp, fingerprint, seeded, train_step, wrap

from edgc_ddp import EDGCState
from edgc_ddp.controllers import EntropyController
from edgc_ddp.train import checkpoint

STEPS, EVERY = 60, 5


def main(folder: Path, pause: float) -> None:
    torch.set_num_threads(1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # torchrun --standalone keeps one store over all attempts, in which Gloo would find the addresses of
    # processes that are gone: without a prefix restarts fail or hang, hook or no hook (torch 2.13).
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Named by the attempt, so that the test never kills a process it has killed.
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(3)
    model = Mlp(width=32, depth=6)
    controller = EntropyController(window=10, warmup=8, r_max=12, r_min=2, warmup_limit=10)
    state = EDGCState(controller=controller, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if found := checkpoint.complete(folder / "checkpoints"):
        training = checkpoint.read(found[-1] / "model.pt")
        model.load_state_dict(training["model"])
        optimizer.load_state_dict(training["optimizer"])
        state.load_state_dict(checkpoint.read(found[-1] / checkpoint.hook_file(rank)))
        first = training["step"]
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    for step in range(first, STEPS):
        train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded(step, rank)))
        (folder / f"step-{rank}").write_text(str(step))
        time.sleep(pause)
        if (step + 1) % EVERY == 0:
            training = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            identity = {"world_size": dist.get_world_size()}
            checkpoint.save(
                folder / "checkpoints", step + 1, training, state.state_dict(), identity
            )
    end = hashlib.sha256(fingerprint(model)).hexdigest() + str(state.metrics()["wire_bytes"])
    (folder / f"end-{rank}").write_text(end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
