"""Admission: an HTTPS server of our own (`server.py`), its certificates (`certs/`), and `rules/`, one pure rule a file.

A review goes through `decision.py` (pure: which rules, ratcheting, the answer) over `context.py` (what the rules may know
of the cluster), which is made of `cache.py` (fed by watches, and knows how old it is).
"""
