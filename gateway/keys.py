"""The accepted API keys; their file is read again when it changes, so that keys are replaced without a restart."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from gateway.errors import Unauthorized
from gateway.settings import KEYS, Settings, SettingsError, places_of

#: How often, at most, the file is checked for changes.
CHECK_INTERVAL_S = 1.0
#: How many keys get a label of their own in the metrics, in the order of their first requests; the others share OTHER.
MAX_LABELS, OTHER = 100, "other"

log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of the settings and, as of the last check, those of their file. accepted: empty = no key is needed."""

    def __init__(self, settings: Settings) -> None:
        """Read the keys; raises SettingsError if they cannot be read, or some are needed and missing."""
        fixed = (settings.api_keys or "").encode(errors="surrogateescape").split(b",")
        self._fixed, self._file = _stripped(fixed), settings.api_keys_file
        self._labels: dict[bytes, str] = {}
        self._version, self._checked_s = self._file_version(), time.monotonic()
        try:
            self.accepted = self._fixed | self._read()
        except OSError as error:
            raise SettingsError(f"cannot read the API keys in {self._file}: {error.strerror}") from None
        _check(settings, self.accepted)

    def key_in(self, header: str) -> bytes:
        """Return the key in an Authorization header, b"" if none is needed; raises Unauthorized for any other."""
        self._read_if_changed()
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

    def _read_if_changed(self) -> None:
        """Read the file if it has changed; if it cannot be read or has no key, the keys of before still hold."""
        now_s = time.monotonic()
        if not self._file or now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if (version := self._file_version()) == self._version:
            return
        self._version = version
        try:
            found, why = self._read(), "it contains no key"
        except OSError as error:
            found, why = frozenset(), str(error.strerror)
        if not found:
            log.error("the API keys in %s were not read (%s): those of before still hold", self._file, why)
            return
        self.accepted = self._fixed | found
        log.info("%s has changed: %d API keys are accepted", self._file, len(self.accepted))

    def _read(self) -> frozenset[bytes]:
        """Return the keys in the file."""
        return _stripped(Path(self._file).read_bytes().splitlines()) if self._file else frozenset()

    def _file_version(self) -> tuple[int, int, int] | None:
        """Return what changes when the file is written, replaced or made readable; None = there is no file.

        It is taken before the file is read, so that a change meanwhile is seen at the next check.
        """
        try:
            status = Path(self._file or "").stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns, status.st_size


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
