"""An OpenAI-compatible gateway in front of one or more Triton servers; it knows only their public model."""

__version__ = "0.1.0"
