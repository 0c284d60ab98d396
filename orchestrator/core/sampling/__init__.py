"""The distribution p and the acceptance rules in numpy, the reference for the engines; and grammars."""
