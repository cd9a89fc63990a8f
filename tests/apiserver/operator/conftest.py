"""A namespace, a profile and an operator client per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import kopf
import pytest
import pytest_asyncio

from tests.apiserver.kube import Kube
from tests.apiserver.operator.harness import CountingKube, Site, a_profile


@pytest_asyncio.fixture
async def site(kube: Kube, kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    kube.apply(a_profile())
    settings = kopf.OperatorSettings()

    def login() -> kopf.ConnectionInfo:
        info = kopf.login_with_kubeconfig(settings=settings)
        assert info is not None
        return info

    api = CountingKube(login)
    yield Site(kube, api, namespace)
    await api.close()
