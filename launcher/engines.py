"""What computes each model of a running server, read from its metrics port."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable

LIMIT_S = 5.0
_INFO = re.compile(r"^spec_engine_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def kernels_of(metrics: str) -> dict[str, str]:
    """Return {model: what computes its passes} from the text of a metrics port."""
    labels = [dict(_LABEL.findall(series)) for series in _INFO.findall(metrics)]
    return {one["model"]: one["kernels"] for one in labels if "model" in one and "kernels" in one}


def with_kernels(models: Iterable[str], metrics_url: str) -> list[str]:
    """Return the names of models, each followed by what computes its passes where the metrics port tells it."""
    try:
        with _NO_PROXY.open(metrics_url, timeout=LIMIT_S) as answer:
            kernels = kernels_of(answer.read().decode())
    except OSError:
        kernels = {}
    return [f"{name} ({kernels[name]})" if name in kernels else name for name in models]
