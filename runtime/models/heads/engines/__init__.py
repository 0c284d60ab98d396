"""Engines that answer draft calls with a head, level by level."""
