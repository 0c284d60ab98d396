"""The releases of TensorRT-LLM that can be planned for, and their differences."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.errors import ConfigError, unknown_name

DEFAULT = "1.2.1"


@dataclass(frozen=True)
class Release:
    """A release. container: tag (year.month) of the newest Triton container that has it.

    llama_folder: the folder in its examples that converts Llama checkpoints.
    """

    version: str
    container: str
    llama_folder: str = "models/core/llama"

    @property
    def image(self) -> str:
        """The container's full name."""
        return f"nvcr.io/nvidia/tritonserver:{self.container}-trtllm-python-py3"


#: The last release with compiled engines is 1.2.1.
RELEASES = {
    release.version: release
    for release in (
        Release("0.18.2", "25.04", llama_folder="llama"),
        Release("0.19.0", "25.05"),
        Release("0.20.0", "25.07"),
        Release("0.21.0", "25.08"),
        Release("1.0.0", "25.10"),
        Release("1.1.0", "26.02"),
        Release("1.2.0", "26.03"),
        Release(DEFAULT, "26.07"),
    )
}


def find_release(version: str) -> Release:
    """Return a release; raises ConfigError when it is unknown or has no compiled engines."""
    if version.startswith(("1.3", "1.4", "2.")):
        raise ConfigError(
            f"TensorRT-LLM {version} has no compiled engines: they were removed after 1.2.1 "
            f"(allowed: {', '.join(RELEASES)}; key trtllm_version)"
        )
    if version not in RELEASES:
        raise ConfigError(unknown_name("trtllm_version", version, RELEASES, "key trtllm_version"))
    return RELEASES[version]
