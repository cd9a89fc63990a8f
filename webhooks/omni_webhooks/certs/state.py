"""What a rotation does next. Pure: the Secret's content, the clock and what the API server trusts -> the next content.

Three steps, each one compare-and-swap of the Secret, so that any replica may take it and no leader is needed:
1. *announce*: a new authority joins the trusted ones; the old one still signs what is served;
2. *switch*: once both webhook configurations carry the new authority, and had time to reach every API server, it signs a
   new serving certificate, which each replica takes up when it sees it;
3. *retire*: once every replica has surely taken it up, the old authority leaves the trusted ones.
At every moment each replica serves a certificate that every API server trusts, so no call is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from omni_webhooks.certs import keys
from omni_webhooks.certs.keys import BadCertificate, Pair

# Names of kubernetes.io/tls Secrets, so that people and tools know them.
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
SIGNER_CERT, SIGNER_KEY, SINCE = "signer.crt", "signer.key", "since"


@dataclass(frozen=True, slots=True)
class Timing:
    """authority, serving: lifetimes; renewed when a third is left.

    settle: from the moment that a configuration carries an authority until every API server uses it (they watch, so this
    is milliseconds; HA API servers may lag). retire: until every replica surely serves the newest certificate.
    """

    authority: timedelta = timedelta(days=365)
    serving: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(seconds=60)
    retire: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the Secret holds. trusted: authorities, newest first. since: when the last step was taken."""

    serving: Pair
    signer: Pair
    trusted: tuple[bytes, ...]
    since: datetime

    @property
    def bundle(self) -> bytes:
        return b"".join(self.trusted)


def next_step(
    state: Certificates | None,
    hosts: Sequence[str],
    now: datetime,
    timing: Timing,
    *,
    installed_for: timedelta | None,
    rotate: bool = False,
) -> Certificates | None:
    """The content that should replace `state`, or None: nothing to do now.

    installed_for: for how long the caller has seen `state.bundle` in every webhook configuration; None: it is not there.
    rotate: somebody asked for a new authority now.
    """
    if state is None:
        return _fresh(hosts, now, timing)
    newest = state.trusted[0]
    if len(state.trusted) == 1 and (rotate or _due(newest, now)):
        authority = keys.make_authority(now, timing.authority)
        return replace(state, signer=authority, trusted=(authority.cert, *state.trusted), since=now)
    switched = keys.signed_by(state.serving.cert, newest)
    if not switched:
        settled = installed_for is not None and installed_for >= timing.settle
        if not settled and keys.expires(state.serving.cert) > now:
            return None
        return replace(state, serving=keys.issue(state.signer, hosts, now, timing.serving), since=now)
    if len(state.trusted) > 1 and now - state.since >= timing.retire:
        return replace(state, trusted=(newest,), since=now)
    if _due(state.serving.cert, now) or not keys.serves(state.serving.cert, hosts):
        # Same authority: replicas that have not seen it yet serve the old one, which stays trusted.
        return replace(state, serving=keys.issue(state.signer, hosts, now, timing.serving))
    return None


def encode(state: Certificates) -> dict[str, str]:
    """`data` of the Secret."""
    plain = {
        CERT: state.serving.cert,
        KEY: state.serving.key,
        CA: state.bundle,
        SIGNER_CERT: state.signer.cert,
        SIGNER_KEY: state.signer.key,
        SINCE: state.since.astimezone(UTC).isoformat().encode(),
    }
    return {name: base64.b64encode(value).decode() for name, value in plain.items()}


def decode(data: Mapping[str, str]) -> Certificates | None:
    """None for content that is missing or broken: it is made anew, whoever emptied it (T21, T54)."""
    try:
        plain = {name: base64.b64decode(data[name], validate=True) for name in (CERT, KEY, CA, SIGNER_CERT, SIGNER_KEY)}
        since = datetime.fromisoformat(base64.b64decode(data[SINCE], validate=True).decode())
        state = Certificates(
            serving=Pair(plain[CERT], plain[KEY]),
            signer=Pair(plain[SIGNER_CERT], plain[SIGNER_KEY]),
            trusted=keys.split_bundle(plain[CA]),
            since=since,
        )
        keys.load(state.serving)
        keys.load(state.signer)
    except (KeyError, ValueError, binascii.Error, BadCertificate):
        return None
    trusts_what_it_serves = any(keys.signed_by(state.serving.cert, authority) for authority in state.trusted)
    if since.tzinfo is None or not trusts_what_it_serves or state.trusted[0] != state.signer.cert:
        return None
    return state


def _fresh(hosts: Sequence[str], now: datetime, timing: Timing) -> Certificates:
    authority = keys.make_authority(now, timing.authority)
    return Certificates(keys.issue(authority, hosts, now, timing.serving), authority, (authority.cert,), now)


def _due(cert: bytes, now: datetime) -> bool:
    start, end = keys.begins(cert), keys.expires(cert)
    return now >= end - (end - start) / 3
