"""What the doctor says."""

from __future__ import annotations

import math

from edgc_ddp.controllers.bounds import is_slower
from edgc_ddp.doctor.advise import Advice, Model, Setting
from edgc_ddp.doctor.facts import Facts

_TRUSTED_ERROR = 0.15
"""Of the model against measured steps; more says that they were not measured under one condition."""


def describe(facts: Facts, advice: Advice) -> str:
    """The whole report as text."""
    model = Model(facts)
    return "\n".join(
        [*_measured(facts, model), "", *_ranks(facts, model), "", *_steps(facts, model), "",
         *_advice(facts, advice)]
    )  # fmt: skip


def _measured(facts: Facts, model: Model) -> list[str]:
    link = model.link
    plain = next(step for step in facts.steps if step.rank == 0)
    alone = facts.forward_s + facts.backward_s
    speed = "not to be told from noise"
    if math.isfinite(link.bytes_per_s):
        speed = f"{8 * link.bytes_per_s / 1e9:.3g} Gbit/s"
    return [
        f"model      {facts.model}, {facts.parameters:,} parameters, batch {facts.batch}, "
        f"{facts.world_size} ranks on {facts.device}",
        f"headroom   a step takes {_ms(plain.seconds)} with plain DDP, {_ms(alone)} without "
        f"averaging: at most {max(0.0, 1 - alone / plain.seconds):.0%} to win",
        f"link       latency {1e6 * link.latency_s:.3g} us per message, bandwidth {speed}",
    ]


def _ranks(facts: Facts, model: Model) -> list[str]:
    seen = {average.rank: average.seconds for average in facts.averages}
    lines = [
        f"T(r), one average with factors in {facts.wire}, nothing beside it:",
        f"{'rank':>6} {'MB':>9} {'latency':>10} {'wire':>10} {'work':>10} {'model':>10} {'measured':>10}",
    ]
    for rank, seconds in sorted(seen.items()):
        setting = Setting(rank, facts.wire)
        parts = model.parts(setting)
        name = "dense" if rank == 0 else str(rank)
        cells = [f"{_ms(part):>10}" for part in (*parts, sum(parts), seconds)]
        lines.append(f"{name:>6} {model.payload(setting) / 1e6:>9.3f} {' '.join(cells)}")
    return lines


def _steps(facts: Facts, model: Model) -> list[str]:
    lines = [f"{'step':>14} {'measured':>10} {'quartiles':>21} {'model':>10}"]
    for step in facts.steps:
        name = f"rank {step.rank} {step.wire}" if step.rank else "plain DDP"
        expected = model.step_s(Setting(step.rank, step.wire, step.cap_mb))
        quartiles = f"{_ms(step.low_s)} - {_ms(step.high_s)}"
        lines.append(f"{name:>14} {_ms(step.seconds):>10} {quartiles:>21} {_ms(expected):>10}")
    lines.append(
        f"The model is off by {model.worst_error():.0%} at most; backward hides {model.steps.overlap:.0%} "
        "of the averaging that it could."
    )
    if model.worst_error() > _TRUSTED_ERROR:
        lines.append(
            "That is too far off to be trusted: the machine or the link was busy with something else. Run "
            "it again when they are quiet, with more --steps."
        )
    return lines


def _advice(facts: Facts, advice: Advice) -> list[str]:
    if advice.setting is None:
        head = "advice     plain DDP is better here"
    else:
        setting = advice.setting
        head = (
            f"advice     rank up to {setting.rank}, wire_dtype={setting.wire}, "
            f"bucket_cap_mb={setting.cap_mb:g}: {_ms(advice.step_s)} a step instead of "
            f"{_ms(advice.plain_s)}, {advice.speed_up:.2f} times as fast"
        )
    return [head, f"           because {advice.reason}.", f"           {_even(facts, advice)}"]


def _even(facts: Facts, advice: Advice) -> str:
    """Where an average takes as long as dense."""
    seen = {average.rank: average.seconds for average in facts.averages}
    if advice.break_even == 0:
        return "No rank that bounds allow, 4 or more, averages faster than dense."
    if not any(is_slower(seen[rank], seen[0]) for rank in seen if rank):
        return f"Every rank measured, up to {max(seen)}, averages faster than dense."
    return f"An average breaks even with dense at about rank {advice.break_even}."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
