"""`python -m tests.numerics`: how often float32 and bfloat16 pick another token than float64, by method and tree size.

Each text is said once by float64; every step's pass is repeated by the other dtypes over the same context and tree,
each with a cache of its own, so that one other pick does not spoil what follows. What is counted of a device replaces
its older counts in docs/figures/numerics.json; numerics.md beside it is written from that. docs/numerics.md explains.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.traffic import mixed_prompts
from orchestrator.core.deployment.config import load_config
from tests.numerics.bench import Bench
from tests.numerics.counts import EXACT, METHODS
from tests.numerics.page import Store
from tests.numerics.passes import Forced
from tests.support.exactness import SAMPLINGS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "figures" / "numerics.md"


def conditions_of(options: argparse.Namespace, target: str, num_texts: int) -> dict[str, Any]:
    """Return the conditions under which the counts were taken."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(target).glob("*.safetensors"))))
    cuda = options.device != "cpu"
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    flags = sorted(
        {word for word in info.split() if word in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")}
    )
    return {
        "made": f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {time.process_time() / 60:.1f} minutes of CPU",
        "texts": f"{num_texts}, each of at most {options.tokens} tokens; seeds 1 … by prompt",
        "methods": ", ".join(options.methods),
        "target": f"{Path(target).name}, sha256 of its weights {digest.hexdigest()[:12]}",
        "hardware": torch.cuda.get_device_name(options.device) if cuda else f"{name}, {', '.join(flags)}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}, "
        f"float32 products: {torch.get_float32_matmul_precision()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure prompt by prompt, keeping what is counted; return 1 when float64's own passes differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="beside float64")
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help='method, method:{"parameter": value} or made:nodes'
    )
    parser.add_argument("--prompts", type=int, default=20, help="the tasks by turns (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a text (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no prompt after so long")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU (%(default)s)")
    parser.add_argument("--table", type=Path, default=TABLE, help="the counts are kept beside it as JSON")
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page anew")
    options = parser.parse_args(arguments)
    if options.page:
        Store(options.table).write()
        return 0
    if options.methods[0] != METHODS[0]:
        parser.error(f"--methods must begin with {METHODS[0]!r}: the others are compared with it")
    torch.set_num_threads(options.threads)
    config, began_s = load_config(ROOT / "serving.toml"), time.monotonic()
    sides = {dtype: Forced(config.target, options.device, dtype) for dtype in (EXACT, *options.dtypes)}
    bench, store, num_texts = Bench(sides, config.target, config.draft, config.ngram_tables), Store(options.table), 0
    for number, prompt in enumerate(mixed_prompts(options.prompts), start=1):
        if time.monotonic() - began_s > 60 * options.minutes:
            break
        for name in options.samplings:
            rule = SAMPLINGS[name]
            rule = rule if rule.greedy else replace(rule, seed=number)
            bench.run(number, prompt.text, name, rule, options.methods, options.tokens)
            num_texts += 1
        store.put(options.device, conditions_of(options, config.target, num_texts), bench.cells)
        print(f"{number}: {prompt.id}, {time.monotonic() - began_s:.0f} s", flush=True)
    return int(any(tally.differing for key, tally in bench.cells.items() if key[1] == EXACT))


if __name__ == "__main__":
    sys.exit(main())
