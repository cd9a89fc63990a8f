"""Discrete-event simulator of a multi-stage pipeline under autoscaling policies; see docs/autoscaling.md."""
