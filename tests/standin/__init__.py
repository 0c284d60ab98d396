"""Stand-ins for libraries that this machine cannot have; tests alone put this folder on sys.path."""

from pathlib import Path

FOLDER = Path(__file__).parent
