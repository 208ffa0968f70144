"""Orthonormal factors against a readable twin, on good and on hostile input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from edgc_ddp.maths.orthogonal import extend_basis, orthonormalise, random_basis, shrink_basis

torch.set_num_threads(1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def projector_twin(p_MR):
    """P P^T by modified Gram-Schmidt, twice over, in double precision: the textbook."""
    columns = []
    for column in p_MR.double().numpy().T:
        column = column / (np.abs(column).max() or 1.0)
        for _ in range(2):
            for other in columns:
                column = column - other * (other @ column)
        norm = np.linalg.norm(column)
        if norm > 1e-9:
            columns.append(column / norm)
    basis = np.stack(columns, axis=1)
    return torch.from_numpy(basis @ basis.T)


def assert_orthonormal(basis_BMR, tolerance=2e-6):
    gram = (basis_BMR.mT @ basis_BMR).double()
    eye = torch.eye(gram.shape[-1], dtype=torch.float64).expand_as(gram)
    assert (gram - eye).abs().max() < tolerance


@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 1), (5, 5), (64, 16), (256, 33), (3, 40, 8), (2, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_and_of_equal_span(shape, dtype):
    p_BMR = normal(*shape, dtype=dtype)
    basis = orthonormalise(p_BMR)
    assert basis.shape == p_BMR.shape and basis.dtype == dtype
    assert_orthonormal(basis)
    for one, source in zip(
        basis.reshape(-1, *shape[-2:]), p_BMR.reshape(-1, *shape[-2:]), strict=True
    ):
        torch.testing.assert_close(
            (one @ one.T).double(), projector_twin(source), atol=1e-5, rtol=0
        )


def test_batch_is_each_alone():
    p_BMR = normal(4, 30, 6)
    together = orthonormalise(p_BMR)
    for one, source in zip(together, p_BMR, strict=True):
        assert torch.equal(one, orthonormalise(source))


def test_views_of_any_layout():
    wide_BRM = normal(3, 6, 30)
    torch.testing.assert_close(
        orthonormalise(wide_BRM.mT), orthonormalise(wide_BRM.mT.contiguous())
    )


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_ill_conditioned_columns_keep_orthogonality_and_span(condition):
    left, right = orthonormalise(normal(80, 12)), orthonormalise(normal(12, 12, seed=1))
    p_MR = left * torch.logspace(0, -math.log10(condition), 12) @ right.T
    basis = orthonormalise(p_MR)
    assert_orthonormal(basis)
    residual = p_MR - basis @ (basis.T @ p_MR)
    assert residual.norm() < 1e-5 * p_MR.norm()


def hostile():
    good = normal(40, 6)
    repeated, graded, with_zero = good.clone(), good.clone(), good.clone()
    repeated[:, 3:] = repeated[:, :3]
    graded *= torch.tensor([1e-30, 1e30, 1.0, 1e-12, 1e12, 1e-38])
    with_zero[:, 2] = 0
    one_row = torch.zeros(40, 6)
    one_row[17] = 1.0
    return {
        "zero": torch.zeros(40, 6),
        "repeated": repeated,
        "graded": graded,
        "zero column": with_zero,
        "one row": one_row,
        "denormal": good * 1e-42,
        "huge": good.clamp(-3, 3) * 1e38,
    }


@pytest.mark.parametrize("case", hostile())
def test_hostile_input_stays_orthonormal_and_loses_nothing(case):
    p_MR = hostile()[case]
    basis = orthonormalise(p_MR)
    assert_orthonormal(basis)
    source = p_MR.double()
    source = source / source.abs().amax(0).clamp(min=1e-300)
    exact = basis.double()
    residual = source - exact @ (exact.T @ source)
    assert residual.abs().max() < 1e-5


def test_scale_of_columns_does_not_matter():
    p_MR = normal(64, 4)
    # Powers of two, so that scaling itself is exact.
    scaled = p_MR * torch.tensor([2.0**-90, 2.0**90, 1.0, 2.0**-40])
    torch.testing.assert_close(orthonormalise(scaled), orthonormalise(p_MR), atol=1e-6, rtol=0)


def test_leading_columns_span_the_leading_columns():
    p_MR = normal(50, 8)
    basis = orthonormalise(p_MR)
    for rank in range(1, 9):
        lead = basis[:, :rank]
        projector = projector_twin(p_MR[:, :rank])
        torch.testing.assert_close((lead @ lead.T).double(), projector, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(20, 4), (4, 4), (1, 1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_member_is_nan_and_its_neighbours_are_unharmed(shape, bad):
    p_BMR = normal(3, *shape)
    expected = orthonormalise(p_BMR)
    p_BMR[1, -1, -1] = bad
    basis = orthonormalise(p_BMR)
    assert torch.isnan(basis[1]).all()
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])


def test_same_bits_every_time_and_input_unchanged():
    p_BMR = normal(3, 70, 9)
    before = p_BMR.clone()
    first, second = orthonormalise(p_BMR), orthonormalise(p_BMR)
    assert torch.equal(first, second) and torch.equal(p_BMR, before)


def test_more_columns_than_rows_is_the_callers_mistake():
    with pytest.raises(AssertionError, match="5 orthonormal columns"):
        orthonormalise(normal(4, 5))


def test_no_columns_is_no_work():
    assert orthonormalise(torch.zeros(4, 0)).shape == (4, 0)


def test_no_value_is_read_back():
    class Reads(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Reads() as reads:
        orthonormalise(normal(2, 30, 4))
    assert "linalg_qr" in reads.names
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero"} & set(reads.names)


# Bases


@pytest.mark.parametrize(("cols", "rank"), [(1, 1), (8, 8), (300, 16), (5, 0)])
def test_random_basis_is_orthonormal_and_seeded(cols, rank):
    basis = random_basis(cols, rank, generator(3))
    assert basis.shape == (cols, rank)
    assert torch.equal(basis, random_basis(cols, rank, generator(3)))
    if rank:
        assert_orthonormal(basis)
        assert not torch.equal(basis, random_basis(cols, rank, generator(4))) or cols == 1


def test_library_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    extend_basis(random_basis(20, 3, generator()), 6, generator())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extend_keeps_the_old_and_adds_orthogonal_columns_of_the_weakest_norm(dtype):
    q_NR = normal(40, 4, dtype=dtype) * torch.tensor([5.0, 0.1, 2.0, 1.0], dtype=dtype)
    grown = extend_basis(q_NR, 9, generator(1))
    assert grown.shape == (40, 9) and grown.dtype == dtype
    assert torch.equal(grown[:, :4], q_NR)
    added = grown[:, 4:]
    weakest = q_NR.norm(dim=0).min()
    assert (q_NR.T @ added).abs().max() < 1e-5 * q_NR.norm() * weakest
    assert_orthonormal(added / weakest, 1e-5)
    assert torch.equal(grown, extend_basis(q_NR, 9, generator(1)))
    assert not torch.equal(grown, extend_basis(q_NR, 9, generator(2)))


def test_extend_skips_zero_columns_when_it_looks_for_the_weakest():
    q_NR = torch.zeros(12, 3)
    q_NR[0, 1] = 7.0
    added = extend_basis(q_NR, 5, generator())[:, 3:]
    torch.testing.assert_close(added.norm(dim=0), torch.tensor([7.0, 7.0]))
    assert added[0].abs().max() < 1e-5


@pytest.mark.parametrize("before", [0, 3])
def test_extend_from_nothing_or_zeros_has_unit_columns(before):
    added = extend_basis(torch.zeros(12, before), 6, generator())[:, before:]
    assert_orthonormal(added)


def test_extend_to_a_full_or_an_equal_basis():
    q_NR = random_basis(6, 4, generator())
    assert_orthonormal(extend_basis(q_NR, 6, generator(1)))
    assert torch.equal(extend_basis(q_NR, 4, generator(1)), q_NR)
    with pytest.raises(AssertionError, match="cannot grow to rank 7"):
        extend_basis(q_NR, 7, generator())


@settings(max_examples=50, deadline=None)
@given(norms=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_shrink_keeps_the_strongest_in_their_order(norms, data):
    rank = data.draw(st.integers(0, len(norms)))
    directions = torch.eye(8)[:, : len(norms)]
    kept = shrink_basis(directions * torch.tensor(norms, dtype=torch.float32), rank)
    order = sorted(range(len(norms)), key=lambda i: -norms[i])[:rank]
    expected = (directions * torch.tensor(norms, dtype=torch.float32))[:, sorted(order)]
    assert torch.equal(kept, expected)


def test_shrink_undoes_extend():
    q_NR = normal(30, 4) * torch.tensor([3.0, 1.0, 2.0, 0.5])
    grown = extend_basis(q_NR * 1.0, 7, generator())
    grown[:, 4:] *= 0.99
    assert torch.equal(shrink_basis(grown, 4), q_NR)


def test_shrink_cannot_grow():
    with pytest.raises(AssertionError, match="cannot shrink to 5"):
        shrink_basis(torch.eye(4), 5)
