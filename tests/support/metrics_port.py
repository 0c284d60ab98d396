"""A stand-in for Triton's metrics port, as strict as the real one: counters only grow, gauges are set."""

from __future__ import annotations

from typing import Any


class MetricsPort:
    """Adds up what is shown.

    values: the series as on the page: name{label="value",…}, labels in alphabetical order.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.num_calls = 0
        self.fails = False

    def family(self, name: str, kind: str, description: str) -> Any:
        """Return a family of series; replaces `orchestrator.server.pb.metric_family`."""
        assert kind in ("counter", "gauge") and description
        port = self

        class Series:
            def __init__(self, labels: dict[str, str]) -> None:
                inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
                self.key = f"{name}{{{inside}}}"
                assert self.key not in port.values, f"{self.key} is made twice"

            def increment(self, value: float) -> None:
                assert kind == "counter" and value >= 0
                self._note(port.values.get(self.key, 0) + value)

            def set(self, value: float) -> None:
                assert kind == "gauge"
                self._note(value)

            def _note(self, value: float) -> None:
                port.num_calls += 1
                if port.fails:
                    raise RuntimeError("the port is gone")
                port.values[self.key] = value

        class Family:
            Metric = Series

        return Family
