"""When certificates and authorities are renewed, in virtual time: years pass, operators pause, clocks differ."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_operator.core.certificates import (
    AUTHORITY_LIFE,
    BACKDATED,
    CERTIFICATE_LIFE,
    TRUSTED_BEFORE_USE,
    Certificate,
    Lifetime,
    certificate_end,
    choose_signer,
    needs_authority,
    still_trusted,
    why_renew,
)

START = datetime(2026, 11, 27, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SKEW = timedelta(minutes=5)
DELIVERY = timedelta(minutes=3)  # until a kubelet has replaced the mounted files of every pod
NAMES = ("replicas.team.slipway.internal", "*.team.svc")


@dataclass
class Installation:
    """The operator, and what verifiers and servers have in their mounted files `DELIVERY` later."""

    now: datetime = START
    authorities: tuple[Lifetime, ...] = ()
    certificate: Certificate | None = None
    issued: list[datetime] = field(default_factory=list)
    made: list[datetime] = field(default_factory=list)
    mounted: deque[tuple[datetime, tuple[Lifetime, ...], Certificate]] = field(default_factory=lambda: deque(maxlen=8))
    most: int = 0

    def work(self, names: tuple[str, ...] = NAMES) -> None:
        """One pass of the operator."""
        self.authorities = still_trusted(self.authorities, self.now)
        if needs_authority(self.authorities, self.now):
            new = Lifetime(f"ca-{len(self.made)}", self.now - BACKDATED, self.now + AUTHORITY_LIFE)
            self.authorities += (new,)
            self.made.append(self.now)
        signer = choose_signer(self.authorities, self.now)
        assert signer is not None
        if why_renew(self.certificate, names, self.authorities, self.now):
            end = certificate_end(signer, self.now)
            self.certificate = Certificate(signer.id, self.now - BACKDATED, end, names)
            self.issued.append(self.now)
        assert self.certificate is not None
        self.most = max(self.most, len(self.authorities))
        self.mounted.append((self.now, self.authorities, self.certificate))

    def seen(self, delay: timedelta) -> tuple[tuple[Lifetime, ...], Certificate]:
        """Authorities and certificate in files that are `delay` old."""
        past = [one for one in self.mounted if one[0] <= self.now - delay] or [self.mounted[0]]
        return past[-1][1], past[-1][2]


def verifies(authorities: tuple[Lifetime, ...], certificate: Certificate, clock: datetime) -> bool:
    issuer = [one for one in authorities if one.id == certificate.id and one.is_valid(clock)]
    return bool(issuer) and certificate.is_valid(clock)


def passes(pauses: list[timedelta]) -> Iterator[timedelta]:
    for pause in pauses:
        yield from [timedelta(hours=12)] * 30  # 15 days of work
        yield pause  # nobody leads


@pytest.mark.capability("SE-10")
@settings(max_examples=25, deadline=None)
@given(
    pauses=st.lists(st.timedeltas(timedelta(0), timedelta(days=9)), min_size=20, max_size=30),
    skew=st.timedeltas(-SKEW, SKEW),
    of_trust=st.timedeltas(timedelta(0), DELIVERY),
    of_server=st.timedeltas(timedelta(0), DELIVERY),
)
def test_at_any_time_every_verifier_accepts_what_every_server_shows(pauses, skew, of_trust, of_server):
    world = Installation()
    world.work()
    for step in passes(pauses):
        world.now += step
        # Before the operator works again, after it has, and when the files have arrived.
        checks = [timedelta(0), timedelta(minutes=1), timedelta(minutes=4)]
        assert verifies(world.seen(of_trust)[0], world.seen(of_server)[1], world.now + skew)
        world.work()
        for later in checks:
            world.now += later
            assert verifies(world.seen(of_trust)[0], world.seen(of_server)[1], world.now + skew), world.now


@pytest.mark.capability("SE-10")
def test_in_five_years_nothing_is_renewed_more_often_than_it_must():
    world = Installation()
    for _ in range(5 * 365 * 4):
        world.work()
        world.now += 6 * HOUR

    assert len(world.made) == 8  # one at each two thirds of a year
    between = [after - before for before, after in zip(world.issued, world.issued[1:], strict=False)]
    assert min(between) > CERTIFICATE_LIFE / 2
    assert len(world.issued) <= 5 * 365 / 18
    assert world.most == 2


@pytest.mark.capability("SE-10")
def test_a_new_authority_signs_only_when_it_has_been_trusted_for_a_day():
    old = Lifetime("old", START - timedelta(days=250), START + timedelta(days=115))
    new = Lifetime("new", START - BACKDATED, START + AUTHORITY_LIFE)

    at = [START + hours * HOUR for hours in (0, 23, 24, 48)]
    assert [choose_signer((old, new), now) for now in at] == [old, old, new, new]
    assert choose_signer((new,), START) is new  # the first one of an installation does not wait
    assert choose_signer((), START) is None


@pytest.mark.capability("SE-10")
def test_after_a_year_without_an_operator_the_first_pass_heals():
    world = Installation()
    world.work()
    world.now += timedelta(days=400)
    world.work()

    authorities, certificate = world.seen(timedelta(0))
    assert verifies(authorities, certificate, world.now)
    assert [one.id for one in authorities] == ["ca-1"]


@pytest.mark.capability("SE-10")
def test_renewals_of_namespaces_that_began_together_are_spread():
    due = set()
    for number in range(200):
        names = (f"replicas.team-{number}.slipway.internal",)
        made = Certificate("ca", START - BACKDATED, START + CERTIFICATE_LIFE, names)
        authority = Lifetime("ca", START - BACKDATED, START + AUTHORITY_LIFE)
        hours = next(h for h in range(720) if why_renew(made, names, (authority,), START + h * HOUR))
        assert 18 * 24 < hours <= 20 * 24
        due.add(hours)
    assert len(due) > 25  # of 36 hours


@pytest.mark.capability("SE-10")
def test_a_certificate_is_made_anew_for_each_reason():
    authority = Lifetime("ca", START - BACKDATED, START + AUTHORITY_LIFE)
    good = Certificate("ca", START - BACKDATED, START + CERTIFICATE_LIFE, NAMES)

    assert why_renew(good, NAMES, (authority,), START) == ""
    assert why_renew(good, NAMES[::-1], (authority,), START) == ""
    assert why_renew(None, NAMES, (authority,), START) == "there is none"
    assert why_renew(good, NAMES[:1], (authority,), START) == "it is for other names"
    assert why_renew(replace(good, id="stranger"), NAMES, (authority,), START) == "its authority is not trusted"
    assert why_renew(good, NAMES, (authority,), START - 2 * HOUR) == "it is from the future"
    assert why_renew(good, NAMES, (authority,), START + timedelta(days=21)).startswith("it has passed")


def test_a_certificate_never_outlives_its_authority():
    authority = Lifetime("ca", START, START + timedelta(days=10))
    assert certificate_end(authority, START) == authority.not_after
    assert certificate_end(authority, START - timedelta(days=25)) == START + timedelta(days=5)
    assert TRUSTED_BEFORE_USE > DELIVERY
