"""Triton model `speculative`: the public model that streams; its loop is `orchestrator/server/loop.py`."""

from orchestrator.server.public_host import PublicHost


class TritonPythonModel(PublicHost):
    """Triton's entry points."""
