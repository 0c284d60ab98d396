"""`python -m build.trtllm plan|build [FILE]`."""

import sys

from build.trtllm.cli import main

sys.exit(main())
