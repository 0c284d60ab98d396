"""The distribution p and the rules that accept drafts (numpy): the reference of the engines, and grammars."""
