from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(3)(function, *args)`` runs a module-level function on three processes."""
    kept: dict[int, Ranks] = {}
    yield lambda world_size: kept.setdefault(world_size, Ranks(world_size))
    for pool in kept.values():
        pool.stop()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
