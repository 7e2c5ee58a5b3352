"""Certificates for tests of TLS, made when they are needed and good for nothing else."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Certificate", "self_signed"]

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate and its key, PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates.

    Args:
        folder: where files are put.
        name: of the files, and what it calls itself.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        made = (
            _begun(self._name, self._name, self._key, from_now=(-1, 10))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        """The file that says to trust it."""
        self.path.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def certificate(
        self, name: str = "localhost", *, file: str = "server", from_now: tuple[int, int] = (-1, 1)
    ) -> Certificate:
        """A certificate for a host and the loopback address.

        Args:
            from_now: days from which and to which it is good.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        made = (
            _for_host(_begun(_named(name), self._name, key, from_now=from_now), name)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return _written(self._folder, file, made, key)


def self_signed(folder: Path) -> Certificate:
    """A certificate that nobody vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("localhost")
    made = _for_host(_begun(name, name, key, from_now=(-1, 1)), "localhost").sign(key, hashes.SHA256())
    return _written(folder, "self_signed", made, key)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, from_now: tuple[int, int]
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + from_now[0] * _DAY)
        .not_valid_after(now + from_now[1] * _DAY)
    )


def _for_host(builder: x509.CertificateBuilder, name: str) -> x509.CertificateBuilder:
    names = [x509.DNSName(name)]
    addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if name == "localhost" else []
    return builder.add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _written(
    folder: Path, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> Certificate:
    paths = Certificate(folder / f"{file}.pem", folder / f"{file}.key")
    paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths.key.touch(0o600)
    paths.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
