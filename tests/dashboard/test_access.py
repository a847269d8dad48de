"""Tenancy: what one organization has does not exist for another."""

import uuid

import pytest
from django.test import Client
from django.urls import get_resolver, reverse
from django.utils import timezone

from billing.models import ApiKey, Membership, Organization, UsageEvent
from dashboard import access
from dashboard.models import User
from tests.dashboard import world

Key = tuple[ApiKey, str]


def test_a_person_sees_the_organizations_of_his_memberships(
    acme: Organization, globex: Organization, ada: User
) -> None:
    assert list(access.organizations_of(ada)) == [acme]
    Membership.objects.create(user=ada, organization=globex)
    assert list(access.organizations_of(ada)) == [acme, globex]


def test_an_operator_is_no_member(acme: Organization, operator: User) -> None:
    assert list(access.organizations_of(operator)) == []


def test_events_and_ledger_are_the_organizations_own(acme_key: Key, globex_key: Key) -> None:
    theirs, ours = world.request(globex_key[0]), world.request(acme_key[0])
    acme = acme_key[0].organization
    assert list(access.events_of(acme)) == [ours]
    assert {line.event for line in access.ledger_of(acme) if line.event} == {ours}
    assert access.find_event(acme, str(ours.pk)) == ours
    with pytest.raises(UsageEvent.DoesNotExist):
        access.find_event(acme, str(theirs.pk))


@pytest.mark.parametrize("form", ["{}", "urn:uuid:{}", "{{{}}}", " {}", "{}\n"])
def test_an_id_is_found_by_its_canonical_text_only(acme_key: Key, form: str) -> None:
    event = world.request(acme_key[0])
    text = form.format(event.pk)
    if text == str(event.pk):
        assert access.find_event(event.organization, text.upper()) == event
    else:
        with pytest.raises(UsageEvent.DoesNotExist):
            access.find_event(event.organization, text)


@pytest.mark.parametrize("text", ["", "x", "0" * 32, "\x00", "é" * 36, "٠" * 32, "9" * 500])
def test_a_malformed_id_is_not_found(acme: Organization, text: str) -> None:
    with pytest.raises(UsageEvent.DoesNotExist):
        access.find_event(acme, text)


def pages_of(organization: Organization, event: UsageEvent) -> list[str]:
    slug = organization.slug
    month = f"{timezone.now():%Y-%m}"
    return [
        reverse("request-detail", args=[slug, event.pk]),
        *(reverse(name, args=[slug]) for name in ("requests", "credits", "statements", "settings")),
        *(
            reverse(name, args=[slug, month])
            for name in ("statement", "statement-csv", "statement-json")
        ),
    ]


def test_every_page_of_an_organization_is_in_that_list(acme_key: Key) -> None:
    event = world.request(acme_key[0])
    routes = {
        str(each.pattern)
        for group in get_resolver().url_patterns
        for each in getattr(group, "url_patterns", [])
        if str(each.pattern).startswith("o/<slug:slug>/")
    }
    resolved = {get_resolver().resolve(page).route for page in pages_of(event.organization, event)}
    assert routes == resolved


def test_pages_of_another_organization_are_as_absent_ones(
    client: Client, acme_key: Key, gus: User, operator: User
) -> None:
    event = world.request(acme_key[0])
    for person in (gus, operator):
        client.force_login(person)
        absent = client.get("/o/no-such-organization/requests/")
        assert absent.status_code == 404
        for page in pages_of(event.organization, event):
            answer = client.get(page)
            assert answer.status_code == 404
            assert answer.content == absent.content


def test_a_request_of_another_organization_is_as_an_absent_one(
    client: Client, acme_key: Key, globex: Organization, gus: User
) -> None:
    event = world.request(acme_key[0])
    client.force_login(gus)
    absent = client.get(reverse("request-detail", args=[globex.slug, uuid.uuid4()]))
    theirs = client.get(reverse("request-detail", args=[globex.slug, event.pk]))
    assert theirs.status_code == absent.status_code == 404
    assert theirs.content == absent.content
    found = client.get(reverse("requests", args=[globex.slug]), {"id": str(event.pk)})
    assert "No request of Globex" in found.text


def test_a_list_shows_nothing_of_another_organization(
    client: Client, acme_key: Key, globex_key: Key, gus: User
) -> None:
    theirs, ours = world.request(acme_key[0]), world.request(globex_key[0])
    client.force_login(gus)
    page = client.get(reverse("requests", args=["globex"])).text
    assert str(ours.pk) in page
    assert str(theirs.pk) not in page
    assert "Acme" not in page


def test_who_leaves_an_organization_loses_it_at_once(
    client: Client, acme: Organization, ada: User
) -> None:
    client.force_login(ada)
    page = reverse("requests", args=[acme.slug])
    assert client.get(page).status_code == 200
    Membership.objects.filter(user=ada).delete()
    assert client.get(page).status_code == 404
    Membership.objects.create(user=ada, organization=acme)
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert client.get(page).status_code == 302


def test_who_is_not_logged_in_is_sent_to_the_login_page(client: Client, acme_key: Key) -> None:
    event = world.request(acme_key[0])
    for page in [*pages_of(event.organization, event), "/o/no-such-organization/requests/"]:
        answer = client.get(page)
        assert answer.status_code == 302
        assert answer["Location"] == f"{reverse('login')}?next={page}"


def test_a_viewer_of_two_organizations_switches_between_them(
    client: Client, acme_key: Key, globex_key: Key, ada: User
) -> None:
    Membership.objects.create(user=ada, organization=globex_key[0].organization)
    acmes, globexs = world.request(acme_key[0]), world.request(globex_key[0])
    client.force_login(ada)
    choice = client.get(reverse("home")).text
    assert "/o/acme/requests/" in choice
    assert "/o/globex/requests/" in choice
    page = client.get("/o/globex/requests/").text
    assert "/o/acme/requests/" in page
    assert str(globexs.pk) in page
    assert str(acmes.pk) not in page
    # The organization in the address counts, not that the person may see the other one too.
    assert client.get(f"/o/globex/requests/{acmes.pk}/").status_code == 404
