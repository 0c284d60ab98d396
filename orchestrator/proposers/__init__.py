"""The drafting methods, one file each, behind the Proposer protocol (orchestrator/proposal.py)."""
