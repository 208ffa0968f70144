"""A wrapper that lets another controller decide about some matrices and keeps the rest dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from edgc_ddp.controllers.options import bad_option
from edgc_ddp.decisions import Controller, Layout, Observation, Plan, State, is_controller


@dataclass(frozen=True)
class Selective:
    """``inner`` decides about the matrices that match ``compress`` and not ``dense``.

    Patterns are shell-style (``*``, ``?``, ``[abc]``), case-sensitive, on parameter names. The
    error curve that ``inner`` sees still sums over every matrix the engine measures.

    Raises ValueError for patterns that are not a sequence of texts, or no ``inner`` controller;
    ``init`` raises it for a pattern that matches no matrix.

    >>> from edgc_ddp.controllers import FixedRank
    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = Selective(FixedRank(8), dense=("*wte*",))
    >>> state = controller.init(Layout((MatrixSpec("wte", 64, 99), MatrixSpec("h.attn", 64, 64))))
    >>> controller.decide(state, None, step=0)[1].ranks
    {'wte': 0, 'h.attn': 8}
    """

    inner: Controller
    compress: Sequence[str] = ("*",)
    dense: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not is_controller(self.inner):
            remedy = "give one, as in Selective(FixedRank(8), dense=('*wte*',))"
            raise bad_option("inner", self.inner, "a controller", remedy)
        for option in ("compress", "dense"):
            given = getattr(self, option)
            if (
                isinstance(given, str)
                or not isinstance(given, Sequence)
                or not all(isinstance(pattern, str) for pattern in given)
            ):
                remedy = f"write {option}=('*.attn.*',)"
                raise bad_option(option, given, "a sequence of name patterns", remedy)
            object.__setattr__(self, option, tuple(given))
        if not self.compress:
            raise bad_option("compress", (), "at least one pattern", "use Dense() instead")

    def init(self, layout: Layout) -> State:
        names = [matrix.name for matrix in layout.matrices]
        for option, patterns in (("compress", self.compress), ("dense", self.dense)):
            for pattern in patterns:
                # The default "*" of a model without matrices is nobody's mistake.
                if names and not any(fnmatchcase(name, pattern) for name in names):
                    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                    remedy = f"correct or drop it; the names are: {shown}"
                    raise bad_option(option, pattern, "a pattern that matches a matrix", remedy)
        followed = tuple(matrix for matrix in layout.matrices if self._follows(matrix.name))
        return {"names": names, "inner": self.inner.init(replace(layout, matrices=followed))}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        inner_state, plan = self.inner.decide(state["inner"], observation, step)
        ranks = {name: plan.ranks.get(name, 0) for name in state["names"]}
        return {**state, "inner": inner_state}, replace(plan, ranks=ranks)

    def _follows(self, name: str) -> bool:
        wanted = any(fnmatchcase(name, pattern) for pattern in self.compress)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.dense)
