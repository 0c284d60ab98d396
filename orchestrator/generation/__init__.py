"""The main loop, and what it feeds: text, statistics, trace, responses."""
