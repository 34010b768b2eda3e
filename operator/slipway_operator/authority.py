"""Makes and reads certificates: the authorities of this installation, and the certificates that they sign (ADR 144).

Keys are ECDSA P-256. The texts are PEM; everything about time is decided in `core.certificates`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slipway_operator.core.certificates import AUTHORITY_LIFE, BACKDATED, Certificate, Lifetime, certificate_end

ORGANIZATION = "Slipway"


class CertificateUnreadable(ValueError):  # noqa: N818  reads as a fact where it is raised
    """A stored certificate or key is not what we write; the message says which part, never its content."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def new_authority(now: datetime) -> Pair:
    """Make an authority that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"slipway internal CA {now:%Y-%m-%d}")
    usage = {
        "digital_signature": False, "content_commitment": False, "key_encipherment": False,
        "data_encipherment": False, "key_agreement": False, "encipher_only": False, "decipher_only": False,
    }  # fmt: skip
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(name, name, key, now, now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(made, key)


def issue(authority: Pair, names: Sequence[str], now: datetime) -> Pair:
    """Make a server's certificate for these DNS names. Raises CertificateUnreadable."""
    signer, signer_key = _read(authority.certificate), _read_key(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    signer_id = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        _builder(_name(names[0][:64]), signer.subject, key, now, certificate_end(authority_of(authority), now))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer_id), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    return _pair(made, key)


def authority_of(pair: Pair) -> Lifetime:
    """The lifetime of an authority. Raises CertificateUnreadable, also if the key is of another certificate."""
    read = _read(pair.certificate)
    if _read_key(pair).public_key() != read.public_key():
        raise CertificateUnreadable("a key does not belong to its certificate")
    try:
        identifier = read.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except (x509.ExtensionNotFound, ValueError) as error:
        raise CertificateUnreadable("a certificate is not one of an authority of Slipway") from error
    return Lifetime(identifier.digest.hex(), read.not_valid_before_utc, read.not_valid_after_utc)


def certificate_of(pair: Pair) -> Certificate:
    """The lifetime and the names of a server's certificate. Raises CertificateUnreadable."""
    read = _read(pair.certificate)
    if _read_key(pair).public_key() != read.public_key():
        raise CertificateUnreadable("the key does not belong to the certificate")
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        issuer = read.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except (x509.ExtensionNotFound, ValueError) as error:
        raise CertificateUnreadable("the certificate is not one of Slipway") from error
    return Certificate(
        (issuer or b"").hex(),
        read.not_valid_before_utc,
        read.not_valid_after_utc,
        tuple(names.get_values_for_type(x509.DNSName)),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(end)
    )


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _read(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CertificateUnreadable("a certificate is not PEM") from error


def _read_key(pair: Pair) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateUnreadable("a private key is not PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateUnreadable("a private key is not of an elliptic curve")
    return key
