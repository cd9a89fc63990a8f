"""Every rule of admission, in the order in which their findings are told. One file a rule; this table is all of them.

A rule that is not listed here does not run: a unit test compares the table with the files of this folder (T55).
"""

from __future__ import annotations

from omni_webhooks.rules import (
    budget_in_use,
    child_names,
    cut_answers,
    device_memory,
    device_requested,
    device_vendor,
    drops_support,
    fits_cluster,
    fits_devices,
    floating_image,
    follower_scaled,
    full_device,
    host_path_volume,
    locked_memory,
    namespace_taken,
    privileged_scheduling,
    profile_allowed,
    profile_exists,
    profile_in_use,
    prometheus_url,
    replicas_within_bounds,
    rollout_can_move,
    scale_within_budget,
    scaling_beyond_budget,
    sleeping_stage,
    spec_resolves,
    stage_of_pipeline,
    system_namespace,
    tenant_budget,
    tenant_references,
    unknown_model,
    unpinned_model,
    unsupported_runtime,
    vendor_fixed,
)
from omni_webhooks.rules.rule import AnyRule

RULES: tuple[AnyRule, ...] = (
    # OmniPipeline: what is refused
    spec_resolves.RULE,
    profile_allowed.RULE,
    privileged_scheduling.RULE,
    child_names.RULE,
    tenant_budget.RULE,
    fits_devices.RULE,
    fits_cluster.RULE,
    # OmniPipeline: what is legal but unwise
    profile_exists.RULE,
    unpinned_model.RULE,
    unknown_model.RULE,
    sleeping_stage.RULE,
    full_device.RULE,
    rollout_can_move.RULE,
    cut_answers.RULE,
    scaling_beyond_budget.RULE,
    # OmniStage
    replicas_within_bounds.RULE,
    scale_within_budget.RULE,
    follower_scaled.RULE,
    stage_of_pipeline.RULE,
    # OmniRuntimeProfile
    vendor_fixed.RULE,
    device_requested.RULE,
    device_memory.RULE,
    prometheus_url.RULE,
    device_vendor.RULE,
    unsupported_runtime.RULE,
    floating_image.RULE,
    host_path_volume.RULE,
    locked_memory.RULE,
    drops_support.RULE,
    profile_in_use.RULE,
    # OmniTenant
    namespace_taken.RULE,
    system_namespace.RULE,
    tenant_references.RULE,
    budget_in_use.RULE,
)
