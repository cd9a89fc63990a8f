"""Certificates: what a rotation does next, and that at every moment what is served is what is trusted."""

from __future__ import annotations

import asyncio
import base64
import copy
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_operator.errors import AlreadyExists, Conflict, NotFound
from omni_operator.kinds import SECRET, JsonObject, Kind
from omni_webhooks.certs import keys, state
from omni_webhooks.certs.keys import BadCertificate
from omni_webhooks.certs.rotation import (
    MUTATING,
    ROTATE_ANNOTATION,
    VALIDATING,
    SelfManaged,
    Served,
    load_pair,
    server_context,
)
from omni_webhooks.certs.state import Certificates, Timing, decode, encode, next_step

NOW = datetime(2026, 3, 1, tzinfo=UTC)
HOSTS = ("omni-operator-webhooks.omni-system.svc", "127.0.0.1")
TIMING = Timing()
SETTLED = TIMING.settle


def fresh(now: datetime = NOW) -> Certificates:
    made = next_step(None, HOSTS, now, TIMING, installed_for=None)
    assert made is not None
    return made


def step(
    current: Certificates, now: datetime, installed_for: timedelta | None = SETTLED, rotate: bool = False
) -> Certificates | None:
    return next_step(current, HOSTS, now, TIMING, installed_for=installed_for, rotate=rotate)


def trusted(current: Certificates) -> bool:
    return any(keys.signed_by(current.serving.cert, ca) for ca in current.trusted)


def test_the_first_certificate_is_for_the_service_and_signed_by_what_is_trusted() -> None:
    made = fresh()
    assert trusted(made)
    assert keys.serves(made.serving.cert, HOSTS)
    assert not keys.serves(made.serving.cert, ["other.example.com"])
    assert step(made, NOW) is None, "nothing to do"


def test_long_names_fit() -> None:
    """T4: a CN has 64 characters at most, the name of a Service with its namespace 127 and more."""
    host = f"{'a' * 63}.{'b' * 63}.svc"
    made = next_step(None, [host], NOW, TIMING, installed_for=None)
    assert made is not None
    assert keys.serves(made.serving.cert, [host])


class TestRotation:
    def test_in_three_steps(self) -> None:
        first = fresh()
        announced = step(first, NOW, rotate=True)
        assert announced is not None
        assert len(announced.trusted) == 2
        assert announced.serving == first.serving, "what is served stays until everybody trusts the new authority"
        assert step(announced, NOW, installed_for=None) is None, "not installed yet"
        assert step(announced, NOW, installed_for=SETTLED / 2) is None, "not known to every API server yet"
        switched = step(announced, NOW + SETTLED, rotate=False)
        assert switched is not None
        assert keys.signed_by(switched.serving.cert, switched.trusted[0])
        assert len(switched.trusted) == 2, "another replica may still serve the old one"
        early = NOW + SETTLED + TIMING.retire - timedelta(seconds=1)
        assert step(switched, early) is None
        retired = step(switched, early + timedelta(seconds=1))
        assert retired is not None
        assert retired.trusted == (switched.trusted[0],)
        assert retired.serving == switched.serving
        assert step(retired, early + timedelta(seconds=2)) is None

    def test_an_authority_is_renewed_when_a_third_is_left(self) -> None:
        first = fresh()
        due = NOW + TIMING.authority * 2 / 3
        renewed = fresh_serving(first, due - timedelta(days=1))
        assert step(renewed, due - timedelta(days=1)) is None
        announced = step(renewed, due)
        assert announced is not None
        assert len(announced.trusted) == 2

    def test_a_serving_certificate_is_renewed_by_the_same_authority(self) -> None:
        first = fresh()
        renewed = step(first, NOW + TIMING.serving * 2 / 3)
        assert renewed is not None
        assert renewed.serving != first.serving
        assert renewed.trusted == first.trusted

    def test_another_name_of_the_service_is_noticed(self) -> None:
        """T54: the release was renamed."""
        renewed = next_step(fresh(), ("other.ns.svc",), NOW, TIMING, installed_for=SETTLED)
        assert renewed is not None
        assert keys.serves(renewed.serving.cert, ["other.ns.svc"])

    def test_asking_twice_rotates_once(self) -> None:
        announced = step(fresh(), NOW, rotate=True)
        assert announced is not None
        assert step(announced, NOW, installed_for=None, rotate=True) is None


def fresh_serving(current: Certificates, now: datetime) -> Certificates:
    return Certificates(keys.issue(current.signer, HOSTS, now, TIMING.serving), current.signer, current.trusted, now)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans()), max_size=12))
