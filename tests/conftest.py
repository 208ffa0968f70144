from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(3)(function, *args)`` runs a module-level function on three processes."""
    kept: dict[int, Ranks] = {}
    yield lambda world_size: kept.setdefault(world_size, Ranks(world_size))
    for pool in kept.values():
        pool.stop()


@pytest.fixture(autouse=True)
def no_application() -> Iterator[None]:
    """What ``app.main()`` composed in this process is nobody else's run."""
    yield
    HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
