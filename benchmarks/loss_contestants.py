"""Who is held against whom at counted bytes: one row a contestant, over ``+experiment=default``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

WARM_SHARE = 0.1
"""Of a run that ``1bit-warm`` averages dense first, as long as the controllers' warm-up."""


@dataclass(frozen=True)
class Contestant:
    """``overrides`` of edgc_ddp.train, or for an outsider its ``kind`` and its dense share of the run."""

    name: str
    what: str
    overrides: tuple[str, ...] = ()
    kind: str = ""
    dense_share: float = 0.0

    def start_iter(self, steps: int) -> int:
        return max(2, round(self.dense_share * steps))


def _row(controller: str, wire: str, what: str, *options: str, name: str = "") -> Contestant:
    overrides = [f"controller={controller}", *(f"controller.{option}" for option in options)]
    wires = (f"hook.wire_dtype={wire}", "hook.dense_dtype=fp32")
    return Contestant(f"{name or controller}-{wire}", what, (*overrides, *wires))


def _coded(controller: str, what: str, *options: str) -> Contestant:
    """Everything in int8: the factors, and the whole gradients before them."""
    overrides = [f"controller={controller}", *(f"controller.{option}" for option in options)]
    wires = ("hook.wire_dtype=int8", "hook.dense_dtype=int8")
    return Contestant(f"{controller}-all-int8", what, (*overrides, *wires))


def _fixed(rank: int, wire: str) -> Contestant:
    return _row("fixed", wire, f"PowerSGD, rank {rank}", f"rank={rank}", name=f"fixed-{rank}")


def _cold(percent: int) -> Contestant:
    """Ranks by energy from the first step on."""
    options = (f"budget={percent / 100:g}", "warmup=0")
    what = f"{percent} % of the entries, by energy, no warm-up"
    return _row("adaptive", "int8", what, *options, name=f"adaptive-{percent}")


_THIRTY_TWO = ("r_max=32", "r_min=8")
"""Half of the paper's bounds, which the experiment has left."""

CONTESTANTS = (
    Contestant("dense", "plain average in fp32", ("controller=dense", "hook.dense_dtype=fp32")),
    Contestant("dense-bf16", "plain average in bf16", kind="bf16"),
    _coded("dense", "8 bits an entry, error feedback"),
    # The ranks of Table 5, halved.
    *(_fixed(rank, "fp32") for rank in (8, 16, 32)),
    _fixed(16, "bf16"),
    # As many bytes as fp32 at ranks 4, 8 and 16.
    *(_fixed(rank, "int8") for rank in (16, 32, 64)),
    _row("edgc", "fp32", "the paper's policy", *_THIRTY_TWO),
    _row("edgc", "int8", "the paper's policy", *_THIRTY_TWO),
    _row("edgc_code", "fp32", "the policy of the authors' code", *_THIRTY_TWO),
    _row("accordion", "fp32", "rank 32 while a gradient's norm changes, else 8"),
    _row("lgreco", "fp32", "fewest bytes at the error of rank 16"),
    # Optimus-CC compresses three of four stages at rank 128: halved as the rest is.
    _row(
        "selective",
        "fp32",
        "rank 64 on three of four layers",
        "compress=['blocks.[0-2].*']",
        "inner.rank=64",
    ),
    _row("scheduled", "fp32", "dense to step 100, rank 32 to 500, then 8"),
    _row("adaptive", "fp32", "a quarter of the entries, by energy"),
    _row("adaptive", "int8", "a quarter of the entries, by energy"),
    # As many bytes as fixed-32-int8 and fixed-64-int8.
    *(_cold(percent) for percent in (22, 44)),
    Contestant(
        "default", "the experiment as it is: the paper's policy in 8 bits", ("controller=edgc",)
    ),
    _coded("edgc", "the paper's policy, warm-up in 8 bits", *_THIRTY_TWO),
    Contestant("4bit", "4 bits an entry, error feedback", kind="4bit"),
    Contestant("1bit", "1 bit an entry, error feedback", kind="1bit"),
    Contestant("1bit-warm", "1 bit after a dense tenth", kind="1bit", dense_share=WARM_SHARE),
)


def select(patterns: Sequence[str]) -> list[Contestant]:
    """The contestants that match any shell-style pattern, in the table's order.

    Raises ValueError for a pattern that matches none.

    >>> [contestant.name for contestant in select(["edgc-*", "?bit"])]
    ['edgc-fp32', 'edgc-int8', 'edgc-all-int8', '4bit', '1bit']
    """
    names = [contestant.name for contestant in CONTESTANTS]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--only {pattern}: matches no contestant of {', '.join(names)}")
    return [c for c in CONTESTANTS if any(fnmatchcase(c.name, pattern) for pattern in patterns)]
