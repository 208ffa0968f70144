"""The closed forms against the printed table, quadrature of the law, SVDs of random matrices."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq

from edgc_ddp.maths.marchenko_pastur import (
    MODELS,
    rank_for_share,
    rank_keeping_error,
    residual_share,
)

RANKS = (4, 16, 32, 64, 128)
TABLE = {
    (1440, 1920): ".9905/.9951 .9631/.9806 .9284/.9615 .8634/.9237 .7471/.8504",
    (1920, 1920): ".9918/.9958 .9681/.9834 .9379/.9669 .8809/.9344 .7779/.8711",
    (1920, 480): ".9817/.9896 .9299/.9586 .8655/.9178 .7486/.8378 .5509/.6844",
    (3584, 3584): ".9956/.9978 .9827/.9911 .9659/.9822 .9337/.9646 .8731/.9298",
}
CELLS = [
    (shape, rank, *map(float, cell.split("/")))
    for shape, line in TABLE.items()
    for rank, cell in zip(RANKS, line.split(), strict=True)
]


@pytest.mark.parametrize(("shape", "rank", "optimum", "one_pass"), CELLS)
def test_table_of_the_method_to_four_digits(shape, rank, optimum, one_pass):
    assert residual_share(rank, *shape) == pytest.approx(optimum, abs=5.1e-5)
    assert residual_share(rank, *shape, model="one_pass") == pytest.approx(one_pass, abs=5.1e-5)


@pytest.mark.parametrize("shape", [(96, 96), (64, 256), (400, 100), (200, 240)])
def test_optimum_is_what_truncated_svd_leaves(shape):
    generator = np.random.default_rng(0)
    energies = np.mean(
        [np.linalg.svd(generator.normal(size=shape), compute_uv=False) ** 2 for _ in range(4)],
        axis=0,
    )
    left = 1 - np.cumsum(energies) / energies.sum()
    worst = max(abs(left[r - 1] - residual_share(r, *shape)) for r in range(1, min(shape) + 1))
    assert worst < 0.01


def test_one_pass_is_what_a_random_start_leaves():
    generator, shape, rank = np.random.default_rng(1), (120, 200), 24
    left = []
    for _ in range(8):
        a = generator.normal(size=shape)
        p, _ = np.linalg.qr(a @ generator.normal(size=(shape[1], rank)))
        left.append(1 - np.sum((p.T @ a) ** 2) / np.sum(a**2))
    assert np.mean(left) == pytest.approx(residual_share(rank, *shape, model="one_pass"), abs=0.005)


@pytest.mark.parametrize("gamma", [1.0, 0.75, 0.25, 0.01])
@pytest.mark.parametrize("kept", [0.01, 0.2, 0.7, 0.99])
def test_optimum_is_the_integral_of_the_law(gamma, kept):
    """Twin: the eigenvalue density integrated down from its upper edge.

    Written with x = centre - 2 sqrt(gamma) cos(angle), which removes the edge singularities.
    """
    root = math.sqrt(gamma)

    def mass(angle, power):
        x = 1 + gamma - 2 * root * math.cos(angle)
        density_dx = (2 * root * math.sin(angle)) ** 2 / (2 * math.pi * gamma * x)
        return density_dx * x**power

    def integral(start, end, power):
        return quad(mass, start, end, args=(power,), epsabs=1e-12, epsrel=1e-12)[0]

    cut = brentq(lambda angle: integral(angle, math.pi, 0) - kept, 1e-6, math.pi, xtol=1e-13)
    long = 10_000
    share = residual_share(kept * gamma * long, round(gamma * long), long)
    assert share == pytest.approx(integral(1e-9, cut, 1), abs=1e-8)


def test_small_rank_follows_the_largest_eigenvalue():
    rows, cols, rank = 1000, 4000, 1e-3
    expected = rank * (rows**-0.5 + cols**-0.5) ** 2
    assert 1 - residual_share(rank, rows, cols) == pytest.approx(expected, rel=1e-3)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 5000),
    cols=st.integers(1, 5000),
    part=st.floats(0, 1),
    model=st.sampled_from(MODELS),
)
def test_inverse_gives_the_rank_back(rows, cols, part, model):
    rank = part * min(rows, cols)
    share = residual_share(rank, rows, cols, model=model)
    assert 0 <= share <= 1
    assert share == residual_share(rank, cols, rows, model=model)
    assert rank_for_share(share, rows, cols, model=model) == pytest.approx(
        rank, abs=1e-7 * max(rows, cols)
    )


@settings(max_examples=100, deadline=None)
@given(share=st.floats(0, 1), rows=st.integers(2, 3000), model=st.sampled_from(MODELS))
def test_forward_gives_the_share_back(share, rows, model):
    rank = rank_for_share(share, rows, 1024, model=model)
    assert 0 <= rank <= min(rows, 1024)
    assert residual_share(rank, rows, 1024, model=model) == pytest.approx(share, abs=1e-10)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (64, 64), (64, 65), (1000, 31)])
def test_falls_from_one_to_zero(shape, model):
    side = min(shape)
    shares = [residual_share(side * i / 200, *shape, model=model) for i in range(201)]
    assert shares[0] == 1.0 and shares[-1] == 0.0
    assert all(after < before for before, after in zip(shares, shares[1:], strict=False))
    assert residual_share(side + 7, *shape, model=model) == 0.0
    assert residual_share(-1, *shape, model=model) == 1.0


@pytest.mark.parametrize("model", MODELS)
def test_ends_of_the_inverse(model):
    assert rank_for_share(1.0, 30, 20, model=model) == 0.0
    assert rank_for_share(1.7, 30, 20, model=model) == 0.0
    assert rank_for_share(0.0, 30, 20, model=model) == 20.0
    assert rank_for_share(-0.1, 30, 20, model=model) == 20.0
    assert math.isnan(rank_for_share(math.nan, 30, 20, model=model))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("exponent", [1, 2])
@pytest.mark.parametrize("change", [0.01, -0.01, -0.3])
def test_kept_error_is_kept(exponent, change, model):
    """The definition: sigma^c G stays the same when ln(sigma) moves by ``change``."""
    rank = rank_keeping_error(100, 512, 768, 1.5, 1.5 + change, exponent=exponent, model=model)
    if change < 0:
        assert rank < 100
    before = residual_share(100, 512, 768, model=model)
    after = residual_share(rank, 512, 768, model=model) * math.exp(exponent * change)
    if rank > 0:
        assert after == pytest.approx(before, abs=1e-10)
    else:
        assert before * math.exp(-exponent * change) >= 1


def test_exponent_two_moves_as_twice_the_entropy_change():
    twice = rank_keeping_error(64, 512, 512, 0.0, 0.1, exponent=1)
    once = rank_keeping_error(64, 512, 512, 0.0, 0.05)
    assert once == pytest.approx(twice)
    assert once > 64


def test_falling_entropy_soon_asks_for_nothing():
    """Method, section 5: G is near 1, so a few percent less sigma already asks for rank 0."""
    assert rank_keeping_error(32, 1920, 1920, 0.0, math.log(0.98)) > 0
    assert rank_keeping_error(32, 1920, 1920, 0.0, math.log(0.96)) == 0.0
    assert rank_keeping_error(32, 1920, 1920, 0.0, -math.inf) == 0.0


def test_extremes_stay_numbers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rank_keeping_error(64, 64, 96, 0.0, -1e6) == 64.0
        assert rank_keeping_error(0, 64, 96, 0.0, 0.0) == 0.0
        assert rank_keeping_error(8, 64, 96, 0.0, math.inf) == 64.0
        assert math.isnan(rank_keeping_error(8, 64, 96, math.nan, 0.0))
        assert math.isnan(rank_keeping_error(math.nan, 64, 96, 0.0, 0.0))


def test_errors_name_the_option_and_the_remedy():
    with pytest.raises(ValueError, match="exponent=3 .*use 2"):
        rank_keeping_error(4, 8, 8, 0.0, 0.0, exponent=3)
    with pytest.raises(ValueError, match="model='best' .*optimum, one_pass"):
        residual_share(4, 8, 8, model="best")
    with pytest.raises(ValueError, match="model='best' .*optimum, one_pass"):
        rank_for_share(0.5, 8, 8, model="best")
    with pytest.raises(ValueError, match="0 x 8 .*at least 1"):
        residual_share(4, 0, 8)
