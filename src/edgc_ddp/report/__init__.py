"""What a run did, as one self-contained page: ``python -m edgc_ddp.report RUN_FOLDER``."""

from edgc_ddp.report.compare import write_comparison
from edgc_ddp.report.load import Run, load_run
from edgc_ddp.report.page import write_report

__all__ = ["Run", "load_run", "write_comparison", "write_report"]
