"""The heads as torch modules, which build/heads trains too."""
