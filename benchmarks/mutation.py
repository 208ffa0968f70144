"""Breaks the engine in plausible ways, one at a time in a copy, and shows that the tests notice.

    python -m benchmarks.mutation [NAME ...]

Prints one line a mutation: caught, MISSED, or timed out; exits 1 when one was not caught or did not apply,
or when a test fails without any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE_TESTS = ("test_engine.py", "test_hook.py", "test_reliability_numbers.py")
SECONDS = 400


@dataclass(frozen=True)
class Mutation:
    """Replace ``old``, which occurs once in ``file``, and expect one of ``tests`` to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ENGINE_TESTS


LOW_RANK = "reducers/low_rank.py"
MUTATIONS = (
    Mutation(
        "residual is never added",
        LOW_RANK,
        "add_residual(item.flat, item.slot.residual)\n            _product",
        "pass\n            _product",
    ),
    Mutation(
        "wrong divisor",
        LOW_RANK,
        "share = 1 / lane.world_size\n    for group",
        "share = 1.0\n    for group",
    ),
    Mutation(
        "stale basis",
        LOW_RANK,
        "item.slot.basis_NR = _next_basis(item.slot.basis_NR, q_RN, useful_R1)",
        "pass",
    ),
    Mutation(
        "residual against the average",
        LOW_RANK,
        "torch.addmm(a_MN, p_RM.t(), q_RN, alpha=-world_size, out=left_MN)",
        "torch.addmm(a_MN, p_RM.t(), q_RN, alpha=-1, out=left_MN)",
    ),
    Mutation("bad steps are remembered", LOW_RANK, "        if kept:\n", "        if True:\n"),
    Mutation(
        "bad steps are remembered, in other types",
        "reducers/bucket.py",
        "    elif not ok:\n        return\n",
        "",
        ("test_reliability_numbers.py", "test_coded.py"),
    ),
    Mutation(
        "operands lie anywhere",
        "maths/placed.py",
        "return tensor.data_ptr() % BYTES == 0",
        "return True",
        ("test_state.py",),
    ),
    Mutation(
        "small tensors alone in a bucket keep their type",
        "engine.py",
        "return self._mean_rank > 0 and small and",
        "return False and small and",
        ("test_state.py",),
    ),
    Mutation(
        "the coming backward's scale is lost at a checkpoint",
        "checkpoint.py",
        '        "loss_scale": engine.loss_scale,\n',
        "",
    ),
    Mutation(
        "arithmetic is not compared",
        "engine.py",
        "        require_equal_arithmetic(lane)\n",
        "",
        ("test_agreement.py",),
    ),
    Mutation(
        "overflow in Q is remembered",
        LOW_RANK,
        "kept = ok & torch.isfinite(largest_sizes(q.flat))",
        "kept = ok",
    ),
    Mutation(
        "pending residual is dropped",
        "reducers/dense.py",
        "    add_pending(owing, scale=1 / lane.world_size)\n",
        "",
    ),
    Mutation(
        "pending residual is sent twice",
        "memory.py",
        "        slot.residual.masked_fill_(sent, 0)\n        self._sent.append((slot, sent))",
        "        pass",
    ),
    Mutation(
        "what nobody will see is sent",
        LOW_RANK,
        "used_F = flags_F > 0",
        "used_F = flags_F > -1",
        ("test_reliability_unused.py",),
    ),
    Mutation(
        "rounding in coded warm-up is forgotten",
        "reducers/coded.py",
        "        item.flat.sub_(place, alpha=lane.world_size)\n",
        "        item.flat.zero_()\n",
        ("test_coded.py",),
    ),
    Mutation(
        "strides are ignored",
        "memory.py",
        "    return tuple(order)",
        "    return tuple(plain)",
        ("test_engine.py",),
    ),
    Mutation(
        "collectives in order of completion",
        "lane/thread.py",
        "if running.ready and (before is None or before.parts_run > running.parts_run):",
        "if running.ready:",
        ("test_hook.py",),
    ),
    Mutation(
        "a finished task is kept while its future tells",
        "lane/thread.py",
        "        running.task = running.make_task = None\n",
        "",
        ("test_reliability_driving.py",),
    ),
    Mutation(
        "a default group made anew goes unseen",
        "engine.py",
        "(lane.group is not group or (first and lane.device != device))",
        "(first and lane.device != device)",
        ("test_reliability_driving.py",),
    ),
    Mutation(
        "plans are not compared",
        "engine.py",
        "        require_equal_plans(lane, plan)\n",
        "",
        ("test_hook.py",),
    ),
    Mutation(
        "the window is lost at a checkpoint",
        "checkpoint.py",
        '        engine.observer.load_state_dict(packed["window"])\n',
        "",
        ("test_state.py",),
    ),
    Mutation(
        "the residual ignores the loss scale",
        "engine.py",
        "            self.memory.rescale(loss_scale / before)",
        "            pass",
        ("test_reliability_numbers.py",),
    ),
    Mutation(
        "a loss scale is news of the gradient",
        "engine.py",
        "            self.observer.loss_scale = loss_scale",
        "            pass",
        ("test_reliability_numbers.py",),
    ),
    Mutation(
        "what is kept stays in the old memory format",
        "engine.py",
        "            turn()\n        if loss_scale",
        "            pass\n        if loss_scale",
        ("test_reliability_resume.py",),
    ),
    Mutation(
        "complex entries are counted once",
        "registry.py",
        "parameter.numel() * (2 if parameter.is_complex() else 1)",
        "parameter.numel()",
        ("test_reliability_parameters.py",),
    ),
)


CAUGHT, MISSED, TIMED_OUT = "caught", "MISSED", "timed out"


def outcome(mutation: Mutation | None, tests: Sequence[str], seconds: float = SECONDS) -> str:
    """What the tests make of a copy of the package that is broken so; whole without a mutation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        # With its limits of time, and what is left out.
        shutil.copy(ROOT / "pyproject.toml", copy)
        for part in ("src", "tests"):
            shutil.copytree(
                ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        if mutation is not None:
            _break(copy, mutation)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        try:
            result = subprocess.run(
                command, cwd=copy / "tests", env=environment, capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        if result.returncode not in (0, 1):
            raise RuntimeError(result.stdout.decode()[-2000:] + result.stderr.decode()[-2000:])
        return CAUGHT if result.returncode == 1 else MISSED


def _break(copy: Path, mutation: Mutation) -> None:
    file = copy / "src" / "edgc_ddp" / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: its text occurs {text.count(mutation.old)} times in "
            f"{mutation.file}, expected once: adapt it to the code"
        )
    file.write_text(text.replace(mutation.old, mutation.new))


def main(names: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    # Tests that fail anyway would catch everything.
    if (found := outcome(None, tests, SECONDS * len(tests))) != MISSED:
        print(f"the whole package: {'a test fails' if found == CAUGHT else found}", flush=True)
        return 1
    missed = 0
    for mutation in chosen:
        began = time.monotonic()
        verdict = outcome(mutation, mutation.tests)
        missed += verdict != CAUGHT
        print(f"{verdict}  {mutation.name}  ({time.monotonic() - began:.0f} s)", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
