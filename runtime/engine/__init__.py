"""The engine thread, its batching policy, and the target and draft engines that it runs."""
