"""How phases look: one colour and one name each, the same in every picture."""

from __future__ import annotations

BAND_ALPHA = 0.3

# Okabe and Ito's palette, the controllers' own phases first.
_PHASES = {
    "start": ("#000000", "start (dense)"),
    "warmup": ("#E69F00", "warm-up (dense)"),
    "calibration": ("#CC79A7", "calibration"),
    "compress": ("#56B4E9", "compression"),
    "dense": ("#999999", "dense"),
    "fixed": ("#009E73", "fixed rank"),
    "no hook": ("#999999", "plain DDP"),
    "scheduled": ("#F0E442", "scheduled rank"),
}
_OTHER = ("#D55E00", "#0072B2", "#5D3A9B")


def phase_colour(phase: str) -> str:
    """A phase's colour; a controller's own phase gets the same one on every call.

    >>> phase_colour("compress"), phase_colour("mine") == phase_colour("mine")
    ('#56B4E9', True)
    """
    return _PHASES[phase][0] if phase in _PHASES else _OTHER[sum(phase.encode()) % len(_OTHER)]


def phase_label(phase: str) -> str:
    """A phase in the reader's words; a controller's own phase by its own name.

    >>> phase_label("warmup"), phase_label("mine")
    ('warm-up (dense)', 'mine')
    """
    return _PHASES.get(phase, ("", phase))[1]
