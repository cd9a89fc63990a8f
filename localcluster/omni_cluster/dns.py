"""CoreDNS as a pod of the cluster. Names outside the cluster do not exist for it: nothing is asked outside."""

from __future__ import annotations

from typing import Any

from omni_cluster.network import ClusterNetwork

_LABELS = {"k8s-app": "kube-dns"}
_META = {"namespace": "kube-system", "labels": _LABELS}
_PORT = 1053  # above 1024, so that the pod needs neither root nor a capability

COREFILE = f"""\
cluster.local:{_PORT} in-addr.arpa:{_PORT} ip6.arpa:{_PORT} {{
    errors
    health :8080
    ready :8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        pods insecure
        ttl 5
    }}
    cache 5
    loadbalance
    reload
}}
.:{_PORT} {{
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def build_dns(network: ClusterNetwork, image: str) -> list[dict[str, Any]]:
    """Every object of the DNS service, in an order that can be applied."""
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "coredns", **_META}},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "omni:coredns"},
         "rules": rules},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
         "metadata": {"name": "omni:coredns"},
         "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "omni:coredns"},
         "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}]},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "coredns", **_META}, "data": {"Corefile": COREFILE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns", **_META},
         "spec": {"clusterIP": network.dns_service_ip, "selector": _LABELS,
                  "ports": [{"name": "dns", "port": 53, "targetPort": _PORT, "protocol": "UDP"},
                            {"name": "dns-tcp", "port": 53, "targetPort": _PORT, "protocol": "TCP"}]}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "coredns", **_META},
         "spec": {"replicas": 1, "selector": {"matchLabels": _LABELS},
                  "template": {"metadata": {"labels": _LABELS}, "spec": _pod(image)}}},
    ]  # fmt: skip


def _pod(image: str) -> dict[str, Any]:
    return {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        # On the first node: tests take the others away.
        "nodeSelector": {"kubernetes.io/hostname": "n1"},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 2,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "coredns",
                "image": image,
                "imagePullPolicy": "Never",
                "args": ["-conf", "/etc/coredns/Corefile"],
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
                "ports": [
                    {"name": "dns", "containerPort": _PORT, "protocol": "UDP"},
                    {"name": "dns-tcp", "containerPort": _PORT, "protocol": "TCP"},
                ],
                "readinessProbe": {
                    "httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1, "failureThreshold": 30,
                },
                "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "initialDelaySeconds": 30},
                "securityContext": {
                    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }  # fmt: skip
