"""Plain-torch attention and rotary embedding against dense fp64 references."""

from __future__ import annotations

import pytest
import torch

from megarl.policy import attention
from megarl.policy.attention import CausalAttention
from megarl.policy.cpu import rotate, rotate_by_elements, rotate_by_matrices
from megarl.policy.mcore import TransformerConfig


def causal_attention() -> CausalAttention:
    return CausalAttention(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0), 1
    )


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    length, batch, heads, width = query.shape
    result = torch.zeros(length, batch, heads, width, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            own = head * key.shape[2] // heads
            for position in range(length):
                keys, values = key[: position + 1, row, own], value[: position + 1, row, own]
                shares = (keys @ query[position, row, head] / width**0.5).softmax(0)
                result[position, row, head] = shares @ values
    return result.flatten(2)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("form", ["scores", "tiles"])
def test_attention_is_the_dense_one_with_its_gradients(form, key_value_heads, monkeypatch):
    monkeypatch.setattr(attention, "SHORT", 128 if form == "scores" else 0)
    torch.manual_seed(1)
    shapes = [(7, 3, 4, 8), (7, 3, key_value_heads, 8), (7, 3, key_value_heads, 8)]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    upstream = torch.randn(7, 3, 32, dtype=torch.float64)
    expected, seen = dense(*exact), causal_attention()(*single, None)
    expected.backward(upstream)
    seen.backward(upstream.float())
    assert torch.allclose(seen.double(), expected, atol=1e-6)
    for left, right in zip(single, exact, strict=True):
        assert torch.allclose(left.grad.double(), right.grad, atol=2e-6)


@pytest.mark.parametrize("length", [5, 140])
def test_what_follows_a_position_does_not_reach_it(length):
    torch.manual_seed(1)
    query, key, value = (torch.randn(length, 2, 4, 8) for _ in range(3))
    before = causal_attention()(query, key, value, None)
    key[3:], value[3:] = 7.0, -9.0
    after = causal_attention()(query, key, value, None)
    assert torch.allclose(before[:3], after[:3], atol=1e-6)
    assert not torch.allclose(before[3:], after[3:], atol=1e-3)


def test_what_the_kernel_would_leave_out_is_refused():
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    config.window_size = (4, 0)
    with pytest.raises(NotImplementedError, match="sliding window"):
        CausalAttention(config, 1)
    with pytest.raises(NotImplementedError, match="packed"):
        tensor = torch.zeros(2, 1, 4, 8)
        causal_attention()(tensor, tensor, tensor, None, packed_seq_params=object())


@pytest.mark.parametrize("form", [rotate_by_elements, rotate_by_matrices])
def test_rotation_turns_pairs_of_the_two_halves_by_the_angle(form):
    # One head of width 4 at one position: the pairs are (x0, x2) and (x1, x3), turned by 0.5 and 2.0.
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    half = torch.tensor([0.5, 2.0], dtype=torch.float64)
    turned = form(tensor, torch.cat([half, half]).view(1, 1, 1, 4)).flatten()
    as_complex = torch.complex(tensor.flatten()[:2], tensor.flatten()[2:]) * torch.polar(torch.ones_like(half), half)
    assert torch.allclose(turned, torch.cat([as_complex.real, as_complex.imag]))
    assert turned[0].item() == pytest.approx(1 * 0.8775825618903728 - 3 * 0.479425538604203)


@pytest.mark.parametrize("form", [rotate_by_elements, rotate_by_matrices])
def test_rotation_of_many_positions_and_its_gradient_equal_megatrons_own(form):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    torch.manual_seed(1)
    half = torch.rand(6, 1, 1, 4, dtype=torch.float64) * 6
    angles = torch.cat([half, half], dim=-1)
    ours = torch.randn(6, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    upstream = torch.randn_like(ours)
    left, right = form(ours, angles), _apply_rotary_pos_emb_bshd(theirs, angles)
    left.backward(upstream)
    right.backward(upstream)
    assert torch.allclose(left, right)
    assert torch.allclose(ours.grad, theirs.grad)


@pytest.mark.parametrize(("sequences", "positions"), [(1, 512), (64, 16)])
def test_rotation_keeps_no_more_for_backward_than_a_copy_of_what_it_rotates(sequences, positions):
    angles = torch.rand(positions, 1, 1, 64)
    query = torch.randn(positions, sequences, 3, 64, requires_grad=True)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rotate(query, angles)
    assert sum(kept.values()) <= 1.1 * query.numel() * query.element_size()
