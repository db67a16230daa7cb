"""The one-line patch under a tiny transformers Gemma-4: two training steps with the loss of plain SDPA."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_jit import ffpa_attn_func

transformers = pytest.importorskip("transformers")


class Count(TorchDispatchMode):
    """Counts the calls of this package's forward operator."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.ffpa_jit.flash_attn.default
        return func(*args, **(kwargs or {}))


def tiny_model(device: str, dtype: torch.dtype):
    """Two sliding layers (D=64) and two global ones (D=512), random weights."""
    config_class = getattr(transformers, "Gemma4TextConfig", None)
    model_class = getattr(transformers, "Gemma4ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip("this transformers has no Gemma-4")
    config = config_class(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, global_head_dim=512, sliding_window=128, max_position_embeddings=2048,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class(config).to(device, dtype).train()


def train(model, tokens: torch.Tensor) -> tuple[list[float], int]:
    """The losses of two steps and after them, and how often the kernels ran."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with Count() as count:
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses, count.calls


def same_loss_with_the_patch(monkeypatch, device: str, dtype: torch.dtype, length: int, tolerance: float) -> None:
    model = tiny_model(device, dtype)
    tokens = torch.randint(1, 256, (2, length), device=device)
    twin = copy.deepcopy(model)
    expected, calls = train(model, tokens)
    assert calls == 0
    assert expected[2] < expected[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    losses, calls = train(twin, tokens)
    assert calls == 6, "two global layers, three forward passes"
    for mine, theirs in zip(losses, expected, strict=True):
        assert abs(mine - theirs) <= tolerance * abs(theirs), (losses, expected)


def test_two_training_steps_have_the_loss_of_plain_sdpa(monkeypatch):
    same_loss_with_the_patch(monkeypatch, "cuda", torch.bfloat16, 2048, 5e-3)  # long enough that SDPA is not faster
