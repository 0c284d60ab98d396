"""Tenants: with --salt-by-key, who a request counts for is decided by its API key, not by its fields."""

from __future__ import annotations

import hmac
from typing import TypeVar

from gateway.fields import GenerationFields

OfTenant = TypeVar("OfTenant", bound=GenerationFields)


def of_tenant(fields: OfTenant, api_key: bytes) -> OfTenant:
    """Return the fields of a request with the salt of its API key, and without a priority of the client's choice.

    The server counts and separates by one salt. If the client's own were part of it, each would be a tenant of its own.
    """
    salt = hmac.new(api_key, b"cache_salt", "sha256").hexdigest()  # the same in every gateway, and shows no key in logs
    return fields.model_copy(update={"cache_salt": salt, "priority": None})
