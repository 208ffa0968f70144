"""A run whose lane is closed by the lane's own worker, as it is when the worker has the last reference.

Prints how many of its threads are alive after everything that runs at exit has run.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator


@atexit.register
def _last() -> None:
    print("alive:", sum(thread.name == "edgc-lane" for thread in threading.enumerate()))


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from edgc_ddp.lane import Handle, Lane, open_lane  # noqa: E402


class Owner:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def task(self) -> Iterator[Handle]:
        tensor = torch.ones(2)
        yield self.lane.all_reduce(tensor, channel=0)
        return tensor

    def __del__(self) -> None:
        assert threading.current_thread().name == "edgc-lane"
        self.lane.close()
        # As long as a busy machine may take over it.
        time.sleep(1)


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    owner = Owner(open_lane(None, torch.device("cpu")))
    lane = owner.lane
    started = threading.Event()
    future = lane.submit(lambda owner=owner: (started.wait(), owner.task())[1])
    del owner, lane
    started.set()
    future.wait()


if __name__ == "__main__":
    main()
