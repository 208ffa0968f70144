"""Checkpoints: one folder per step, written whole or not at all.

``checkpoints/step-00000500/`` holds ``model.pt`` (rank 0: weights, optimizer; a pipeline's later stages
have ``model-stage<s>.pt``), ``hook-rank<r>.pt`` (each rank: residuals differ) and ``manifest.json``, which
is written last and without which a folder does not count. All ranks must see the same file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORMAT = 1
KEPT = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d+")
AUTO = "auto"
"""``train.resume`` of a run that goes on from its own folder, if it has been there before."""


def write_atomically(path: Path, write: Any) -> None:
    """Call ``write(temporary path)``, then move the file into place in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(
    root: Path,
    step: int,
    training: Mapping[str, Any],
    hook: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    *,
    part: str | None = "model.pt",
) -> Path:
    """Write ``root/step-<step>``; collective. ``step`` is the number of finished steps.

    ``training`` (written to the file ``part``, None on ranks that hold the same as another) and
    ``hook`` (every rank's, None without a hook) hold tensors and plain values; ``identity`` is what
    :func:`check` later compares. Keeps the newest two up to this step: later ones are another run's.
    """
    rank, folder = dist.get_rank(), root / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (folder / MANIFEST).unlink(missing_ok=True)
    dist.barrier()
    if part is not None:
        write_atomically(folder / part, lambda path: torch.save(dict(training), path))
    if hook is not None:
        name = hook_file(rank)
        write_atomically(folder / name, lambda path: torch.save(dict(hook), path))
    dist.barrier()
    if rank == 0:
        files = {path.name: path.stat().st_size for path in folder.glob("[!.]*.pt")}
        manifest = {"format": FORMAT, "step": step, "files": files, **identity}
        text = json.dumps(manifest, indent=1)
        write_atomically(folder / MANIFEST, lambda path: path.write_text(text))
        past = [other for other in complete(root) if _step_of(other) <= step]
        for old in past[:-KEPT]:
            # The manifest goes first: a half-deleted folder must not look complete.
            (old / MANIFEST).unlink()
            shutil.rmtree(old)
    return folder


def hook_file(rank: int) -> str:
    """Name of the file with one rank's hook state."""
    return f"hook-rank{rank}.pt"


def part_file(stage: int) -> str:
    """Name of the file with one stage's weights and optimizer; a whole model is stage 0."""
    return f"model-stage{stage}.pt" if stage else "model.pt"