def test_whatever_happens_what_is_served_is_trusted(events: list[tuple[int, bool, bool]]) -> None:
    """Days pass, configurations carry the bundle or do not, somebody asks for a rotation."""
    current, now = fresh(), NOW
    for days, installed, rotate in events:
        now += timedelta(days=days)
        wanted = step(current, now, SETTLED if installed else None, rotate)
        if wanted is None:
            continue
        assert trusted(wanted)
        # An API server that has only seen the former bundle still trusts what is served, unless nobody could help it.
        former = any(keys.signed_by(wanted.serving.cert, ca) for ca in current.trusted)
        assert former or keys.expires(current.serving.cert) <= now
        assert decode(encode(wanted)) == wanted
        current = wanted


class TestSecret:
    def test_round_trip(self) -> None:
        made = fresh()
        assert decode(encode(made)) == made

    @pytest.mark.parametrize(
        "name", [state.CERT, state.KEY, state.CA, state.SIGNER_CERT, state.SIGNER_KEY, state.SINCE]
    )
    @pytest.mark.parametrize("value", [None, "", "AAAA", "%"])
    def test_a_broken_secret_is_no_secret(self, name: str, value: str | None) -> None:
        """T21: a Git tool emptied it; it is made anew instead of crashing for ever."""
        data = encode(fresh())
        if value is None:
            del data[name]
        else:
            data[name] = value
        assert decode(data) is None

    def test_a_key_of_another_certificate(self) -> None:
        one, other = encode(fresh()), encode(fresh())
        assert decode({**one, state.KEY: other[state.KEY]}) is None
        assert decode({**one, state.CA: other[state.CA]}) is None


class TestTls:
    def test_a_client_that_trusts_the_bundle_is_served_before_during_and_after(self) -> None:
        """In memory, with real handshakes: each bundle against each certificate that is served while it is installed."""
        first = fresh(datetime.now(UTC))
        announced = step(first, first.since, rotate=True)
        assert announced is not None
        switched = step(announced, first.since + SETTLED)
        assert switched is not None
        for bundle, serving in [
            (first.bundle, first.serving),
            (announced.bundle, first.serving),
            (announced.bundle, switched.serving),
            (switched.bundle, first.serving),
        ]:
            assert handshake(bundle, serving)
        assert not handshake(first.bundle, switched.serving), "the check itself can fail"

    def test_a_certificate_is_exchanged_while_the_context_is_in_use(self) -> None:
        now = datetime.now(UTC)
        one, other = fresh(now), fresh(now)
        served = Served()
        served.use(one.serving)
        assert handshake(one.bundle, served.context)
        served.use(other.serving)
        assert handshake(other.bundle, served.context)
        assert not handshake(one.bundle, served.context)


