"""Low-rank gradient averaging for DDP at a rank that the gradient's entropy chooses (EDGC).

>>> from edgc_ddp import EDGCState, edgc_hook
>>> # ddp.register_comm_hook(EDGCState(model=ddp.module), edgc_hook)
"""

from edgc_ddp.hook import edgc_hook
from edgc_ddp.state import EDGCState

__version__ = "0.1.0"
__all__ = ["EDGCState", "edgc_hook"]
