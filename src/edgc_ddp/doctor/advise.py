"""From facts to advice. Pure: equal facts give equal advice, so all ranks follow the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from edgc_ddp.controllers.bounds import measured_r_max
from edgc_ddp.doctor.facts import DEFAULT_CAP_MB, Facts
from edgc_ddp.maths.comm_time import (
    Link,
    RankTime,
    SeenStep,
    StepFit,
    bucket_sizes,
    fit_lane,
    fit_link,
    fit_rank_time,
    fit_steps,
    hidden_seconds,
    ring_seconds,
    step_seconds,
)

_WORTH = 0.03
"""A saving below this share of the step is within what such measurements vary by."""
_KEPT = 0.9
"""The share of the fastest setting's saving that must stay when more rank is taken."""
_SUMS = 2
"""Collectives of a compressed bucket, one after the other."""


@dataclass(frozen=True)
class Setting:
    """What can be chosen; rank 0 is plain DDP."""

    rank: int
    wire: str = "fp32"
    cap_mb: float = DEFAULT_CAP_MB


@dataclass(frozen=True)
class Advice:
    """What to do. ``setting`` None: plain DDP is better here. Times in seconds."""

    setting: Setting | None
    plain_s: float
    """A step of plain DDP."""
    step_s: float
    """The expected step of the setting, or of the best one when plain DDP is better."""
    break_even: int
    """The rank up to which an average takes no longer than dense, as the live calibration has it."""
    reason: str

    @property
    def speed_up(self) -> float:
        return self.plain_s / self.step_s

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Advice:
        """From what ``dataclasses.asdict`` made of it."""
        setting = plain["setting"]
        return cls(**{**plain, "setting": None if setting is None else Setting(**setting)})


