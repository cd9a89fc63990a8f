"""Pure decisions: Observed + clock -> Plan, and what was seen -> status. One concern a file; no I/O anywhere below."""

from omni_operator.plan.model import Plan
from omni_operator.plan.pipeline import plan_pipeline

__all__ = ["Plan", "plan_pipeline"]
