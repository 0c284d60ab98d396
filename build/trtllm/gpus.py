"""The GPUs that can be planned for, with their memory and compute capability; it queries no driver."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.errors import ConfigError, unknown_name

GIB = 1 << 30
#: The least compute capability for a number format (fp8: Ada, Hopper; nvfp4: Blackwell), and for any engine.
LEAST_CAPABILITY = {"fp8": (8, 9), "nvfp4": (10, 0)}
LEAST_OF_ANY = (8, 0)
#: The builder raises for these formats on compute capability 10.0 to 11.9 (tensorrt_llm/builder.py).
NOT_ON_BLACKWELL, BLACKWELL = ("int4_awq", "int8_sq"), ((10, 0), (12, 0))


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; memory_gib: usable by a process, in whole GiB. capability: (major, minor)."""

    name: str
    memory_gib: int
    capability: tuple[int, int]

    def has_format(self, number_format: str) -> bool:
        """Return whether the GPU computes in a format; 16-bit formats run wherever engines do."""
        if number_format in NOT_ON_BLACKWELL and BLACKWELL[0] <= self.capability < BLACKWELL[1]:
            return False
        return self.capability >= LEAST_CAPABILITY.get(number_format, LEAST_OF_ANY)


# Inferred: the nominal size less the share of driver and ECC, rounded down; `gpu_memory_gib` overrides it.
KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu("a10g", 22, (8, 6)),
        Gpu("a100-40", 39, (8, 0)),
        Gpu("a100-80", 79, (8, 0)),
        Gpu("b200", 178, (10, 0)),
        Gpu("h100", 79, (9, 0)),
        Gpu("h100-nvl", 93, (9, 0)),
        Gpu("h200", 139, (9, 0)),
        Gpu("l4", 22, (8, 9)),
        Gpu("l40", 44, (8, 9)),
        Gpu("l40s", 44, (8, 9)),
        Gpu("rtx-4090", 23, (8, 9)),
        Gpu("rtx-6000-ada", 47, (8, 9)),
    )
}


def find_gpu(name: str, memory_gib: int = 0) -> Gpu:
    """Return a known GPU, with `memory_gib` as its memory unless that is 0; raises ConfigError for an unknown one."""
    if not name:
        raise ConfigError(
            f"gpu is missing: name the GPU that the engines are for (known: {', '.join(sorted(KNOWN))}; "
            "key gpu, flag --gpu)"
        )
    normalised = name.casefold().replace(" ", "-").replace("_", "-").removesuffix("gb")
    if normalised not in KNOWN:
        raise ConfigError(unknown_name("gpu", name, KNOWN, "key gpu, flag --gpu"))
    gpu = KNOWN[normalised]
    return Gpu(gpu.name, memory_gib or gpu.memory_gib, gpu.capability)
