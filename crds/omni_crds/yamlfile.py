"""YAML as people write it: keys in the order given, list items indented, long text folded."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Never `&id001`: two fields that share a schema are still two fields."""
        return True


def to_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
