"""API keys: what they guard, and what the requests of a key have in common."""

import hashlib
from pathlib import Path

import httpx
import pytest

from gateway import keys
from gateway.keys import ApiKeys
from gateway.settings import Settings
from tests.support.standin_replica import StandInReplica
from tests.unit.gateway.test_app import BODY, gateway_over

pytestmark = pytest.mark.unit

KEY = {"Authorization": "Bearer secret"}


def test_keys_guard_the_metrics_too_and_readiness_names_no_address(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder, api_keys="secret", allowed_origins="*") as guarded:
        assert guarded.get("/metrics").status_code == 401 and guarded.get("/v1/models").status_code == 401
        assert replica.address in guarded.get("/metrics", headers=KEY).text
        ready = guarded.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"num_replicas": 1, "num_usable": 1})
        asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        preflight = httpx.options(f"{guarded.url}/v1/completions", headers=asks)
        assert preflight.status_code == 200  # a browser sends no key with it


def test_no_spelling_of_a_path_evades_the_keys(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder, api_keys="secret") as guarded:
        for spelling in ("%0A", "%0a", "%0D%0A", "%0A%0A", "/", "//", "%2F", "%00", ";x", "%20", "%E2%80%A8"):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                assert guarded.post(path + spelling, BODY).status_code in (307, 401, 404, 405), path + spelling
            for path in ("/v1/models", "/v1/models/target", "/metrics", "/playground/methods"):
                assert guarded.get(path + spelling).status_code in (307, 401, 404, 405), path + spelling
    assert not replica.requests


def test_a_key_may_have_any_characters(replica: StandInReplica, folder: Path) -> None:
    key = "schlüssel-à"  # its last byte in UTF-8 is a space of Latin-1
    with gateway_over(replica, folder, api_keys=key) as guarded:
        for given, status in ((key, 200), ("schlüssel", 401)):
            headers = {b"Authorization": b"Bearer " + given.encode()}
            assert guarded.get("/v1/models", headers=headers).status_code == status


def test_a_key_is_a_tenant_with_one_salt_and_no_priority(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder, api_keys="secret,other", salt_by_key=True) as guarded:
        for key, salt in (("secret", "a"), ("secret", "b"), ("secret", None), ("other", "a")):
            headers = {"Authorization": f"Bearer {key}"}
            body = BODY | {"cache_salt": salt, "priority": -9}
            assert guarded.post("/v1/completions", body, headers=headers).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "cache_salt": "c"}
        assert guarded.post("/v1/chat/completions", chat, headers=KEY).status_code == 200
    salts = [request["cache_salt"][0] for request in replica.requests]
    first, other = salts[0], salts[3]
    assert salts == [first, first, first, other, first] and first != other
    assert len(first) == 64 and not any("priority" in request for request in replica.requests)


def test_without_that_option_salts_and_priorities_are_the_clients(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder, api_keys="secret") as guarded:
        guarded.post("/v1/completions", BODY | {"cache_salt": "a", "priority": -9}, headers=KEY)
    assert (replica.requests[-1]["cache_salt"], replica.requests[-1]["priority"]) == (["a"], [-9])


# Usage of each key


def test_requests_and_tokens_are_counted_by_key_and_no_key_is_shown(replica: StandInReplica, folder: Path) -> None:
    with gateway_over(replica, folder, api_keys="secret,other") as guarded:
        for key, number in (("secret", 2), ("other", 1), ("wrong", 1)):
            for _ in range(number):
                guarded.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {key}"})
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        guarded.post("/v1/chat/completions", chat, headers={"Authorization": "Bearer other"})
        text = guarded.get("/metrics", headers=KEY).text
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    secret, other = (hashlib.sha256(key).hexdigest()[:8] for key in (b"secret", b"other"))
    counted = [
        ("requests", f'endpoint="/v1/completions",key="{secret}",status="200"', 2),
        ("requests", f'endpoint="/v1/completions",key="{other}",status="200"', 1),
        ("requests", 'endpoint="/v1/completions",key="",status="401"', 1),
        ("generation_tokens", f'key="{secret}"', 12),
        ("generation_tokens", f'key="{other}"', 8),
        ("prompt_tokens", f'key="{secret}"', 6),
    ]
    for name, labels, number in counted:
        assert float(series[f"spec_gateway_{name}_total{{{labels}}}"]) == number
    assert not any(f'"{key}"' in text for key in ("secret", "other", "wrong"))


def test_labels_of_keys_are_bounded_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_LABELS", 2)
    some = ApiKeys(Settings(api_keys="a,b,c"))
    labels = [some.label(key) for key in (b"a", b"b", b"c", b"a", b"")]
    assert labels[2] == "other" and labels[0] == labels[3] != labels[1] and labels[4] == ""
    assert all(len(label) == 8 for label in labels[:2])
