"""Emulated networks: hosts that talk over links of a chosen speed, made and removed by a ``with``.

Two forms share one surface (:class:`Network`):

- :func:`bridged` (root): every host is a network namespace; veth pairs lead to a bridge in a namespace
  of its own; both ends of every pair are shaped. The machine's own network is never touched.
- :func:`rootless` (any user who may make user namespaces): one namespace whose loopback is shaped. All
  hosts share it, so the link carries the *sum* of what they send.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.links import Link, sent

PREFIX = "edgcbench"
"""Every namespace this module makes is named ``edgcbench-<process id>-...``."""
_SECONDS = 20
_CONGESTION_CONTROL = "reno"


class NetworkError(RuntimeError):
    """The network cannot be made here; the text says what is missing and what to do."""


@dataclass(frozen=True)
class Network:
    """``hosts`` hosts joined by ``link``. Host h runs a command as ``prefixes[h] + command``."""

    form: str
    link: Link
    prefixes: tuple[tuple[str, ...], ...]
    addresses: tuple[str, ...]
    interface: str
    shared: bool
    """Whether all hosts send through one interface, which then carries their sum."""

    @property
    def hosts(self) -> int:
        return len(self.prefixes)

    def run(self, host: int, *command: str) -> str:
        """Standard output of a short command on one host."""
        return _run(*self.prefixes[host], *command)

    def interface_bytes(self) -> list[int]:
        """Bytes each host's interface has sent so far; the shared one's, once, in rootless form."""
        hosts = 1 if self.shared else self.hosts
        return [
            sent(self.run(h, "cat", "/proc/net/dev"), self.interface).bytes for h in range(hosts)
        ]

    def describe(self) -> dict[str, object]:
        """What a record must say about the network."""
        control = self.run(0, "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip()
        return {
            "form": self.form,
            "hosts": self.hosts,
            "shaping": " ".join(self.link.tbf()) or "none",
            "shared": self.shared,
            "note": (
                "all hosts share one shaped loopback, which carries the sum of what they send"
                if self.shared
                else "each host has its own link, shaped at both ends"
            ),
            "interface": self.run(0, "ip", "-o", "link", "show", self.interface).strip(),
            "congestion_control": control,
        }


@contextmanager
def bridged(hosts: int, link: Link) -> Iterator[Network]:
    """Namespaces joined by a bridge, addresses 10.77.0.1 and up; all removed at the end.

    Raises:
        NetworkError: not root, ``ip`` or ``tc`` is missing, or the kernel refuses.
        ValueError: ``hosts`` is not in 1..200.
    """
    if not 1 <= hosts <= 200:
        raise ValueError(f"hosts={hosts}: expected 1 to 200, which 10.77.0.0/24 has addresses for")
    _require("ip", "tc")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root: run as root, or use --network rootless")
    sweep()
    names = [f"{PREFIX}-{os.getpid()}-h{host}" for host in range(hosts)]
    switch = f"{PREFIX}-{os.getpid()}-switch"
    addresses = tuple(f"10.77.0.{host + 1}" for host in range(hosts))
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host, name in enumerate(names):
            _connect(name, switch, host, addresses[host], link)
        yield Network(
            form="bridged namespaces",
            link=link,
            prefixes=tuple(("ip", "netns", "exec", name) for name in names),
            addresses=addresses,
            interface="link0",
            shared=False,
        )
    finally:
        for name in (*names, switch):
            _remove(name)


def _connect(name: str, switch: str, host: int, address: str, link: Link) -> None:
    port = f"port{host}"
    ends = ("type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "link", "add", "name", "link0", "netns", name, *ends)
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
    for namespace, device in ((name, "link0"), (switch, port)):
        if link.bits_per_second is not None:
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *link.tbf())
        _run("ip", "-n", namespace, "link", "set", device, "up")
    _set_congestion_control("ip", "netns", "exec", name)


@contextmanager
def rootless(hosts: int, link: Link) -> Iterator[Network]:
    """One user-and-network namespace with a shaped loopback, 127.0.0.1, that all hosts share.

    Raises:
        NetworkError: ``unshare``, ``nsenter``, ``ip`` or ``tc`` is missing, or the kernel refuses.
    """
    _require("unshare", "nsenter", "ip", "tc")
    # `cat` ends when its standard input closes: the namespace cannot outlive this process.
    holder = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
    enter = ("nsenter", "--preserve-credentials", "--user", "--net", "--target", str(holder.pid))
    namespace: str | None = None
    try:
        if holder.stdout.readline() != "ready\n":
            raise NetworkError(
                f"a user namespace is refused here ({holder.stderr.read().strip()}): allow "
                "unprivileged user namespaces, or run as root with --network bridged"
            )
        namespace = os.readlink(f"/proc/{holder.pid}/ns/net")
        # The token bucket drops packets above its burst, and loopback's own are of 64 KiB.
        _run(*enter, "ip", "link", "set", "lo", "mtu", "1500", "up")
        if link.bits_per_second is not None:
            _run(*enter, "tc", "qdisc", "add", "dev", "lo", "root", *link.tbf())
        _set_congestion_control(*enter)
        yield Network(
            form="rootless loopback",
            link=link,
            prefixes=(enter,) * hosts,
            addresses=("127.0.0.1",) * hosts,
            interface="lo",
            shared=True,
        )
    finally:
        if namespace is not None:
            _end([pid for pid in _inside(namespace) if pid != holder.pid])
        holder.stdin.close()
        try:
            holder.wait(timeout=5)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait(timeout=5)
        holder.stdout.close()
        holder.stderr.close()


def sweep() -> list[str]:
    """Remove what runs that were killed have left: namespaces of ours whose maker is gone."""
    stale = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        parts = name.split("-")
        ours = parts[0] == PREFIX and len(parts) == 3 and parts[1].isdecimal()
        if ours and not Path(f"/proc/{parts[1]}").exists():
            stale.append(name)
            _remove(name)
    return stale


def _remove(name: str) -> None:
    """Delete a namespace and end what still runs in it. Never raises: it runs while cleaning up."""
    inside = _try("ip", "netns", "pids", name)
    if inside is not None:
        _end([int(pid) for pid in inside.split()])
        _try("ip", "netns", "del", name)


def _inside(namespace: str) -> list[int]:
    """Ids of this user's processes in a network namespace."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if os.readlink(folder / "ns" / "net") == namespace:
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def _end(pids: list[int]) -> None:
    """End processes by id: asked first, then killed."""
    for signal_number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        for pid in pids:
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience
        while pids and time.monotonic() < deadline:
            pids = [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
            time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _set_congestion_control(*prefix: str) -> None:
    # One fixed choice makes runs comparable, and Reno alone is allowed in every namespace. BBR, some
    # machines' default, empties its window every ten seconds. The record says what is in force.
    path = "/proc/sys/net/ipv4/tcp_congestion_control"
    _try(*prefix, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {path}")


def _require(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise NetworkError(
            f"{', '.join(missing)} not found: install iproute2 (ip, tc) and util-linux (unshare, nsenter)"
        )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise NetworkError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}. "
            "The kernel must offer network namespaces, veth, bridge and the tbf queue, and allow this "
            "user to make them (--network rootless asks for less)"
        )
    return done.stdout


def _try(*command: str) -> str | None:
    try:
        return _run(*command)
    except (NetworkError, subprocess.TimeoutExpired):
        return None
