"""The playground's methods: all that the server has, each with its drafter."""

import pytest

from gateway.methods import METHODS
from orchestrator.core.methods import METHODS as SERVED
from orchestrator.core.methods import PROPOSED, find_methods

pytestmark = pytest.mark.unit


def test_every_method_that_has_a_proposer_is_offered_with_its_drafter() -> None:
    single = {name: drafter for name, drafter in METHODS.items() if "+" not in name}
    assert single == {name: SERVED[name].drafter for name in PROPOSED}


def test_unions_are_ones_that_the_server_takes_and_need_one_drafter_at_most() -> None:
    for union, drafter in METHODS.items():
        drafters = {method.drafter for method in find_methods(union, "the playground")} - {""}
        assert drafters == {drafter} - {""}
