"""Random geometries and random pipelines agree with the reference on every device.

The examples are the same in every run. Devices whose compiler is slow get fewer.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.ops.steps import Convolution
from tests.strategies import Place, Recipe, convolutions, every_place, pipelines, tensors_of, thorough

#: Algorithms that transform their input, so that sums of small integers need not come out exact.
TRANSFORMING = ("winograd",)


def agrees(place: Place, recipe: Recipe, kind: str) -> np.ndarray:
    """Run a drawn operator at ``place`` and insist on the reference's result."""
    operator = recipe.bind()
    result, comparison = place.check(operator, tensors_of(operator, kind))
    assert comparison.passed, comparison.reason
    return result


@every_place
def test_random_convolutions(place: Place) -> None:
    """Bell-shaped numbers within the bound, small integers to the last bit."""
    place.need()

    @thorough(5 if place.slow else 25)
    @given(convolutions())
    def check(recipe: Recipe) -> None:
        agrees(place, recipe, "signed")
        result = agrees(place, recipe, "integers")
        if place.algorithm not in TRANSFORMING:  # TF32 holds these integers
            operator = recipe.bind()
            exact = Place("numpy").run(operator.problem, **tensors_of(operator, "integers"))
            np.testing.assert_array_equal(result, exact)

    check()


KINDS = st.sampled_from(("signed", "signed", "signed", "large_mean", "one_nan", "one_inf"))


@every_place
def test_random_pipelines(place: Place) -> None:
    place.need()

    @thorough(5 if place.slow else 30)
    @given(pipelines(), KINDS)
    def check(recipe: Recipe, kind: str) -> None:
        agrees(place, recipe, kind)

    check()


@thorough(200)
@given(pipelines())
def test_drawn_pipelines_are_what_they_claim(recipe: Recipe) -> None:
    """The strategy itself: legal, small, and with a convolution in it."""
    operator = recipe.bind()
    assert any(isinstance(step, Convolution) for step in operator.steps)
    assert all(np.prod(step.shape) <= 1_000_000 for step in operator.steps)
