"""Plan TensorRT-LLM engines, and make them inside the container."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from build.trtllm.builder import StageFailed, build
from build.trtllm.plan import Plan, make_plan
from build.trtllm.render import command_line, plan_json, plan_text
from build.trtllm.spec import EngineSpec, load_spec
from orchestrator.core.errors import ConfigError

_EPILOG = """\
Every key of the file is a flag, too, and the flag wins: max_batch_size is --max-batch-size.
The keys and their defaults: build/trtllm/spec.py; the manual: docs/tensorrt-llm.md.

exit status: 0 done, 1 a stage failed, 2 the plan is refused, a tool or a folder is missing, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    keys = argparse.ArgumentParser(add_help=False)
    keys.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the engines, in TOML")
    for key in EngineSpec.model_fields:
        keys.add_argument(f"--{key.replace('_', '-')}", metavar="VALUE", help=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(
        prog="python -m build.trtllm",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    plan = verbs.add_parser("plan", parents=[keys], allow_abbrev=False, help="print commands, sizes and memory")
    plan.add_argument("--json", action="store_true", help="as JSON")
    run = verbs.add_parser("build", parents=[keys], allow_abbrev=False, help="run the commands; resumes where it ended")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="where checkpoints, engines and logs go")
    run.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan or build; return the exit status."""
    options = parser().parse_args(arguments)
    flags = {key: word for key, word in vars(options).items() if key in EngineSpec.model_fields and word is not None}
    try:
        plan = make_plan(load_spec(options.file, flags))
        if options.verb == "plan":
            print(plan_json(plan) if options.json else plan_text(plan), end="")
        elif options.dry_run:
            print(_shell_lines(plan, options.out))
        else:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            build(plan, options.out.absolute())
    except ConfigError as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", 2)
    except StageFailed as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command continues with the stage that was running", 130)
    return 0


def _shell_lines(plan: Plan, out: Path) -> str:
    """Return the commands as shell lines, to be read or run by hand in the container."""
    folder = shlex.quote(str(out))
    lines = [f"# in {plan.image}", f"mkdir -p {folder} && cd {folder}"]
    for stage in plan.stages:
        lines += [f"# {stage.name} -> {stage.output}", command_line(stage.argv)]
    return "\n".join(lines)


def _fail(error: object, status: int) -> int:
    print(f"trtllm: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
