"""X.509: a certificate authority and serving certificates, as PEM. No clock, no files: `now` is a parameter."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# A clock that is behind ours by this much still accepts a certificate that was made now.
_BACKDATE = timedelta(hours=1)
# Fixed: a CN has at most 64 characters, and Service names with namespaces are longer (T4). Clients read the SANs.
_CA_NAME = "omni-webhooks-ca"
_SERVING_NAME = "omni-webhooks"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, PEM."""

    cert: bytes
    key: bytes


class BadCertificate(ValueError):
    """PEM that does not parse, or a key that belongs to another certificate."""


def make_authority(now: datetime, lifetime: timedelta) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # A serial number in the name keeps two authorities of a rotation apart for whoever searches a chain by name.
    serial = x509.random_serial_number()
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, _CA_NAME),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, f"{serial:x}"),
        ]
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(cert, key)


def issue(authority: Pair, hosts: Sequence[str], now: datetime, lifetime: timedelta) -> Pair:
    """A serving certificate for DNS names and IP addresses. It never outlives its authority."""
    ca, ca_key = load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _SERVING_NAME)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(min(now + lifetime, ca.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return _pair(cert, key)


def load(pair: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Raises BadCertificate."""
    try:
        cert = x509.load_pem_x509_certificate(pair.cert)
        key = serialization.load_pem_private_key(pair.key, password=None)
    except ValueError as error:
        raise BadCertificate(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise BadCertificate("the key does not belong to the certificate")
    return cert, key


def expires(cert: bytes) -> datetime:
    return x509.load_pem_x509_certificate(cert).not_valid_after_utc


def begins(cert: bytes) -> datetime:
    return x509.load_pem_x509_certificate(cert).not_valid_before_utc + _BACKDATE


def serves(cert: bytes, hosts: Iterable[str]) -> bool:
    """Whether the certificate is valid for all the hosts."""
    found = x509.load_pem_x509_certificate(cert).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {_general_name(h) for h in hosts} <= set(found)


def signed_by(cert: bytes, authority: bytes) -> bool:
    try:
        x509.load_pem_x509_certificate(cert).verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def split_bundle(pem: bytes) -> tuple[bytes, ...]:
    """The certificates of a bundle, each as PEM of its own. Raises BadCertificate."""
    if not pem.strip():
        return ()
    try:
        return tuple(_pem(cert) for cert in x509.load_pem_x509_certificates(pem))
    except ValueError as error:
        raise BadCertificate(str(error)) from error


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _pair(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    plain = serialization.NoEncryption()
    return Pair(_pem(cert), key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
