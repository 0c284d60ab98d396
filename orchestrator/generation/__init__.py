"""The main loop, and what it produces: text, statistics, traces, responses."""
