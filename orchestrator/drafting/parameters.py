"""The base of the methods' parameters, which a request sets in `speculation_config`; every method declares its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator, PrivateAttr

from orchestrator.core.declarations import Declaration, json_object, validate
from orchestrator.core.errors import RequestError
from orchestrator.core.static_trees import read_choices
from orchestrator.core.tree import MAX_NODES, TokenTree

WHERE = "input speculation_config"

Config = TypeVar("Config", bound="MethodConfig")
#: The parameters that may be "auto", and the longest chain that is then drafted unless draft_len is set.
SIZES, LONGEST_AUTO = ("draft_len", "max_nodes"), 16
#: A static tree, in JSON a list of lists of ranks.
Choices = Annotated[
    TokenTree,
    PlainValidator(lambda value: read_choices("choices", value, WHERE)),
    PlainSerializer(lambda tree: [list(path) for path in tree.paths[1:]]),
]


class MethodConfig(Declaration):
    """Parameters that every method has. max_nodes: maximum draft nodes of a tree, root not counted.

    auto_sizes: those of SIZES that a request sets to "auto": drafts are only as large as pays off.
    """

    max_nodes: int = Field(MAX_NODES, ge=0, le=MAX_NODES)
    _auto_sizes: tuple[str, ...] = PrivateAttr(())

    @property
    def auto_sizes(self) -> tuple[str, ...]:
        """Return the sizes that a request sets to "auto"."""
        return self._auto_sizes

    @property
    def as_given(self) -> dict[str, Any]:
        """The parameters that a request set, as JSON takes them."""
        return self.model_dump(mode="json", exclude_unset=True) | dict.fromkeys(self._auto_sizes, "auto")

    @property
    def num_levels(self) -> int:
        """The maximum number of levels of a tree, as far as the parameters determine it."""
        return min(self.max_nodes, getattr(self, "draft_len", self.max_nodes))

    @property
    def is_chain(self) -> bool:
        """True if every proposal with these parameters is a chain, although the method can branch."""
        return False

    def as_chain(self) -> Self:
        """Return the parameters for a rule or an engine that takes only chains, if the method adapts to that."""
        return self

    def as_member(self) -> Self:
        """Return the parameters of a method whose drafts are merged with those of others."""
        return self


def config_of(
    config: type[Config], method: str, values: Mapping[str, Any], aliases: Mapping[str, int] = MappingProxyType({})
) -> Config:
    """Return a method's parameters: those that a request sets, the others at their defaults.

    aliases: parameters that have inputs of their own (num_draft_tokens sets draft_len); those that the method lacks are
    ignored, and `values` takes precedence.
    Raises RequestError for an unknown key and for a value that the parameter does not allow.
    """
    known = {name: value for name, value in aliases.items() if name in config.model_fields} | dict(values)
    if "adaptive" in known:
        raise RequestError(
            'adaptive is no longer a parameter: set draft_len or max_nodes to "auto"; while many requests run at once, '
            f"drafters rest by themselves (key draft_max_sequences in the deployment file) ({WHERE})"
        )
    sizes = tuple(name for name in SIZES if name in config.model_fields and known.get(name) == "auto")
    known = {name: value for name, value in known.items() if name not in sizes}
    if sizes and "draft_len" in config.model_fields:
        known.setdefault("draft_len", LONGEST_AUTO)
    checked = validate(config, known, lambda key: WHERE, error=RequestError, what=f"key of {method}")
    checked._auto_sizes = sizes
    return checked


def read_object(config_json: str) -> dict[str, Any]:
    """Parse `speculation_config`; an empty text is an empty object. Raises RequestError if it is not a JSON object."""
    return json_object(config_json or "{}", WHERE, RequestError)