class Model:
    """The communication-time model fitted to facts.

    An average takes, bucket by bucket, its share of ``work(rank)`` and of the payload's bytes, and the
    latency of each of its collectives. Work is measured alone, at rest, and takes what the averages
    show it to take on the link's own threads. How much of it hides under backward is fitted to real steps.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        dense_s = next(average.seconds for average in facts.averages if average.rank == 0)
        count = len(bucket_sizes(facts.dense_bytes, DEFAULT_CAP_MB))
        points = [*facts.all_reduces, (facts.dense_bytes / count, dense_s / count)]
        self.link: Link = fit_link(points, facts.world_size)
        self.work: dict[str, RankTime] = {
            wire: fit_rank_time([(c.rank, c.work_s) for c in facts.costs if c.wire == wire])
            for wire in dict.fromkeys(cost.wire for cost in facts.costs)
        }
        self.lane = (0.0, 1.0)
        self._payloads = {(cost.wire, cost.rank): cost.payload_bytes for cost in facts.costs}
        seen = []
        for average in facts.averages:
            if average.rank:
                latency, wire, work = self.parts(Setting(average.rank, facts.wire))
                seen.append((average.seconds, latency + wire, work))
        self.lane = fit_lane(seen)

    def payload(self, setting: Setting) -> float:
        """Bytes averaged per step at this setting."""
        if not setting.rank:
            return self.facts.dense_bytes
        return self._payloads[setting.wire, setting.rank]

    def parts(self, setting: Setting) -> tuple[float, float, float]:
        """Seconds of latency, of the wire and of work in one average."""
        members, link = self.facts.world_size, self.link
        count = len(bucket_sizes(self.facts.dense_bytes, setting.cap_mb))
        sums = count * (_SUMS if setting.rank else 1)
        latency = sums * ring_seconds(0.0, members, link)
        wire = ring_seconds(self.payload(setting), members, Link(0.0, link.bytes_per_s))
        if not setting.rank:
            return latency, wire, 0.0
        added, factor = self.lane
        return latency, wire, added + factor * self.work[setting.wire].seconds(setting.rank)

    def buckets(self, setting: Setting) -> list[tuple[float, float]]:
        """(bytes of gradient, seconds to average) of each bucket, in order."""
        latency, wire, work = self.parts(setting)
        sizes = bucket_sizes(self.facts.dense_bytes, setting.cap_mb)
        whole = self.facts.dense_bytes
        return [(size, latency / len(sizes) + (wire + work) * size / whole) for size in sizes]

    @cached_property
    def steps(self) -> StepFit:
        """What becomes of the parts in a real step, where backward goes on beside them."""
        seen = []
        for step in self.facts.steps:
            serial, hidden = self._times(Setting(step.rank, step.wire, step.cap_mb))
            seen.append(SeenStep(step.rank > 0, serial, hidden, step.seconds))
        return fit_steps(seen)

    def _times(self, setting: Setting) -> tuple[float, float]:
        """A step without overlap, and what of it could hide under backward."""
        facts, buckets = self.facts, self.buckets(setting)
        serial = step_seconds(facts.forward_s, facts.backward_s, buckets, overlap=0.0)
        return serial, hidden_seconds(facts.backward_s, buckets)

    def step_s(self, setting: Setting) -> float:
        """The expected seconds of a step."""
        return self.steps.seconds(setting.rank > 0, *self._times(setting))

    def worst_error(self) -> float:
        """The largest relative error of the expected among the real steps."""
        return max(
            abs(self.step_s(Setting(step.rank, step.wire, step.cap_mb)) / step.seconds - 1)
            for step in self.facts.steps
        )


def advise(facts: Facts, caps_mb: Sequence[float], below: float = math.inf) -> Advice:
    """The setting to use, by the fitted model.

    Of the settings that save at least 3 % of plain DDP's measured step, the one with the highest rank
    that keeps nine tenths of what the fastest saves: rank is fidelity, and a low one is not worth a
    last bit of speed. Among equal ranks the fastest. Only ranks ``below`` are considered, and none is
    advised when there are none.
    """
    model = Model(facts)
    plain_s = next(step.seconds for step in facts.steps if step.rank == 0)
    ranked = [cost for cost in facts.costs if cost.rank < below]
    settings = [Setting(cost.rank, cost.wire, cap) for cost in ranked for cap in caps_mb]
    if not settings:
        return Advice(None, plain_s, plain_s, 0, f"no rank below {below:g} was measured")
    expected = {setting: model.step_s(setting) for setting in settings}
    fastest = min(expected, key=lambda setting: expected[setting])
    trials = [(a.rank, a.seconds) for a in facts.averages if a.rank]
    dense_s = next(a.seconds for a in facts.averages if a.rank == 0)
    pays = measured_r_max(trials, dense_s)
    limit = plain_s - max(_KEPT * (plain_s - expected[fastest]), _WORTH * plain_s)
    good = [setting for setting in settings if expected[setting] <= limit]
    if not good:
        reason = (
            f"the best setting (rank {fastest.rank}, {fastest.wire}) would take "
            f"{1000 * expected[fastest]:.3g} ms a step, plain DDP takes {1000 * plain_s:.3g} ms, and a "
            f"change is worth it from {_WORTH:.0%} on"
        )
        return Advice(None, plain_s, expected[fastest], pays, reason)
    best = max(good, key=lambda setting: (setting.rank, -expected[setting]))
    reason = (
        f"the highest rank that keeps {_KEPT:.0%} of the saving of the fastest step expected "
        f"({1000 * expected[fastest]:.3g} ms at rank {fastest.rank}, {fastest.wire})"
    )
    return Advice(best, plain_s, expected[best], pays, reason)


def settle(advice: Advice, plain_s: float, step_s: float) -> Advice:
    """The advice after its setting was measured beside plain DDP: it stands only if it saved time."""
    told = f"measured side by side: plain DDP {1000 * plain_s:.3g} ms, "
    told += f"this setting {1000 * step_s:.3g} ms"
    setting = advice.setting
    if step_s > (1 - _WORTH) * plain_s:
        setting = None
        told = f"the model expected {1000 * advice.step_s:.3g} ms, but {told}"
    else:
        told = f"{advice.reason}; {told}"
    return replace(advice, setting=setting, plain_s=plain_s, step_s=step_s, reason=told)
