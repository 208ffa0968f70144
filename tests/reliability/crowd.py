"""Many ranks on few cores, each bucket late by chance: the order of collectives must hold all the same.

    python tests/reliability/crowd.py [--world 8] [--steps 60]

Exits 1 when the ranks' weights differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from test_hook import train_delayed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    ranks.SECONDS = 1800
    began = time.monotonic()
    pool = ranks.Ranks(options.world)
    try:
        results = pool(train_delayed, options.steps, timeout=600)
    finally:
        pool.stop()
    different = len({weights for weights, _ in results})
    seconds = round(time.monotonic() - began)
    print(json.dumps({**vars(options), "different": different, "seconds": seconds}))
    return 0 if different == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
