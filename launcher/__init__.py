"""Finds Triton, starts it over the models that a deployment names, watches and heals it, stops it without a trace.

Stdlib only (and `orchestrator.deployment.config`); it knows nothing of tokens, trees or tensors.

    with launcher.Server("serving.toml") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
"""

from launcher.ports import Ports, free_ports
from launcher.server import Server, StartError
from orchestrator.core.errors import ServingError

__all__ = ["Ports", "Server", "ServingError", "StartError", "free_ports"]
