"""Reads metrics of the engines from a running server's metrics port."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable

LIMIT_S = 5.0
#: An opener without proxies: the ports are on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_INFO = re.compile(r"^spec_engine_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PASSES = re.compile(r'^spec_passes_total\{model="target"\} (\S+)$', re.MULTILINE)


def kernels_of(metrics: str) -> dict[str, str]:
    """Return {model: what computes its passes} from the text of a metrics port."""
    labels = [dict(_LABEL.findall(series)) for series in _INFO.findall(metrics)]
    return {one["model"]: one["kernels"] for one in labels if "model" in one and "kernels" in one}


def with_kernels(models: Iterable[str], metrics_url: str) -> list[str]:
    """Return the names of models, each followed by what computes its passes if the metrics port says so."""
    kernels = kernels_of(_read(metrics_url, LIMIT_S))
    return [f"{name} ({kernels[name]})" if name in kernels else name for name in models]


def num_passes(metrics_url: str, limit_s: float) -> float | None:
    """Return how many passes the target has run, None if that is unknown."""
    found = _PASSES.search(_read(metrics_url, limit_s))
    return float(found[1]) if found else None


def _read(metrics_url: str, limit_s: float) -> str:
    """Return the text of a metrics port, "" if it does not answer."""
    try:
        with DIRECT.open(metrics_url, timeout=limit_s) as response:
            return str(response.read().decode(errors="replace"))
    except OSError:
        return ""
