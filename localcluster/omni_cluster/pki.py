"""Certificates of a cluster: authorities, server and client certificates, the key that signs tokens."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from omni_cluster.processes import write_atomically

_CA_LIFE = datetime.timedelta(days=3650)
_LEAF_LIFE = datetime.timedelta(days=365)
_RENEW_BEFORE = datetime.timedelta(days=30)
_BACKDATE = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Paths of a certificate and its key, both PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Subject:
    """Who a certificate names: Kubernetes reads the user from `name` and its groups from `groups`."""

    name: str
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """DNS names and IP addresses; a certificate with hosts may serve, one without is for clients only."""


def ensure_authority(folder: Path, name: str) -> KeyPair:
    """A certificate authority, made once."""
    pair = KeyPair(folder / f"{name}.crt", folder / f"{name}.key")
    if pair.cert.exists() and pair.key.exists():
        return pair
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key.public_key(), _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(pair.key, key)
    write_atomically(pair.cert, certificate.public_bytes(serialization.Encoding.PEM).decode(), 0o644)
    return pair


def ensure_certificate(folder: Path, file_name: str, authority: KeyPair, subject: Subject) -> KeyPair:
    """A certificate for `subject`, made anew when hosts, names or authority changed or it ends within 30 days."""
    pair = KeyPair(folder / f"{file_name}.crt", folder / f"{file_name}.key")
    ca = x509.load_pem_x509_certificate(authority.cert.read_bytes())
    if pair.cert.exists() and pair.key.exists():
        existing = x509.load_pem_x509_certificate(pair.cert.read_bytes())
        if is_usable(existing, ca, subject, datetime.datetime.now(datetime.UTC)):
            return pair
    ca_key = serialization.load_pem_private_key(authority.key.read_bytes(), password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if subject.hosts else [])
    builder = (
        _builder(_name(subject), ca.subject, key.public_key(), _LEAF_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if subject.hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in subject.hosts]), critical=False)
    _write_key(pair.key, key)
    pem = builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    write_atomically(pair.cert, pem, 0o644)
    return pair


def is_usable(certificate: x509.Certificate, ca: x509.Certificate, subject: Subject, now: datetime.datetime) -> bool:
    """Whether a certificate still names this subject, comes from this authority and lives long enough."""
    if certificate.not_valid_after_utc - now < _RENEW_BEFORE or certificate.subject != _name(subject):
        return False
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    return names == [_host(host) for host in subject.hosts]


def ensure_token_key(folder: Path) -> KeyPair:
    """The key pair that signs and verifies service account tokens; `cert` is the public key here."""
    pair = KeyPair(folder / "sa.pub", folder / "sa.key")
    if not (pair.cert.exists() and pair.key.exists()):
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        _write_key(pair.key, key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        write_atomically(pair.cert, public.decode(), 0o644)
    return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, public: CertificatePublicKeyTypes, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(subject: Subject) -> x509.Name:
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in subject.groups]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, subject.name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_atomically(path, pem.decode(), 0o600)
