"""What each pattern of the schemas accepts and refuses. A pattern without an entry here fails the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omni_crds.v1alpha1.base import (
    DECIMAL,
    DNS_LABEL,
    DNS_SUBDOMAIN,
    ENV_NAME,
    FRACTION,
    IDENTIFIER,
    LABEL_VALUE,
    NO_CONTROLS,
    PRINTABLE,
    QUANTITY,
)
from omni_crds.v1alpha1.conditions import CAMEL_CASE, TIMESTAMP
from omni_crds.v1alpha1.graph import TAINT_KEY
from omni_crds.v1alpha1.pipeline import HEADER_NAME, HTTP_URL, MODEL_URI
from omni_crds.v1alpha1.runtimeprofile import ABSOLUTE_PATH, RDMA_DEVICE, RESOURCE_NAME


@dataclass(frozen=True)
class PatternExamples:
    """`fill(n)` has n characters and matches wherever n is within the bounds of the fields that use the pattern."""

    fill: Callable[[int], str]
    accepted: tuple[str, ...]
    refused: tuple[str, ...]


def padded(prefix: str, letter: str = "a", suffix: str = "") -> Callable[[int], str]:
    return lambda n: (prefix + letter * max(0, n - len(prefix) - len(suffix)) + suffix)[:n] if n else ""


PATTERNS: dict[str, PatternExamples] = {
    DNS_LABEL: PatternExamples(padded(""), ("a", "0", "a-b", "a--0"), ("A", "-a", "a-", "a.b", "a_b", "é", "a\n")),
    DNS_SUBDOMAIN: PatternExamples(
        padded(""),
        ("a", "qwen3-omni.v2", "1.2.3", "a-b.c-d"),
        ("A", ".a", "a.", "a..b", "a.-b", "a-.b", "a/b", "a_b", "ä"),
    ),
    IDENTIFIER: PatternExamples(padded(""), ("a", "qwen3_omni_moe", "a1_"), ("A", "1a", "_a", "a-b", "a b", "a\n")),
    ENV_NAME: PatternExamples(padded(""), ("HF_HOME", "_a", "a1"), ("1A", "A-B", "A=B", "A B", "Ä")),
    LABEL_VALUE: PatternExamples(padded(""), ("", "a", "A-b_c.D", "0"), ("-a", "a-", "a b", "a/b", "ä", "a\n")),
    NO_CONTROLS: PatternExamples(
        padded(""), ("", "a b", '{"x": 1}', "line\n\tline", "ä🙂"), ("a\x00b", "\x1b[31mred", "\x7f", "\x85", "a\r\n")
    ),
    PRINTABLE: PatternExamples(
        padded(""), ("registry:5000/a/b@sha256:0", "main", "!~"), ("a b", "\ta", "a\n", "ä", "a\x7f")
    ),
    QUANTITY: PatternExamples(
        padded("", "1"),
        ("0", "1", "500m", "1.5", "16Gi", "2E"),
        ("-1", "+1", "1e3", ".5", "1.", "1 Gi", "1gi", "Gi", "1GiB", "١"),
    ),
    FRACTION: PatternExamples(
        lambda n: "1" if n == 1 else padded("0.", "1")(n),
        ("1", "1.0", "1.000", "0.1", "0.6", "0.25", "0.05", "0.001", "0.999", "0.60"),
        ("0", "0.0", "0.000", "1.1", "2", ".5", "-0.5", "0,5", "5e-1", "60%", "0.٦"),
    ),
    DECIMAL: PatternExamples(
        lambda n: "1234.123456"[:n],
        ("1", "0.8", "0.001", "10", "9999.999", "1.50"),
        ("0", "0.000", "-1", "00.5", "01", "1.", ".5", "1e3", "1,5", "٣"),
    ),
    CAMEL_CASE: PatternExamples(
        padded("A"), ("A", "Ready", "HTTP2Ready"), ("ready", "Not Ready", "Not-Ready", "1A", "Ä")
    ),
    TIMESTAMP: PatternExamples(
        lambda n: (
            "2026-01-01T00:00:00Z"
            if n == 20
            else "2026-01-01T00:00:00." + "1" * (n - 21) + "Z"
            if n > 20
            else "2026-01-01T00:00:00Z"[:n]
        ),
        ("2026-01-01T00:00:00Z", "2026-12-31T23:59:59.123456Z"),
        ("2026-01-01 00:00:00Z", "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00.Z", "yesterday, about ten"),
    ),
    MODEL_URI: PatternExamples(
        padded("file:///"),
        (
            "hf://Qwen/Qwen3-Omni-30B-A3B-Instruct",
            "hf://a/b",
            "pvc://models",
            "pvc://models/qwen/omni",
            "pvc://my.claim-2/",
            "file:///opt/models/a b"[:18],
            "packaged://smol-omni",
        ),
        (
            "Qwen/Qwen3-Omni",
            "hf://Qwen",
            "hf:///b",
            "hf://a/b/c",
            "hf://a/",
            "https://host/model",
            "file://relative",
            "file:///",
            "file:///with space",
            "packaged://",
            "packaged://a/b",
            "packaged://.hidden",
            "pvc://",
            "pvc://Claim",
            " hf://a/b",
            "hf://a/b\n",
            "hf://ä/b",
        ),
    ),
    HEADER_NAME: PatternExamples(
        padded(""), ("x-omni-tenant", "a"), ("X-Tenant", "1a", "-a", "a_b", "a b", "ä", "a\n")
    ),
    HTTP_URL: PatternExamples(
        padded("http://"),
        ("http://collector:4318", "https://otel.example.com/v1"),
        ("collector:4318", "grpc://collector:4317", "https://", "http://a b", "http://ä", "http://a\n"),
    ),
    TAINT_KEY: PatternExamples(
        padded(""), ("nvidia.com/gpu", "a", "node.kubernetes.io/not-ready"), ("a b", "a=b", "ä")
    ),
    ABSOLUTE_PATH: PatternExamples(padded("/"), ("/a", "/var/lib/models"), ("a/b", "/with space", "~/x", "/ä")),
    r"^[0-9a-f]*$": PatternExamples(padded(""), ("", "0", "0af9"), ("A", "g", "0x1", "a b", "a\n")),
    RDMA_DEVICE: PatternExamples(
        padded(""), ("mlx5_0", "rocep1s0f0", "hfi1_0", "0"), ("_0", "-a", "mlx5_0,mlx5_1", "a b", "a/b", "ä", "a\n")
    ),
    RESOURCE_NAME: PatternExamples(
        padded("a/"),
        ("nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910B", "nvidia.com/mig-1g.10gb"),
        ("gpu", "/gpu", "nvidia.com/", "nvidia.com/a/b", "Nvidia.com/gpu", "nvidia.com/-a"),
    ),
}
