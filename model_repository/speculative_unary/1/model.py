"""Triton model `speculative_unary`: the public model for /infer and unary gRPC, with one response a request."""

from orchestrator.server.public_host import PublicHost


class TritonPythonModel(PublicHost):
    """Triton's entry points."""
