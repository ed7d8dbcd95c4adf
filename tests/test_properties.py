"""Random geometries and random pipelines agree with the reference on every device.

The examples are the same in every run. Devices whose compiler is slow get fewer.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.steps import ConvTranspose3d
from tests.strategies import (
    Place,
    Recipe,
    convolutions,
    every_place,
    pipelines,
    tensors_of,
    thorough,
)

#: Algorithms that transform their input, so that sums of small integers need not come out exact.
TRANSFORMING = ("winograd",)


def count(place: Place, fast: int, slow: int) -> int:
    return slow if place.slow else fast


def agrees(place: Place, recipe: Recipe, kind: str) -> np.ndarray:
    """Run a drawn operator at ``place`` and insist on the reference's result."""
    operator = recipe.bind()
    result, comparison = place.check(operator, tensors_of(operator, kind))
    assert comparison.passed, comparison.reason
    return result


@every_place
def test_random_convolutions(place: Place) -> None:
    place.need()

    @thorough(count(place, 60, 10))
    @given(convolutions())
    def check(recipe: Recipe) -> None:
        agrees(place, recipe, "signed")

    check()


@every_place
def test_random_convolutions_of_small_integers_are_exact(place: Place) -> None:
    place.need()

    @thorough(count(place, 60, 10))
    @given(convolutions(st.sampled_from(("float32", "float64"))))
    def check(recipe: Recipe) -> None:
        result = agrees(place, recipe, "integers")
        if place.algorithm not in TRANSFORMING:
            operator = recipe.bind()
            exact = Place("numpy").run(operator.problem, **tensors_of(operator, "integers"))
            np.testing.assert_array_equal(result, exact)

    check()


@every_place
def test_random_pipelines(place: Place) -> None:
    place.need()

    @thorough(count(place, 100, 12))
    @given(pipelines(), st.sampled_from(("signed", "signed", "signed", "large_mean", "one_nan", "one_inf")))
    def check(recipe: Recipe, kind: str) -> None:
        agrees(place, recipe, kind)

    check()


@thorough(200)
@given(pipelines())
def test_drawn_pipelines_are_what_they_claim(recipe: Recipe) -> None:
    """The strategy itself: legal, small, and with a convolution in it."""
    operator = recipe.bind()
    assert any(isinstance(step, ConvTranspose3d) for step in operator.steps)
    assert all(0 < np.prod(step.shape) <= 1_000_000 for step in operator.steps)
