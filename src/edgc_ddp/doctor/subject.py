"""The model that is examined: one of conf/model by name, or what a function of the user's makes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from edgc_ddp.train.model import VOCABULARY, build
from edgc_ddp.train.schema import ModelConfig

Loss: TypeAlias = "Callable[[nn.Module, int], Tensor]"
"""From the model (wrapped in DDP or not) and a step number to that step's loss."""


def known() -> list[str]:
    """The names of conf/model."""
    folder = resources.files("edgc_ddp.conf") / "model"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def find(name: str) -> Callable[[torch.device, int], tuple[nn.Module, Loss]]:
    """What makes the model and its loss on a device at a batch size.

    A function of the user's, ``module:function``, is called as ``function(device, batch)`` and returns
    the module and a function ``loss(module, step)`` that runs one forward pass.

    Raises ValueError when there is no such model.
    """
    if ":" not in name:
        return _named(name)
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{function} is not a function")
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"--model={name}: {error}; expected MODULE:FUNCTION, importable from here, that is called "
            "with a device and a batch size and returns (module, loss), loss(module, step)"
        ) from error
    return found  # type: ignore[no-any-return]


def _named(name: str) -> Callable[[torch.device, int], tuple[nn.Module, Loss]]:
    if name not in known():
        raise ValueError(
            f"--model={name}: expected one of {', '.join(known())}, or MODULE:FUNCTION of your own"
        )
    text = (resources.files("edgc_ddp.conf") / "model" / f"{name}.yaml").read_text()
    sizes: Any = OmegaConf.to_container(OmegaConf.create(text))
    config = ModelConfig(**{key: sizes[key] for key in ("width", "layers", "heads", "context")})

    def make(device: torch.device, batch: int) -> tuple[nn.Module, Loss]:
        def loss(module: nn.Module, step: int) -> Tensor:
            # The time of a step does not depend on the text.
            generator = torch.Generator().manual_seed(step)
            shape = (batch, config.context)
            bytes_BT = torch.randint(VOCABULARY, shape, generator=generator).to(device)
            logits_BTV = module(bytes_BT)
            return F.cross_entropy(logits_BTV.flatten(0, 1), bytes_BT.flatten())

        return build(config, 0, device), loss

    return make
