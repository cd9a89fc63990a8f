"""Admission: an HTTPS server of our own (`server.py`), its certificates (`certs.py`), and `rules/`, one pure rule a file.

Not here yet. Until then the CRDs refuse what one object can tell, and the operator reports the rest, which needs
topologies and profiles, as condition Stalled with the same errors: both will call `omni_runtime.deploy.resolve`.
"""
