"""Prometheus families, one file per process."""
