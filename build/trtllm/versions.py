"""The releases of TensorRT-LLM that can be planned for, and their differences."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.errors import ConfigError, unknown_name

DEFAULT = "1.2.1"
LLM_DEFAULT = "1.3.0rc27"


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


#: The last final release with compiled engines is 1.2.1, the last of all 1.3.0rc20; no Triton container has a 1.3.
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


#: The lines whose LLM API is known here, by their contracts (tests/data/trtllm/contracts).
LLM_LINES = ("1.3",)


@dataclass(frozen=True)
class LlmRelease:
    """A release that serves the LLM API over gRPC, in a container of its own."""

    version: str

    @property
    def image(self) -> str:
        """The container's full name."""
        return f"nvcr.io/nvidia/tensorrt-llm/release:{self.version}"


def find_release(version: str) -> Release:
    """Return a release; raises ConfigError when it is unknown or its engines cannot be served."""
    if version.startswith(("1.3", "1.4", "2.")):
        raise ConfigError(
            f"TensorRT-LLM {version} has no engines that Triton serves: 1.2.1 is the last in a Triton container, "
            f"1.3.0rc20 the last that compiles any (allowed: {', '.join(RELEASES)}; key trtllm_version; newer ones "
            "run the LLM API: python -m build.trtllm.llm_api)"
        )
    if version not in RELEASES:
        raise ConfigError(unknown_name("trtllm_version", version, RELEASES, "key trtllm_version"))
    return RELEASES[version]


def find_llm_release(version: str) -> LlmRelease:
    """Return a release of the LLM API; raises ConfigError for a line without gRPC or without a contract here."""
    if version.startswith(("0.", "1.0", "1.1", "1.2")):
        raise ConfigError(
            f"trtllm-serve of TensorRT-LLM {version} has no --grpc, which came with 1.3 (key trtllm_version; compiled "
            "engines: python -m build.trtllm)"
        )
    if not version.startswith(tuple(f"{line}." for line in LLM_LINES)):
        raise ConfigError(
            f"the LLM API's names in TensorRT-LLM {version} are not known here (known: {', '.join(LLM_LINES)}; key "
            "trtllm_version)"
        )
    return LlmRelease(version)
