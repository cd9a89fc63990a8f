"""An image tag that moves makes two pods of one revision differ."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    images = change.new.spec.images
    for field, image in (("runtime", images.runtime), ("connector", images.connector), ("entry", images.entry)):
        last = (image or "").rsplit("/", 1)[-1]
        if image and "@" not in last and (":" not in last or last.endswith(":latest")):
            text = f"{image!r}: this tag moves; pods of one revision may run different code; use a version or a digest"
            yield Advice(f"spec.images.{field}", text)


RULE = Rule("FloatingImage", PROFILE, check)
