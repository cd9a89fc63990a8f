"""Local Kubernetes clusters: an existing one, kind, or our own nodes built from Go modules.

Nothing here imports the operator, the CRD types or the runtime.
"""
