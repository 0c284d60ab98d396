"""Triton model `speculative`: the public model that streams; its loop is `orchestrator/generation/loop.py`."""

from orchestrator.triton.public_host import PublicHost


class TritonPythonModel(PublicHost):
    """Triton's entry points."""
