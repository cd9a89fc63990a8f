"""HTTPS towards the API server: POST /validate and POST /mutate, AdmissionReview in and out. Decides nothing itself."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from aiohttp import web

from omni_operator.kinds import STAGE, JsonObject
from omni_webhooks import logs, metrics
from omni_webhooks.context import PROFILES, TENANTS
from omni_webhooks.decision import Decision, decide
from omni_webhooks.defaults import default_patch
from omni_webhooks.listener import ticks
from omni_webhooks.review import (
    BadReview,
    Call,
    parse_call,
    patch_answer,
    scale_review,
    unchecked_answer,
    verdict_answer,
)
from omni_webhooks.rules.rule import AnyRule
from omni_webhooks.site import Site

MAX_REVIEW_BYTES = 8 * 2**20  # old and new object, each up to what etcd stores
Answer = Callable[[Call, float], Awaitable[JsonObject]]


class AdmissionServer:
    """Answers reviews with the rules over the site. Dry runs are answered alike: an answer changes nothing."""

    def __init__(self, site: Site, rules: Iterable[AnyRule], stale_seconds: float) -> None:
        self._site = site
        self._rules = tuple(rules)
        self._stale = stale_seconds
        self._open = 0
        self._stirred = False

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        app.add_routes([web.post("/validate", self._validate), web.post("/mutate", self._mutate)])
        return app

    def stir(self) -> None:
        """A connection came, or a call began or ended."""
        self._stirred = True

    async def quiet(self, seconds: float) -> None:
        """Until no review is being answered, and no connection came for so long."""

        def stirred() -> bool:
            was, self._stirred = self._stirred, False
            return was

        stirred()
        while await ticks(seconds, stirred) or self._open:
            pass

    async def _validate(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._verdict)

    async def _mutate(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._defaults)

    async def _answer(self, request: web.Request, answer: Answer) -> web.Response:
        started = time.monotonic()
        self._open += 1
        self.stir()
        metrics.IN_FLIGHT.inc()
        try:
            call = parse_call(await request.read())
            try:
                body = await answer(call, started)
            except Exception as error:  # noqa: BLE001 - a mistake of ours must not stop a platform's writes
                logs.error("review.failed", exc_info=True, kind=call.kind, object="/".join(call.key))
                metrics.ADMISSIONS.labels(call.kind, "error", type(error).__name__).inc()
                body = unchecked_answer(call, "the admission webhook itself failed; see its log")
            metrics.ADMISSION_SECONDS.labels(call.kind).observe(time.monotonic() - started)
            return _last_of_its_connection(web.json_response(body))
        except BadReview as error:
            return _last_of_its_connection(web.json_response({"error": str(error)}, status=400))
        finally:
            metrics.IN_FLIGHT.dec()
            self._open -= 1
            self.stir()

    async def _verdict(self, call: Call, started: float) -> JsonObject:
        review = call.review()
        if call.kind == "Scale" and call.subresource == "scale":
            stage = await self._site.stage(call.key)
            if stage is None:
                return unchecked_answer(call, f"{STAGE.kind} {call.key[1]} is not known yet")
            review = scale_review(call, stage)
        seen = self._site.context()
        decision = decide(review, self._rules, seen, self._stale)
        if decision.errors and decision.needs & {PROFILES, TENANTS}:
            # Before a refusal, the small facts that it rests on are read again: a watch may lag.
            context = await self._site.confirm(started, seen)
            if context is not None:
                decision = decide(review, self._rules, context, self._stale)
        _count(review.kind, decision)
        return verdict_answer(call, decision)

    async def _defaults(self, call: Call, _: float) -> JsonObject:
        patch = default_patch(
            call.kind, call.key[0], call.operation, call.object, call.old or None, self._site.context()
        )
        return patch_answer(call, patch)


def _last_of_its_connection(response: web.Response) -> web.Response:
    """With `Connection: close`: no connection waits for a second call.

    HTTP/1.1 cannot close an idle connection without a race: a call that is sent at that moment is lost, and the API
    server does not repeat a POST. A storm during a rollout showed it. A handshake costs a millisecond or two.
    """
    response.force_close()
    return response


def _count(kind: str, decision: Decision) -> None:
    if decision.errors:
        for rule in dict.fromkeys(rule for rule, _ in decision.errors):
            metrics.ADMISSIONS.labels(kind, "refused", rule).inc()
    elif decision.warnings:
        for rule in dict.fromkeys(rule for rule, _ in decision.warnings):
            metrics.ADMISSIONS.labels(kind, "warned", rule).inc()
    else:
        metrics.ADMISSIONS.labels(kind, "allowed", "").inc()


def select_rules(rules: Sequence[AnyRule], disabled: Iterable[str]) -> tuple[AnyRule, ...]:
    """Without the disabled ones. Raises ValueError for a name that no rule has."""
    off = set(disabled)
    unknown = off - {rule.name for rule in rules}
    if unknown:
        raise ValueError(f"no such rule: {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in rules)}")
    return tuple(rule for rule in rules if rule.name not in off)
