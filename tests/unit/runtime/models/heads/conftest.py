"""A tiny target, and EAGLE heads of every kind over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.eagle_heads import Eagle
from tests.support.heads import (
    make_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


#: Of EAGLE-3.1: the paper's norms, and those of gpt-oss's heads with a normed residual.
NORMS = (("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual", "norm_output"))


@pytest.fixture(
    scope="module",
    params=[
        *((kind, native, ()) for kind in ("eagle", "eagle3") for native in (False, True)),
        *(("eagle3", native, norms) for norms in NORMS for native in (False, True)),
    ],
    ids=lambda param: "-".join([param[0], "native" if param[1] else "torch", *param[2]]),
)
def eagle(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    kind, native, norms = request.param
    return Eagle(kind, tmp_path_factory.mktemp(kind), target, native, **({"norms": norms} if norms else {}))


@pytest.fixture(params=["eagle", "eagle3"])
def torch_eagle(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Eagle:
    return Eagle(request.param, tmp_path, target)
