"""Finds Triton, starts it with a deployment's models, watches and repairs it, and stops it without leaving a trace.

It knows nothing about tokens, trees or tensors.

    with launcher.Server("serving.toml") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
"""

from launcher.server import Server
from launcher.settings import Ports, free_ports
from launcher.triton_process import StartError
from orchestrator.core.errors import ServingError

__all__ = ["Ports", "Server", "ServingError", "StartError", "free_ports"]
