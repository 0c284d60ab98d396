"""Drafting heads on the target's hidden states: Medusa, EAGLE-1/2/3, ReDrafter; their modules, files and engines."""
