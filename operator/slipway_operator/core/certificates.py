"""Decides when certificates and their authorities are made anew. Pure: facts and the time come in, decisions go out.

    authority  |—— signs once it is a day old, so that everybody trusts it ——|—— trusted until its end ——|
    its heir                                        made at 2/3 of its life |— waits a day —|—— signs ——
    certificate  |———— 30 days, renewed at 2/3 of them ————|

A certificate never outlives its authority, and an authority is trusted from its first to its last moment. So nothing is
ever replaced in a hurry, and no step depends on another having arrived: an authority signs for two thirds of a year,
and is trusted for another 122 days.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

AUTHORITY_LIFE: Final = timedelta(days=365)
CERTIFICATE_LIFE: Final = timedelta(days=30)
TRUSTED_BEFORE_USE: Final = timedelta(days=1)  # a kubelet replaces mounted files within two minutes
BACKDATED: Final = timedelta(hours=1)  # clocks of nodes differ: to one that is slow nothing may come from the future
RENEWED_AT: Final = 2 / 3  # of a life
SPREAD: Final = 1 / 20  # of a life by which renewals of namespaces differ: certificates that were made together


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Validity of a certificate. `id` is its authority's key identifier in hex, or its own if it is an authority."""

    id: str
    not_before: datetime
    not_after: datetime

    @property
    def made_at(self) -> datetime:
        """When it was issued: it is backdated."""
        return self.not_before + BACKDATED

    def is_valid(self, now: datetime) -> bool:
        """Whether it is valid by a clock that says `now`."""
        return self.not_before <= now < self.not_after


@dataclass(frozen=True, slots=True)
class Certificate(Lifetime):
    """A certificate of a server, and the names that it is for."""

    names: tuple[str, ...] = ()


def needs_authority(authorities: Sequence[Lifetime], now: datetime) -> bool:
    """Whether another authority is to be made: there is none, or the newest has passed two thirds of its life."""
    return all(now >= _due(one, 0.0) for one in authorities)


def choose_signer(authorities: Sequence[Lifetime], now: datetime) -> Lifetime | None:
    """The authority that signs: the newest that everybody trusts by now. None: none is valid.

    The very first, and the first after an outage in which the others grew too old, signs immediately.
    """
    valid = [one for one in authorities if one.is_valid(now)]
    trusted = [
        one for one in valid if one.made_at + TRUSTED_BEFORE_USE <= now and one.not_after - now > CERTIFICATE_LIFE
    ]
    return max(trusted or valid, key=lambda one: one.not_before, default=None)


def still_trusted(authorities: Sequence[Lifetime], now: datetime) -> tuple[Lifetime, ...]:
    """The authorities to keep: those that have not ended, also by a clock that is slow."""
    return tuple(one for one in authorities if now < one.not_after + BACKDATED)


def why_renew(
    certificate: Certificate | None, names: Sequence[str], authorities: Sequence[Lifetime], now: datetime
) -> str:
    """Why this certificate is to be made anew, for the log; empty: it is kept."""
    if certificate is None:
        return "there is none"
    if set(certificate.names) != set(names):
        return "it is for other names"
    if certificate.id not in {one.id for one in authorities}:
        return "its authority is not trusted"
    if now >= _due(certificate, _spread(names)):
        return "it has passed two thirds of its life"
    if now < certificate.not_before:
        return "it is from the future"
    return ""


def describe_certificate_fault(fault: str) -> str:
    """Message of the condition CertificateUnavailable, of services and pools."""
    return f"no TLS certificate can be kept: {fault}"


def certificate_end(authority: Lifetime, now: datetime) -> datetime:
    """The end of a certificate that is made now: it never outlives its authority."""
    return min(now + CERTIFICATE_LIFE, authority.not_after)


def _due(one: Lifetime, spread: float) -> datetime:
    return one.made_at + (one.not_after - one.made_at) * (RENEWED_AT - spread)


def _spread(names: Sequence[str]) -> float:
    """Between 0 and SPREAD, always the same for the same names."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
    return SPREAD * int.from_bytes(digest[:4]) / 2**32
