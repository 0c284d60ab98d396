"""The panels of the Grafana board, row by row: titles, units and expressions."""

from __future__ import annotations

from typing import NamedTuple

#: Series of the chosen servers and public models; of the chosen servers.
REQUESTS, SERVERS = '{instance=~"$instance",model=~"$model"}', '{instance=~"$instance"}'


class Panel(NamedTuple):
    """One panel. queries: legend and expression of each; kind: timeseries, bargauge or table; unit: Grafana's name."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    description: str = ""
    stacked: bool = False


def _rate(series: str, by: str = "", labels: str = REQUESTS) -> str:
    """Return the rate of a counter, summed by these labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({series}{labels}[$__rate_interval]))"


def _ratio(part: str, whole: str, by: str = "", labels: str = REQUESTS) -> str:
    """Return the rate of one counter ÷ that of another."""
    return f"{_rate(part, by, labels)} / {_rate(whole, by, labels)}"


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Return median, 95th and 99th percentile of a histogram."""
    buckets = _rate(f"{histogram}_bucket", "le")
    return tuple((f"p{q * 100:g}", f"histogram_quantile({q:g}, {buckets})") for q in (0.5, 0.95, 0.99))


def _part_of_time(name: str) -> str:
    whole = " + ".join(_rate(f"spec_{part}_seconds_total") for part in ("draft", "verify", "overhead"))
    return f"{_rate(f'spec_{name}_seconds_total')} / ({whole})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Load",
        (
            Panel(
                "Requests",
                "short",
                (
                    ("running", f"sum(spec_num_requests_running{REQUESTS})"),
                    ("waiting", f"sum(spec_num_requests_waiting{REQUESTS})"),
                    ("max_running", f"sum(max by (instance) (spec_max_requests_running{SERVERS}))"),
                    ("max_waiting", f"sum(spec_max_requests_waiting{REQUESTS})"),
                ),
            ),
            Panel(
                "Answered", "reqps", (("{{finished_reason}}", _rate("spec_request_success_total", "finished_reason")),)
            ),
            Panel("Refused", "reqps", (("{{reason}}", _rate("spec_request_refused_total", "reason")),)),
            Panel(
                "Tokens",
                "short",
                (
                    ("generated/s", _rate("spec_generation_tokens_total")),
                    ("prompt/s", _rate("spec_prompt_tokens_total")),
                    ("prompt, cached/s", _rate("spec_prefix_cache_hits_total")),
                ),
                description="A request counts when it ends, with all its tokens.",
            ),
            Panel(
                "Generated tokens/s by method",
                "short",
                (("{{method}}", _rate("spec_generation_tokens_total", "method")),),
            ),
            Panel(
                "Length of requests, median",
                "short",
                (
                    ("prompt", _quantiles("spec_request_prompt_tokens")[0][1]),
                    ("output", _quantiles("spec_request_generation_tokens")[0][1]),
                ),
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", _quantiles("spec_time_to_first_token_seconds")),
            Panel("Time in the queue", "s", _quantiles("spec_request_queue_time_seconds")),
            Panel("Whole request", "s", _quantiles("spec_e2e_request_latency_seconds")),
            Panel(
                "Time per token",
                "s",
                _quantiles("spec_inter_token_latency_seconds"),
                description="A step that gives n tokens after t seconds counts as n tokens of t ÷ n each.",
            ),
            Panel("Time between chunks", "s", _quantiles("spec_inter_chunk_latency_seconds")),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Acceptance length",
                "short",
                (("{{method}}", _ratio("spec_generation_tokens_total", "spec_steps_total", "method")),),
                description="Tokens per step, the bonus or recovered token included.",
            ),
            Panel(
                "Draft acceptance rate",
                "percentunit",
                (
                    (
                        "{{method}}: {{source}}",
                        _ratio("spec_accepted_tokens_total", "spec_draft_tokens_total", "method, source"),
                    ),
                ),
            ),
            Panel(
                "Acceptance by depth",
                "percentunit",
                (
                    (
                        "{{position}}",
                        _ratio("spec_accepted_per_position_total", "spec_tested_per_position_total", "position"),
                    ),
                ),
                kind="bargauge",
                description="Accepted ÷ tested at each depth, 1 = the first draft token.",
            ),
            Panel(
                "Draft tokens",
                "short",
                (
                    ("verified/s", _rate("spec_draft_tokens_total")),
                    ("accepted/s", _rate("spec_accepted_tokens_total")),
                ),
            ),
            Panel(
                "Where the time of a request goes",
                "percentunit",
                tuple((name, _part_of_time(name)) for name in ("draft", "verify", "overhead")),
                description="After its first token.",
                stacked=True,
            ),
        ),
    ),
    (
        "Drafters",
        (
            Panel(
                "Calls",
                "reqps",
                tuple(
                    (f"{{{{drafter}}}} {what}", _rate(f"spec_draft_{what}_total", "drafter"))
                    for what in ("calls", "late", "failed", "skipped")
                ),
            ),
            Panel(
                "Breaker open",
                "short",
                (("{{model}}: {{drafter}}", f"max by (model, drafter) (spec_draft_breaker_open{REQUESTS})"),),
            ),
        ),
    ),
    (
        "Engines",
        (
            Panel(
                "KV blocks of the target",
                "short",
                tuple(
                    (state, f'sum(spec_kv_blocks{{instance=~"$instance",model="target",state="{state}"}})')
                    for state in ("held", "cached", "free")
                ),
                stacked=True,
            ),
            Panel(
                "KV blocks held",
                "percentunit",
                (("{{model}}", f"max by (model) (spec_kv_cache_usage_ratio{SERVERS})"),),
            ),
            Panel(
                "Prefix cache hit rate",
                "percentunit",
                (("hits", _ratio("spec_prefix_cache_hits_total", "spec_prompt_tokens_total")),),
            ),
            Panel(
                "Requests per pass",
                "short",
                (("{{model}}", _ratio("spec_pass_requests_total", "spec_passes_total", "model", SERVERS)),),
            ),
            Panel(
                "Share of time in passes",
                "percentunit",
                (("{{instance}} {{model}}", _rate("spec_pass_seconds_total", "instance, model", SERVERS)),),
            ),
            Panel("Sequences with KV blocks", "short", (("{{model}}", f"sum by (model) (spec_sequences{SERVERS})"),)),
            Panel("What computes", "short", (("", f"spec_engine_info{SERVERS}"),), kind="table"),
        ),
    ),
    (
        "Gateway",
        (
            Panel("Requests by status", "reqps", (("{{status}}", _rate("spec_gateway_requests_total", "status", "")),)),
            Panel(
                "Streams that moved", "short", (("{{reason}}", _rate("spec_gateway_failovers_total", "reason", "")),)
            ),
            Panel("Replica ready", "short", (("{{replica}}", "min by (replica) (spec_gateway_replica_ready)"),)),
        ),
    ),
)
