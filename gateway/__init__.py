"""An OpenAI-compatible gateway in front of one or several Triton servers; it knows their public model only."""

__version__ = "0.1.0"