def handshake(bundle: bytes, server: keys.Pair | ssl.SSLContext) -> bool:
    if isinstance(server, keys.Pair):
        context = server_context()
        load_pair(context, server)
    else:
        context = server
    client = ssl.create_default_context(cadata=bundle.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


def test_pem_that_does_not_fit_together_is_refused() -> None:
    one, other = fresh(), fresh()
    with pytest.raises(BadCertificate):
        keys.load(keys.Pair(one.serving.cert, other.serving.key))
    with pytest.raises(ssl.SSLError):
        load_pair(server_context(), keys.Pair(one.serving.cert, other.serving.key))


class SharedApi:
    """Compare-and-swap as the API server does it. `together`: the first two to read a configuration read it before either
    writes."""

    def __init__(self, *, together: bool = False) -> None:
        body = {"metadata": {"resourceVersion": "1"}, "webhooks": [{"name": "a", "clientConfig": {}}]}
        self._stored: dict[str, JsonObject] = {kind.kind: copy.deepcopy(body) for kind in (VALIDATING, MUTATING)}
        self._readers = self.reads = 0
        self._both = asyncio.Event()
        if not together:
            self._both.set()
        self.conflicts = 0

    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        self.reads += 1
        if kind.kind not in self._stored:
            raise NotFound(name)
        found = copy.deepcopy(self._stored[kind.kind])
        if kind == VALIDATING:
            self._readers += 1
            if self._readers >= 2:
                self._both.set()
            await self._both.wait()
        return found

    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject:
        if kind.kind in self._stored:
            raise AlreadyExists("there is one")
        self._stored[kind.kind] = {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}
        return copy.deepcopy(self._stored[kind.kind])

    async def replace(self, kind: Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        now = self._stored[kind.kind]["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != now:
            self.conflicts += 1
            raise Conflict("somebody was faster")
        self._stored[kind.kind] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(int(now) + 1)}}
        return copy.deepcopy(self._stored[kind.kind])

    def certificates(self) -> Certificates:
        found = decode(self._stored[SECRET.kind]["data"])
        assert found is not None
        return found

    def trusted(self) -> list[str]:
        """What each webhook of each configuration carries."""
        both = (self._stored[kind.kind]["webhooks"] for kind in (VALIDATING, MUTATING))
        return [webhook["clientConfig"]["caBundle"] for webhooks in both for webhook in webhooks]

    def remove(self, kind: Kind) -> None:
        del self._stored[kind.kind]

    def ask_for_rotation(self) -> None:
        self._stored[SECRET.kind]["metadata"]["annotations"] = {ROTATE_ANNOTATION: "now"}


def replica_of(
    api: SharedApi, now: Callable[[], datetime] = lambda: datetime.now(UTC), poll_seconds: float = 1.0
) -> SelfManaged:
    return SelfManaged(
        api,  # type: ignore[arg-type]
        Served(),
        namespace="default",
        secret="tls",
        configurations=((VALIDATING, "omni"), (MUTATING, "omni")),
        hosts=HOSTS,
        poll_seconds=poll_seconds,
        now=now,
    )


async def test_who_loses_the_race_for_a_configuration_is_ready_in_the_same_round() -> None:
    """Else it would not be ready until its next look, and the other one may be the one that stops (T53)."""
    api = SharedApi(together=True)
    replicas = [replica_of(api) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*(replica.sync() for replica in replicas)), 30)
    assert api.conflicts >= 1, "there was a race"
    assert all(r._installed is not None for r in replicas)


class PausedApi(SharedApi):
    """One replica's way to the same API server; its call number `at` (from 0) is put off until it is let go."""

    def __init__(self, shared: SharedApi, at: int) -> None:
        self._shared, self._left = shared, at
        self.reached, self.let_go = asyncio.Event(), asyncio.Event()

    async def _turn(self) -> SharedApi:
        self._left -= 1
        if self._left == -1:
            self.reached.set()
            await self.let_go.wait()
        return self._shared

    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        return await (await self._turn()).get(kind, namespace, name)

    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject:
        return await (await self._turn()).create(kind, namespace, body)

    async def replace(self, kind: Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        return await (await self._turn()).replace(kind, namespace, name, body)


CALLS_OF_A_STEP = 6  # three reads, the Secret and two configurations written


@pytest.mark.parametrize("steps", [1, 2, 3], ids=["announced", "switched", "retired"])
@pytest.mark.parametrize("at", range(CALLS_OF_A_STEP))
async def test_a_replica_that_stood_still_during_a_rotation_takes_nothing_back(at: int, steps: int) -> None:
    """Its process or its node stops in the middle of a round, the other one goes on, and then it ends its round. If the
    configurations trusted anything else then than what the Secret says, calls would fail until somebody's next (T53)."""
    shared, now = SharedApi(), [NOW]

    going = replica_of(shared, lambda: now[0])
    await going.sync()
    shared.ask_for_rotation()
    paused = PausedApi(shared, at)
    standing = asyncio.create_task(replica_of(paused, lambda: now[0]).sync())
    async with asyncio.timeout(30):
        await paused.reached.wait()
        for _ in range(steps):
            await going.sync()
            now[0] += TIMING.retire
        paused.let_go.set()
        await standing
    bundle = base64.b64encode(shared.certificates().bundle).decode()
    assert set(shared.trusted()) == {bundle}


@pytest.mark.parametrize("kind", [VALIDATING, MUTATING], ids=lambda kind: kind.kind)
async def test_a_missing_configuration_keeps_a_new_replica_unready_and_no_other(kind: Kind) -> None:
    """It is missing for all replicas at once, and calls of the other configuration must find somebody (T53)."""
    api = SharedApi()
    old = replica_of(api, poll_seconds=0.01)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = [group.create_task(old.run())]
        while old.problem() is not None:  # noqa: ASYNC110 - readiness is asked for, and sets no event
            await asyncio.sleep(0.01)
        api.remove(kind)
        new = replica_of(api, poll_seconds=0.01)
        running.append(group.create_task(new.run()))
        while "does not exist" not in (new.problem() or ""):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        rounds = api.reads
        while api.reads < rounds + 10:
            assert old.problem() is None
            assert new.problem() is not None
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
