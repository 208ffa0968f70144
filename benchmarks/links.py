"""What a link is, how ``tc`` shapes it, and how to read what crossed it. Pure: nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MIN_BURST_BYTES = 32 * 1024
_BURST_SECONDS = 1e-3
_QUEUE_MS = 50


@dataclass(frozen=True)
class Link:
    """One link speed, the same in both directions; ``bits_per_second`` None is unshaped."""

    name: str
    bits_per_second: float | None

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from what a user typed.

        Raises:
            ValueError: not a rate that ``tc`` understands; names value and remedy.

        >>> Link.parse("100mbit").bits_per_second
        100000000.0
        >>> Link.parse("unshaped").bits_per_second is None
        True
        """
        if text == "unshaped":
            return cls(text, None)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if match is None or float(match[1]) == 0:
            raise ValueError(
                f"link={text!r}: expected a rate such as 100mbit, 1gbit or 10gbit, or 'unshaped'"
            )
        return cls(text, float(match[1]) * _UNITS[match[2]])

    def seconds(self, sent_bytes: float) -> float:
        """Shortest time in which the link carries that many bytes one way; 0 when unshaped.

        >>> Link.parse("100mbit").seconds(12.5e6)
        1.0
        """
        return 8 * sent_bytes / self.bits_per_second if self.bits_per_second else 0.0

    def tbf(self) -> list[str]:
        """Arguments of ``tc``'s token bucket for this link; empty when unshaped.

        The burst passes at full speed after a pause, so it is kept to 1 ms of the rate; below 32 KiB
        the token bucket would cut every segmented packet.

        >>> Link.parse("1gbit").tbf()
        ['tbf', 'rate', '1gbit', 'burst', '125000b', 'latency', '50ms']
        """
        if self.bits_per_second is None:
            return []
        burst = max(_MIN_BURST_BYTES, round(self.bits_per_second / 8 * _BURST_SECONDS))
        return ["tbf", "rate", self.name, "burst", f"{burst}b", "latency", f"{_QUEUE_MS}ms"]


HEADER_BYTES = 14 + 20 + 32
"""Of a counted packet: Ethernet, IPv4, TCP with time stamps. An acknowledgement is nothing else."""


class Sent(NamedTuple):
    """What an interface has sent so far, headers included."""

    bytes: int
    packets: int


def sent(proc_net_dev: str, interface: str) -> Sent:
    """What an interface has sent, from the text of ``/proc/net/dev``.

    Raises:
        ValueError: the text has no such interface.

    >>> sent("lo: 7 1 0 0 0 0 0 0 42 3 0 0 0 0 0 0", "lo")
    Sent(bytes=42, packets=3)
    """
    for line in proc_net_dev.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            columns = counters.split()
            return Sent(int(columns[8]), int(columns[9]))
    raise ValueError(f"interface {interface!r} is not in /proc/net/dev: name one that is there")
