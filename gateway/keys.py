"""The accepted API keys, and what stands for them in the metrics."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from gateway.errors import Unauthorized
from gateway.settings import KEYS, Settings, SettingsError, places_of

#: How many keys get a label of their own in the metrics, in the order of their first requests; the others share OTHER.
MAX_LABELS, OTHER = 100, "other"


class ApiKeys:
    """The keys of the settings and of their file, as they were at the start. accepted: empty = no key is needed."""

    def __init__(self, settings: Settings) -> None:
        """Read the keys; raises SettingsError if they cannot be read, or some are needed and missing."""
        fixed = (settings.api_keys or "").encode(errors="surrogateescape").split(b",")
        self._labels: dict[bytes, str] = {}
        try:
            in_file = Path(settings.api_keys_file).read_bytes().splitlines() if settings.api_keys_file else []
        except OSError as error:
            raise SettingsError(f"cannot read the API keys in {settings.api_keys_file}: {error.strerror}") from None
        self.accepted = _stripped([*fixed, *in_file])
        _check(settings, self.accepted)

    def key_in(self, header: str) -> bytes:
        """Return the key in an Authorization header, b"" if none is needed; raises Unauthorized for any other."""
        if not self.accepted:
            return b""
        scheme, _, key = header.partition(" ")
        given = key.strip(" \t").encode("latin-1")  # the bytes as sent: headers are always decoded as Latin-1
        is_known = any(hmac.compare_digest(given, known) for known in self.accepted)
        if not (scheme.lower() == "bearer" and is_known):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        return given

    def label(self, key: bytes) -> str:
        """Return what stands for an accepted key in the metrics: the first 8 hexadecimal digits of its SHA-256.

        The series of a label are never freed, so there are at most MAX_LABELS. "": no key is needed.
        """
        if not key:
            return ""
        if key not in self._labels and len(self._labels) < MAX_LABELS:
            self._labels[key] = hashlib.sha256(key).hexdigest()[:8]
        return self._labels.get(key, OTHER)


def _stripped(keys: list[bytes]) -> frozenset[bytes]:
    return frozenset(key.strip() for key in keys if key.strip())


def _check(settings: Settings, keys: frozenset[bytes]) -> None:
    """Raise SettingsError if keys are needed and there are none."""
    if settings.salt_by_key and not keys:
        raise SettingsError("salt_by_key needs API keys, and no key is set (--api-keys-file or --api-keys)")
    for name in KEYS:
        if not keys and (value := getattr(settings, name)) is not None:
            raise SettingsError(
                f"{name} contains no API key, got {value!r}: at least one is needed; only without this setting the "
                f"gateway serves everybody ({places_of(name)})"
            )
