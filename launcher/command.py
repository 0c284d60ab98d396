"""The command line and the environment of the server: settings of Triton and OpenMP, not of a deployment."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.settings import Ports
from launcher.triton import Triton
from orchestrator.core.deployment.config import CALL_THREADS, ENGINE_KEY, LOG_LEVEL, STATE_FOLDER
from orchestrator.core.errors import ConfigError, unknown_name

#: Variables that the stubs get unless the user's environment sets them.
STUB_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",  # threads that spin between steps keep the next stub off the core: 0.7-1.0 ms a step
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

#: Interfaces that need the key, because they let a client run code, read memory or write files.
#: model-config and statistics stay open: perf_analyzer needs them, and they tell little more than the metadata.
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
KEY_HEADER = "admin-key"
#: With fewer threads for the calls of a model, even a single request would be held up.
MIN_CALL_THREADS = 8

#: Triton's log switches by level.
LOG_LEVELS = {
    "error": ("--log-info=false", "--log-warning=false"),
    "warning": ("--log-info=false",),
    "info": (),
    "verbose": ("--log-verbose=1",),
}

# A server that does not know these flags cannot restrict its interfaces, so it is not started.
_NEEDED = ("--http-restricted-api", "--grpc-restricted-protocol")
# Without them, Triton logs four alarming lines at each start on a machine without a GPU.
_WITHOUT_GPU = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of one server."""

    repositories: tuple[Path, ...]
    models: tuple[str, ...]
    host: str
    ports: Ports
    key: str = field(repr=False)
    region_prefix: str
    exit_limit_s: int
    log_level: str
    uses_gpu: bool
    call_threads: int

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown log level."""
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(unknown_name("log level", self.log_level, LOG_LEVELS, "SPECSERVE_LOG_LEVEL"))

    def command(self, triton: Triton) -> list[str]:
        """Return the command line without the flags that this Triton does not know: it would not start with them."""
        known = triton.flags() | set(_NEEDED)
        flags = [flag for flag in self._flags(triton.backends) if flag.partition("=")[0] in known]
        return [str(triton.binary), *flags]

    def _flags(self, backends: Path) -> list[str]:
        restriction = f"{','.join(RESTRICTED)}:{KEY_HEADER}={self.key}"
        return [
            *(f"--model-repository={folder}" for folder in self.repositories),
            f"--backend-directory={backends}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self.models),
            "--exit-on-error=true",
            "--strict-readiness=true",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={self.exit_limit_s}",
            f"--backend-config=python,shm-region-prefix-name={self.region_prefix}",
            f"--backend-config=python,thread-pool-size={self.call_threads}",
            *(f"--{endpoint}-address={_bindable(endpoint, self.host)}" for endpoint in _ENDPOINTS),
            *(f"--{endpoint}-port={getattr(self.ports, endpoint)}" for endpoint in _ENDPOINTS),
            f"--http-restricted-api={restriction}",
            f"--grpc-restricted-protocol={restriction}",
            *(() if self.uses_gpu else _WITHOUT_GPU),
            *LOG_LEVELS[self.log_level],
        ]


_ENDPOINTS = ("http", "grpc", "metrics")


def _bindable(endpoint: str, host: str) -> str:
    """Return an address as Triton reads it: gRPC wants brackets around an IPv6 address, its HTTP server a prefix."""
    if ":" not in host:
        return host
    return f"[{host}]" if endpoint == "grpc" else f"ipv6:{host}"


def call_threads(environ: Mapping[str, str], max_running: int) -> int:
    """Return the number of threads on which Triton makes the calls of a model and sends its responses.

    A call that an engine's process had taken when it died keeps its thread until Triton is restarted. Raises
    ConfigError for an unusable number in the environment.
    """
    text = environ.get(CALL_THREADS, "")
    if text and not (text.isdecimal() and int(text) >= MIN_CALL_THREADS):
        raise ConfigError(f"{CALL_THREADS} must be a number from {MIN_CALL_THREADS} on, got {text!r} (environment)")
    return int(text) if text else 32 + 3 * max_running


def stub_environment(environ: Mapping[str, str], config_path: Path, state: Path, launch: Launch) -> dict[str, str]:
    """Return the environment of the server and its stubs; state: the folder that they share."""
    own = {
        "SERVING_CONFIG": str(config_path),
        STATE_FOLDER: str(state),
        ENGINE_KEY: secrets.token_hex(16),
        LOG_LEVEL: launch.log_level,
    }
    return {**STUB_ENVIRONMENT, **environ, **own}
