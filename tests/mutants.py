"""`python -m tests.mutants`: plants small bugs in a copy of the code, one at a time, and wants the named tests to fail.

Each bug changes behaviour, none fails on import. A bug whose text is no longer in its file is reported as gone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
FAILED = 1  # pytest's status when a test has failed


class Mutant(NamedTuple):
    """file, sound, broken: the text to replace, which occurs once. tests: what pytest runs, words of its `-k` behind."""

    file: str
    sound: str
    broken: str
    tests: str


CORE, DRAFTING, SERVER = (
    "tests/unit/orchestrator/core/",
    "tests/unit/orchestrator/drafting/",
    "tests/unit/orchestrator/server/",
)
ENGINE, MODELS, GATEWAY = "tests/unit/runtime/engine/", "tests/unit/runtime/models/", "tests/unit/gateway/"

MUTANTS = [
    # orchestrator/core
    Mutant("orchestrator/core/tree.py", "mask[node] |= mask[parent]", "mask[node] |= mask[0]", f"{CORE}test_tree.py"),
    Mutant(
        "orchestrator/core/tree.py",
        "parents > previous)",
        "parents > previous + 1)",
        f"{CORE}test_tree.py {CORE}messages",
    ),
    Mutant(
        "orchestrator/core/tree.py",
        "self.depths[1:] <= max_depth",
        "self.depths[1:] < max_depth",
        f"{CORE}test_tree.py",
    ),
    Mutant("auditor/reference/noise.py", "+ 0.5) * 2.0**-52", "+ 1.0) * 2.0**-52", f"{CORE}test_noise.py"),
    Mutant("orchestrator/core/noise.py", "ROUNDS = 10", "ROUNDS = 9", f"{CORE}test_noise.py"),
    Mutant(
        "orchestrator/core/noise.py",
        "    if index == 0:\n        return seed\n",
        "",
        f"{CORE}test_noise.py {SERVER}requests",
    ),
    Mutant(
        "orchestrator/core/context.py",
        "self._hashes[-1] + token + 1)",
        "self._hashes[-1] + token)",
        f"{CORE}messages",
    ),
    # orchestrator/drafting
    Mutant(
        "orchestrator/drafting/recycling.py",
        ".astype(np.int32) + 1\n",
        ".astype(np.int32)[:-1] + 1\n",
        f"{DRAFTING}test_recycling.py",
    ),
    Mutant(
        "orchestrator/drafting/recycling.py",
        "is_accepted[[0, *acceptance.path]] = True",
        "is_accepted[0] = True",
        f"{DRAFTING}test_recycling.py",
    ),
    # orchestrator/server
    Mutant(
        "orchestrator/server/statistics.py",
        "return expected_tokens(alpha, gamma) / (gamma * c + 1)",
        "return expected_tokens(alpha, gamma) / (gamma * c)",
        f"{SERVER}generation/test_statistics.py",
    ),
    Mutant(
        "orchestrator/server/text.py", "max(num_held + 1 - len(s), 0)", "num_held", f"{SERVER}generation/test_text.py"
    ),
    Mutant(
        "orchestrator/server/text.py",
        'self._held[:start], ""',
        'self._held[: start + 1], ""',
        f"{SERVER}generation/test_text.py",
    ),
    Mutant(
        "orchestrator/server/text.py",
        "if piece and not piece.endswith(REPLACEMENT):",
        "if piece:",
        f"{SERVER}generation/test_text.py",
    ),
    Mutant(
        "orchestrator/server/loop.py",
        "self._context.commit(step.tokens)",
        "self._context.commit(step.tokens[:1])",
        f"{SERVER}generation",
    ),
    Mutant(
        "orchestrator/server/loop.py",
        "if output.finish or not steps.num_ready:",
        "if not steps.num_ready:",
        f"{SERVER}generation",
    ),
    # runtime/engine
    Mutant(
        "runtime/engine/kv/blocks.py",
        "_digest(self.digest + content)",
        "_digest(content)",
        f"{ENGINE}kv/test_blocks.py",
    ),
    Mutant("runtime/engine/kv/blocks.py", 'b"salt:" + cache_salt.encode()', 'b"salt:"', f"{ENGINE}kv"),
    Mutant("runtime/engine/kv/blocks.py", "in reversed(list(blocks))", "in list(blocks)", f"{ENGINE}kv/test_blocks.py"),
    Mutant("runtime/engine/kv/blocks.py", "popitem(last=False)", "popitem(last=True)", f"{ENGINE}kv/test_blocks.py"),
    Mutant(
        "runtime/engine/kv/pressure.py",
        "other.number > sequence.number",
        "other is not sequence",
        f"{ENGINE}kv/test_pressure.py",
    ),
    Mutant("runtime/engine/kv/pressure.py", "missing + MARGIN * num_others", "missing", f"{ENGINE}kv/test_pressure.py"),
    Mutant(
        "runtime/engine/kv/sequences.py",
        "min(common, len(self.context) - 1)",
        "len(self.context) - 1",
        f"{ENGINE}kv/test_sequences.py",
    ),
    Mutant(
        "runtime/engine/kv/sequences.py",
        "range(0, len(self.context) - size, size)",
        "range(0, len(self.context) - size + 1, size)",
        f"{ENGINE}kv/test_sequences.py",
    ),
    Mutant("runtime/engine/kv/sequences.py", "end // size):", "end // size + 1):", f"{ENGINE}kv/test_sequences.py"),
    # sampling: the references
    Mutant(
        "auditor/reference/logits_processors.py",
        "logits[seen] * penalty",
        "logits[seen] / penalty",
        "tests/unit/auditor/reference/test_logits_processors.py",
    ),
    Mutant(
        "auditor/reference/logits_processors.py",
        "if num_output < sampling.min_tokens:",
        "if num_output <= sampling.min_tokens:",
        "tests/unit/auditor/reference/test_logits_processors.py",
    ),
    Mutant(
        "runtime/engine/sampling/logits_processors.py",
        "ids[-1] != word[-2]",
        "ids[-1] == word[-2]",
        f"{ENGINE}sampling/test_logits_processors.py",
    ),
    Mutant(
        "auditor/reference/distribution.py",
        "log_probs >= kth",
        "log_probs > kth",
        "tests/unit/auditor/reference/test_distribution.py",
    ),
    Mutant(
        "auditor/reference/distribution.py",
        "mass_up_to[:, :-1] < mass",
        "mass_up_to[:, :-1] <= mass",
        "tests/unit/auditor/reference/test_distribution.py tests/unit/native/drafts/test_sampling.py",
    ),
    Mutant(
        "auditor/reference/distribution.py",
        "+ log(sampling.min_p)",
        "+ sampling.min_p - 1",
        "tests/unit/auditor/reference/test_distribution.py",
    ),
    Mutant(
        "orchestrator/core/static_trees.py",
        "key=lambda address: (-value[address], len(address), address)",
        "key=lambda address: (value[address], len(address), address)",
        f"{CORE}test_static_trees.py",
    ),
    # native code; each is compiled anew
    Mutant(
        "native/sampling/rules.cpp",
        "p_[size_t(request.tokens[child - 1])] = 0.0;",
        "p_[size_t(request.tokens[child - 1])] *= 1.0;",
        "tests/unit/native/drafts/test_sampling.py -k decides",
    ),
    Mutant(
        "native/sampling/rules.cpp",
        "request.prefix_len + depths[size_t(node)]);",
        "request.prefix_len + node);",
        "tests/unit/native/drafts/test_sampling.py",
    ),
    Mutant("native/sampling/noise.h", "round < 10", "round < 9", "tests/unit/native/drafts/test_sampling.py -k noise"),
    Mutant(
        "native/drafts/prompt_lookup.h",
        "i % (num_tokens - start)",
        "std::min(i, num_tokens - start - 1)",
        f"{DRAFTING}",
    ),
    # gateway and launcher
    Mutant(
        "gateway/generation.py", '{"generated_ids": self.ids} if self.ids else {}', "{}", f"{GATEWAY}test_generation.py"
    ),
    Mutant(
        "launcher/health.py",
        "self._answer_health(self.watched.why_not_ready())",
        "self._answer_health(self.watched.why_not_live())",
        "tests/unit/launcher/test_health.py",
    ),
]


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a copy of the tracked files, with the libraries that were built here."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        if (built := ROOT / "native/built").exists():
            shutil.copytree(built, Path(folder) / "native/built")
        yield Path(folder)


def outcome(copy: Path, mutant: Mutant) -> str:
    """Return `caught`, `gone`, or what pytest did instead of failing."""
    file = copy / mutant.file
    sound = file.read_text() if file.exists() else ""
    if sound.count(mutant.sound) != 1:
        return "gone: its text is not in the file once"
    file.write_text(sound.replace(mutant.sound, mutant.broken))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    finally:
        file.write_text(sound)
    return "caught" if done.returncode == FAILED else f"NOT CAUGHT (pytest: {done.returncode})\n{done.stdout[-1500:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the bugs; return 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only bugs in files whose names have one of these words (default: all)"
    )
    words = parser.parse_args(arguments).words
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.file for word in words)]
    num_missed = 0
    with copied() as copy:
        for mutant in wanted:
            found = outcome(copy, mutant)
            num_missed += found != "caught"
            print(f"{mutant.file}: {mutant.broken.strip()!r}: {found}", flush=True)
    print(f"{len(wanted) - num_missed} of {len(wanted)} caught")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