def complete(root: Path) -> list[Path]:
    """The finished checkpoints under ``root``, the one of the fewest steps first."""
    found = (manifest.parent for manifest in root.glob(f"step-*/{MANIFEST}"))
    return sorted((folder for folder in found if _NAME.fullmatch(folder.name)), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def own_newest(run: Path) -> Path | None:
    """The newest whole checkpoint of the run in this folder, the same on all ranks; None where none was
    ever finished. Collective.

    Says on stderr which damaged ones it passed by. Raises ValueError when all are damaged.
    """
    # Rank 0's word, should a file system show the others less.
    answer: list[tuple[Path | None, list[str]]] = [newest_whole(run / "checkpoints")]
    dist.broadcast_object_list(answer, src=0)
    newest, damages = answer[0]
    if newest is None and damages:
        raise ValueError(
            f"{damages[0]}, and so on: no checkpoint in {run} is whole; move its folder checkpoints away "
            "to start again"
        )
    if dist.get_rank() == 0:
        for damage in damages:
            print(f"edgc_ddp.train: {damage}; going on from {newest}", file=sys.stderr, flush=True)
    return newest


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint under ``root`` that is whole, and what is wrong with those that are newer."""
    damages: list[str] = []
    for folder in reversed(complete(root)):
        try:
            _whole_manifest(folder)
        except ValueError as error:
            damages.append(str(error))
        else:
            return folder, damages
    return None, damages


def check_unused(run: Path) -> None:
    """Raise ValueError when a run that starts anew would share its folder with another's checkpoints."""
    if found := complete(run / "checkpoints"):
        raise ValueError(
            f"train.resume=null: {run} holds the checkpoints of another run, {found[-1].name} among them; "
            f"set train.resume={AUTO} to go on with that run, or another hydra.run.dir"
        )


def find(given: str) -> Path:
    """The checkpoint that ``train.resume`` means: a checkpoint folder, or a run's newest.

    Raises ValueError when there is none.
    """
    path = Path(given).expanduser()
    if (path / MANIFEST).is_file():
        return path
    for root in (path / "checkpoints", path):
        if found := complete(root):
            return found[-1]
    exists = "does not exist"
    if path.exists():
        exists = (
            "has no finished checkpoint (the first one is written at step train.checkpoint_every)"
        )
    raise ValueError(
        f"train.resume={given}: {exists}; give a run folder or one of its checkpoints/step-* folders"
    )


def check(folder: Path, identity: Mapping[str, Any]) -> int:
    """The step to go on from. Raises ValueError unless the checkpoint is whole and of this run's kind.

    ``identity`` has ``world_size``, ``controller`` (None without a hook), ``parameters`` and, where they
    matter, ``options`` (the controller's, as texts), ``stages`` and ``pipeline`` (options of ``parallel``);
    ``text``, its source and digest, once it has been read.
    """
    manifest = _whole_manifest(folder)
    remedies = {
        "world_size": "nproc",
        "stages": "parallel.pp",
        "controller": "controller and hook.register",
    }
    theirs, mine = {"stages": 1, **manifest}, {"stages": 1, **identity}
    for key, remedy in remedies.items():
        if theirs.get(key) != mine[key]:
            raise ValueError(
                f"train.resume={folder}: written with {key} {theirs.get(key)}, this run has "
                f"{mine[key]}; set {remedy} as in the first run"
            )
    _check_pipeline(folder, manifest.get("pipeline") or {}, identity.get("pipeline") or {})
    _check_options(folder, manifest.get("options") or {}, identity.get("options") or {})
    _check_parameters(folder, manifest.get("parameters"), identity["parameters"])
    texts = manifest.get("text"), identity.get("text")
    if None not in texts and texts[0] != texts[1]:
        source = str(texts[0]).split()[0]
        raise ValueError(
            f"train.resume={folder}: trained on the text {texts[0]}, this run reads {texts[1]}; set "
            f"data.source={source}, or start a new run (a source that cannot be reached is replaced)"
        )
    return int(manifest["step"])


def _whole_manifest(folder: Path) -> dict[str, Any]:
    """What the checkpoint says of itself. Raises ValueError unless all its files are there in full."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["step"], files = int(manifest["step"]), dict(manifest["files"])
        known = manifest["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"train.resume={folder}: {MANIFEST} cannot be read ({error})") from error
    if not known:
        raise ValueError(
            f"train.resume={folder}: format {manifest['format']}, this version reads {FORMAT}"
        )
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ValueError(f"train.resume={folder}: {name} {state}; use an earlier checkpoint")
    return manifest  # type: ignore[no-any-return]


def _check_pipeline(folder: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """The stages' controllers are of these options, and have timed averages under them."""
    for name in dict.fromkeys([*mine, *theirs]):
        given, found = mine.get(name, "unset"), theirs.get(name, "unknown")
        if given != found:
            raise ValueError(
                f"train.resume={folder}: written with parallel.{name}={found}, this run has {given}, but "
                f"its stages' ranks and measured times hold for {found} only; set parallel.{name} as in "
                "the first run"
            )


def _check_options(folder: Path, theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """As ``EDGCState.load_state_dict`` would, but before a process is started."""
    for name, text in theirs.items():
        if mine.get(name) != text:
            raise ValueError(
                f"train.resume={folder}: written with controller.{name}={text}, this run has "
                f"{mine.get(name)}; set controller.{name} as in the first run"
            )


def _check_parameters(folder: Path, theirs: Any, mine: Mapping[str, list[int]]) -> None:
    if theirs == mine:
        return
    theirs = theirs if isinstance(theirs, dict) else {}
    name = next(name for name in [*mine, *theirs] if theirs.get(name) != mine.get(name))
    raise ValueError(
        f"train.resume={folder}: a checkpoint of another model, {name} has shape "
        f"{theirs.get(name)} there and {mine.get(name)} here; set model as in the first run"
    )


def read(path: Path) -> dict[str, Any]:
    """Tensors and plain values from a file; code in it is never run. Raises ValueError if damaged."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path}: damaged checkpoint file ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dictionary, found {type(content).__name__}")
    return content
