"""Estimators against closed forms and scipy; the sample's share, coverage and cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import differential_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from edgc_ddp.maths.entropy import (
    ESTIMATORS,
    gaussian,
    histogram,
    histogram_code,
    resolve_estimator,
    spectral,
    strided_sample,
)

torch.set_num_threads(1)

SHAPES = [(64, 64), (64, 256), (100, 37), (63, 65), (63, 67), (480, 96), (1000, 2), (3, 1000)]
BETAS = [1.0, 0.75, 0.5, 0.3, 0.25, 0.1, 0.05, 0.005]
SCALE_FREE = ("histogram_code", "spectral")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbered(rows, cols):
    return torch.arange(float(rows * cols)).view(rows, cols)


# The sample


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_share_is_beta_and_no_entry_counts_twice(shape, beta):
    grad = numbered(*shape)
    for offset in range(7):
        sample = strided_sample(grad, beta, offset)
        assert sample.numel() / grad.numel() == pytest.approx(beta, rel=0.05)
        assert sample.unique().numel() == sample.numel()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_quarter_is_exact_where_rows_are_multiples_of_the_stride(layout):
    grad = numbered(128, 64) if layout == "contiguous" else numbered(64, 128).t()
    for offset in range(12):
        assert strided_sample(grad, 0.25, offset).numel() == grad.numel() / 4


@pytest.mark.parametrize("beta", [0.75, 0.25, 0.1])
@pytest.mark.parametrize("shape", [(64, 64), (64, 65), (64, 63), (256, 40), (48, 640)])
def test_one_sample_sees_all_columns_and_nearly_all_rows(shape, beta):
    where = strided_sample(numbered(*shape), beta, 3).reshape(-1).long()
    assert (where % shape[1]).unique().numel() == shape[1]
    assert (where // shape[1]).unique().numel() > 0.9 * shape[0]


@pytest.mark.parametrize("beta", [0.75, 0.3, 0.25, 0.05])
@pytest.mark.parametrize("shape", SHAPES)
def test_offsets_cover_every_entry(shape, beta):
    grad = numbered(*shape)
    seen = torch.cat([strided_sample(grad, beta, o).reshape(-1) for o in range(2 * 20)])
    assert seen.unique().numel() == grad.numel()


@pytest.mark.parametrize("every", [4, 8, 10])
def test_samples_taken_at_regular_iterations_do_not_meet_one_phase_only(every):
    grad = numbered(64, 64)
    seen = torch.cat([strided_sample(grad, 0.25, every * i).reshape(-1) for i in range(24)])
    assert seen.unique().numel() > 0.97 * grad.numel()


@pytest.mark.parametrize(
    "make", [lambda g: g, lambda g: g.t(), lambda g: g[:, :20], lambda g: g[3:]]
)
def test_sample_is_a_view_of_any_layout(make):
    base = normal(64, 48)
    grad = make(base)
    sample = strided_sample(grad, 0.25, 5)
    assert sample.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert sample.numel() / grad.numel() == pytest.approx(0.25, abs=0.02)
    assert torch.isin(sample, grad).all()


def test_tiny_matrix_is_used_whole():
    assert strided_sample(torch.ones(1, 1), 0.25, 9).numel() == 1
    assert strided_sample(torch.ones(2, 3), 0.25, 9).numel() == 6


@pytest.mark.parametrize("beta", [0.0, -0.5, 1.5, math.nan])
def test_beta_outside_is_refused(beta):
    with pytest.raises(ValueError, match=r"beta=.*\(0, 1\]"):
        strided_sample(torch.ones(4, 4), beta, 0)


def test_negative_offset_is_refused():
    with pytest.raises(ValueError, match="offset=-1"):
        strided_sample(torch.ones(4, 4), 0.5, -1)


# Differential entropies


def draw(law, sigma):
    generator = np.random.default_rng(5)
    unit = {
        "normal": lambda: generator.normal(size=(512, 512)),
        "laplace": lambda: generator.laplace(scale=math.sqrt(0.5), size=(512, 512)),
        "uniform": lambda: generator.uniform(-math.sqrt(3), math.sqrt(3), size=(512, 512)),
    }[law]()
    return torch.from_numpy((sigma * unit).astype(np.float32))


CLOSED_FORM = {
    "normal": 0.5 * math.log(2 * math.pi * math.e),
    "laplace": 1 + math.log(2 * math.sqrt(0.5)),
    "uniform": math.log(2 * math.sqrt(3)),
}


@pytest.mark.parametrize("sigma", [10.0, 1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("law", CLOSED_FORM)
def test_histogram_is_the_closed_form_and_scipys(law, sigma):
    grad = draw(law, sigma)
    found = float(histogram(grad, 1.0, 0))
    assert found == pytest.approx(CLOSED_FORM[law] + math.log(sigma), abs=0.02)
    oracle = differential_entropy(grad.double().numpy().ravel()[::8])
    assert found == pytest.approx(float(oracle), abs=0.03)


@pytest.mark.parametrize("sigma", [10.0, 1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("law", CLOSED_FORM)
def test_gaussian_is_the_normal_of_equal_variance(law, sigma):
    """Equal to the oracle on normal samples, above it on others: the normal has most entropy."""
    grad = draw(law, sigma)
    found = float(gaussian(grad, 1.0, 0))
    assert found == pytest.approx(math.log(sigma) + 1.41894, abs=0.01)
    oracle = float(differential_entropy(grad.double().numpy().ravel()[::8]))
    if law == "normal":
        assert found == pytest.approx(oracle, abs=0.01)
    else:
        assert found > oracle + 0.05


def test_gaussian_takes_the_mean_off():
    grad = normal(256, 256)
    assert float(gaussian(grad + 100, 1.0, 0)) == pytest.approx(
        float(gaussian(grad, 1.0, 0)), abs=1e-4
    )


def test_histogram_with_stated_edges_leaves_the_rest_out():
    grad = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) * 4
    assert float(histogram(grad, 1.0, 0, bins=16, edges=(0.0, 2.0))) == pytest.approx(
        math.log(2), abs=0.01
    )
    assert math.isnan(float(histogram(grad, 1.0, 0, edges=(10.0, 11.0))))
    assert float(histogram(torch.full((4, 4), 0.5), 1.0, 0, bins=4, edges=(0.0, 4.0))) == 0.0


def test_histogram_twin_of_numpy():
    grad = normal(300, 200)
    counts, edges = np.histogram(grad.double().numpy(), bins=256)
    share = counts[counts > 0] / counts.sum()
    expected = -(share * np.log(share)).sum() + math.log(edges[1] - edges[0])
    assert float(histogram(grad, 1.0, 0)) == pytest.approx(expected, abs=1e-4)


def test_histogram_refuses_unusable_bins():
    with pytest.raises(ValueError, match="edges=.*increasing"):
        histogram(torch.ones(4, 4), 1.0, 0, edges=(1.0, 1.0))
    with pytest.raises(ValueError, match="bins=0"):
        histogram(torch.ones(4, 4), 1.0, 0, bins=0)


@pytest.mark.parametrize("name", ["gaussian", "histogram"])
@pytest.mark.parametrize("beta", [0.5, 0.25, 0.05])
def test_sampling_hardly_moves_the_entropy(name, beta):
    """On a gradient whose columns and rows differ in scale, as real ones do."""
    scale = torch.logspace(-1, 0, 512)
    grad = normal(512, 512) * scale * scale.flip(0)[:, None]
    whole = float(ESTIMATORS[name](grad, 1.0, 0))
    part = [float(ESTIMATORS[name](grad, beta, offset)) for offset in range(8)]
    assert np.mean(part) == pytest.approx(whole, abs=0.03)
    assert max(abs(value - whole) for value in part) < 0.1


# Scale-free ones


@pytest.mark.parametrize("sigma", [1.0, 1e-3, 1e-6])
def test_histogram_code_gives_its_one_number(sigma):
    assert float(histogram_code(normal(1024, 1024) * sigma, 1.0, 0)) == pytest.approx(
        6.04, abs=0.06
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scale_shows_exactly_where_documented(name):
    grad = normal(128, 128)
    change = float(ESTIMATORS[name](grad * 1e-3, 1.0, 0) - ESTIMATORS[name](grad, 1.0, 0))
    expected = 0.0 if name in SCALE_FREE else math.log(1e-3)
    assert change == pytest.approx(expected, abs=5e-3)


def effective_rank(grad):
    energy = np.linalg.svd(grad.double().numpy(), compute_uv=False) ** 2
    share = energy / energy.sum()
    return math.exp(-(share * np.log(np.maximum(share, 1e-300))).sum())


@pytest.mark.parametrize("shape", [(200, 300), (300, 100), (64, 64)])
@pytest.mark.parametrize("rank", [1, 5, 20, 32])
@pytest.mark.parametrize("decades", [0, 3])
def test_spectral_is_the_effective_rank_up_to_32(shape, rank, decades):
    grad = (
        normal(shape[0], rank) * torch.logspace(0, -decades, rank) @ normal(rank, shape[1], seed=1)
    )
    assert float(spectral(grad, 1.0, 0).exp()) == pytest.approx(effective_rank(grad), rel=0.01)


@pytest.mark.parametrize("shape", [(128, 128), (96, 400)])
def test_spectral_is_an_upper_estimate_of_full_spectra(shape):
    grad = normal(*shape)
    found, true = float(spectral(grad, 1.0, 0).exp()), effective_rank(grad)
    assert 0.999 * true < found < min(1.3 * true, min(shape) * 1.0001)


def test_spectral_of_a_long_matrix_needs_a_quarter_only():
    grad = normal(2000, 6) @ normal(6, 50, seed=1)
    assert float(spectral(grad, 0.25, 2)) == pytest.approx(float(spectral(grad, 1.0, 0)), abs=0.05)


# The contract of every estimator

DEGENERATE = {
    "zeros": (torch.zeros(16, 24), -math.inf),
    "one zero": (torch.zeros(1, 1), -math.inf),
    "nan": (torch.full((16, 24), math.nan), math.nan),
    "inf": (torch.full((16, 24), math.inf), math.nan),
    "one nan among numbers": (normal(16, 24).index_fill(0, torch.tensor(3), math.nan), math.nan),
    "both infinities": (torch.tensor([[math.inf, -math.inf], [1.0, 2.0]]), math.nan),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_degenerate_input_gives_the_stated_number(name, case):
    grad, expected = DEGENERATE[case]
    found = ESTIMATORS[name](grad, 1.0, 0)
    assert found.shape == () and found.dtype == torch.float32
    assert math.isnan(found) if math.isnan(expected) else float(found) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_entry_and_constants_have_no_spread(name):
    """One direction carries everything, so the effective rank alone has an answer: 1."""
    for grad in (torch.full((1, 1), 3.0), torch.full((8, 8), 0.5), torch.full((1, 40), -2.0)):
        found = float(ESTIMATORS[name](grad, 1.0, 4))
        assert found == pytest.approx(0.0, abs=1e-4) if name == "spectral" else found == -math.inf


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_give_a_float32_close_by(name, dtype):
    grad = normal(128, 96)
    found = ESTIMATORS[name](grad.to(dtype), 0.5, 1)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(ESTIMATORS[name](grad, 0.5, 1)), abs=0.05)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("make", [lambda g: g.t(), lambda g: g[:, :40], lambda g: g[::2]])
def test_layout_does_not_matter(name, make):
    grad = make(normal(96, 128))
    whole = [float(ESTIMATORS[name](view, 1.0, 0)) for view in (grad, grad.contiguous())]
    assert whole[0] == pytest.approx(whole[1], abs=1e-4)
    assert math.isfinite(ESTIMATORS[name](grad, 0.25, 3))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_repeat_and_leave_input_and_global_generator_alone(name):
    grad, state = normal(64, 96), torch.get_rng_state()
    before = grad.clone()
    first, second = (ESTIMATORS[name](grad, 0.25, 5) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(grad, before)
    assert torch.equal(torch.get_rng_state(), state)


class Watch(TorchDispatchMode):
    """Notes operations that would wait for a GPU, and the largest result that is no view."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "bincount",
        "eig",
        "svd",
    )

    def __init__(self):
        super().__init__()
        self.waiting, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
        if any(word in name for word in self.WAITING) or (
            name.startswith("index") and any(a.dtype == torch.bool for a in masks)
        ):
            self.waiting.append(name)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view() and "alias" not in name:
            fresh = result.untyped_storage().data_ptr() not in {
                a.untyped_storage().data_ptr() for a in masks
            }
            self.largest = max(self.largest, result.numel() if fresh else 0)
        return result


def test_watch_sees_what_it_watches_for():
    with Watch() as watch:
        float(torch.ones(3, 4).clone().sum())
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    assert "_local_scalar_dense" in watch.waiting
    assert any(name.startswith("index") for name in watch.waiting)
    assert watch.largest == 12


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_value_is_read_and_no_more_than_the_sample_is_copied(name, transposed):
    grad = normal(1024, 512)
    grad = grad.t() if transposed else grad
    with Watch() as watch:
        ESTIMATORS[name](grad, 0.25, 1)
    assert watch.waiting == []
    assert watch.largest <= 0.25 * grad.numel()


# Names


def test_resolve_by_name_and_by_function():
    for name, estimator in ESTIMATORS.items():
        assert resolve_estimator(name) is estimator

    def mine(grad_MN, beta, offset):
        return grad_MN.sum()

    assert resolve_estimator(mine) is mine


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'gauss' .*gaussian, histogram, histogram_code, spectral"):
        resolve_estimator("gauss")
