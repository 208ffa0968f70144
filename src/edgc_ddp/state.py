"""``EDGCState``: what a user holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import checkpoint, misfit
from edgc_ddp.controllers import EntropyController
from edgc_ddp.decisions import Controller, is_controller
from edgc_ddp.engine import Engine
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.options import Options
from edgc_ddp.progress import copied
from edgc_ddp.reducers.bucket import Settings
from edgc_ddp.registry import Registry


class EDGCState:
    """The state of :func:`edgc_ddp.edgc_hook` for one DistributedDataParallel model.

    Args:
        controller: who decides the ranks; ``EntropyController()`` when None.
        model: the module that DDP wraps, or DDP's own. Gives parameters their names in plans and
            checkpoints.
        process_group: the group that DDP averages over; when None that of ``model``, if it is DDP's, else
            the default group, looked up when the first gradient arrives, so the state may be made before
            the group exists.
        start_iter: iterations averaged dense before any compression, at least 2, since DDP rebuilds
            its buckets after the first.
        wire_dtype: "fp32", "bf16" or "int8", the type that factors travel in.
        dense_dtype: "fp32", "bf16" or "int8", the type that gradients travel in while they are not
            compressed; "fp32" is the gradient's own type, exactly as DDP sends it. What rounding takes
            from a matrix is sent with its next gradient.
        residual_dtype: "fp32" or "bf16", the type that residuals are kept in.
        error_feedback: keep what was not sent and add it to the next gradient.
        min_compression_rate: a matrix is compressed only if its factors are smaller than it, in the type
            that factors travel in, by more than this factor.
        seed: seeds the first bases. The global random state is never touched.

    Raises:
        ValueError: an option is out of its range; the message names it, the value and the remedy.

    Example:
        >>> from edgc_ddp.controllers import FixedRank
        >>> state = EDGCState(controller=FixedRank(4))
        >>> state.metrics()["phase"]
        'start'
    """

    def __init__(
        self,
        controller: Controller | None = None,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        start_iter: int = 2,
        wire_dtype: str = "fp32",
        dense_dtype: str = "fp32",
        residual_dtype: str = "fp32",
        error_feedback: bool = True,
        min_compression_rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.controller: Controller = controller if controller is not None else EntropyController()
        if not is_controller(self.controller):
            raise ValueError(
                f"controller={controller!r}: expected an object with init(layout) and decide(state, "
                "observation, step), for instance edgc_ddp.controllers.FixedRank(16)"
            )
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ValueError(f"model={model!r}: expected the module that DDP wraps, ddp.module")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={process_group!r}: expected what torch.distributed.new_group(...) gives, "
                "or None for the default group"
            )
        if process_group is None and isinstance(model, DistributedDataParallel):
            # A state of the default group stays without one, and can be pickled.
            own = model.process_group
            process_group = None if own is dist.group.WORLD else own
        self.options = Options(
            start_iter=start_iter,
            wire_dtype=wire_dtype,
            dense_dtype=dense_dtype,
            residual_dtype=residual_dtype,
            error_feedback=error_feedback,
            min_compression_rate=min_compression_rate,
            seed=seed,
        )
        settings = Settings(
            self.options.torch_dtype("wire_dtype"),
            error_feedback,
            float(min_compression_rate),
            None if dense_dtype == "fp32" else self.options.torch_dtype("dense_dtype"),
        )
        memory = ParameterMemory(seed, self.options.torch_dtype("residual_dtype"))
        self.engine = Engine(
            self.controller, Registry(model, memory), settings, process_group, start_iter
        )

    def metrics(self) -> dict[str, int | float | str]:
        """Where training stands, as plain numbers. Read it after ``backward`` has returned.

        ``step``: iterations averaged. ``wire_bytes``, ``dense_bytes``: bytes this rank has sent, and
        plain DDP would have. ``mean_rank``: over the matrices compressed now. ``run_mean_rank``: its
        mean over the compressed iterations. ``entropy`` (nats), ``residual`` (share of energy that
        stays behind), ``span_seconds`` (first bucket's arrival to last average): last window's means,
        nan before there are any. ``plan_digest``: equal on all ranks.
        """
        progress, engine = self.engine.progress, self.engine
        compressed = progress.compressed_steps
        return {
            "step": progress.step,
            "phase": progress.plan.phase,
            "mean_rank": engine.mean_rank(),
            "run_mean_rank": progress.rank_sum / compressed if compressed else 0.0,
            "entropy": progress.entropy,
            "residual": progress.residual,
            "span_seconds": progress.span_seconds,
            "wire_bytes": round(progress.sent_bytes),
            "dense_bytes": round(progress.dense_bytes),
            "plan_digest": progress.plan.digest(),
        }

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by; None (the default) when it never changes.

        With a loss scaler set ``state.loss_scale = scaler.get_scale()`` before the first step and after
        each ``scaler.update()``: what is still to be sent then follows the scale, and ranks are decided
        on what the unscaled gradient is like. Raises ValueError unless it is None or positive.
        """
        return self.engine.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        try:
            text = isinstance(scale, str | bytes | bool)
            known = scale is None or (not text and 0 < float(scale) < math.inf)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            known = False
        if not known:
            raise ValueError(
                f"loss_scale={scale!r}: expected a positive number, scaler.get_scale(), or None"
            )
        self.engine.loss_scale = None if scale is None else float(scale)

    def plan(self) -> dict[str, int]:
        """The rank in force for every matrix by parameter name; 0 = averaged dense."""
        return self.engine.effective_ranks()

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        """One entry per decision: step, phase, reason, entropy, residual, span_seconds, ranks."""
        # Copies: what a logger takes from a row is still there for the next decision.
        return tuple(copied(self.engine.progress.history))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors and plain values. Save one per rank, since residuals differ.

        Raises RuntimeError within a backward, where half of the iteration is in it.
        """
        # Tensors made in inference mode could not be written to when training goes on.
        with torch.inference_mode(False):
            return checkpoint.pack(self.engine, self._world_size(), self._rank())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` gave on the same rank.

        Raises:
            ValueError: it is damaged, of another rank, model, controller (its options included, but for
                ``total_steps``) or world size. Nothing was changed.
        """
        with torch.inference_mode(False):
            self.engine.end_gathered()
            misfit.check(self.engine, state_dict, self._world_size(), self._rank())
            checkpoint.unpack(self.engine, state_dict)

    def _world_size(self) -> int:
        """0 where there is no process group."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(self.engine.process_group)
        return 0

    def _rank(self) -> int | None:
        return dist.get_rank(self.engine.process_group) if self._world_size() else None

    def close(self) -> None:
        """Stop the worker thread; done at interpreter exit otherwise."""
        self.engine.close()
