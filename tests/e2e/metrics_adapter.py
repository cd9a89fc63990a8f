"""An adapter as an HPA needs one, small and for one test: external.metrics.k8s.io over HTTPS, the standard library alone.

    python metrics_adapter.py CERTIFICATE KEY URL

It serves one real figure, `omni_requests`: what the entry at URL says of itself, running and waiting. An installation
would have prometheus-adapter or KEDA in its place; the HPA, its controller and /scale are those of Kubernetes.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP = "external.metrics.k8s.io/v1beta1"
METRIC = "omni_requests"
FAMILIES = ("vllm_omni:num_requests_running", "vllm_omni:num_requests_waiting")
PORT = 8443


def requests_of(text: str) -> int:
    """Sum of the families' samples in an exposition."""
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(FAMILIES)))


def answer(path: str, url: str) -> dict[str, Any]:
    if path == f"/apis/{GROUP}":
        resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [resource]}
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        value = requests_of(response.read().decode())
    item = {
        "metricName": METRIC,
        "metricLabels": {},
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": str(value),
    }
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [item]}


class Handler(BaseHTTPRequestHandler):
    url = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = path == f"/apis/{GROUP}" or path.endswith(f"/{METRIC}")
        body = json.dumps(answer(path, self.url) if known else {}).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(certificate: str, key: str, url: str) -> None:
    Handler.url = url
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("", PORT), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
