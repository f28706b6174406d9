"""What could be read wrongly: each is read right, or left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import twin
from torch import nn

D, N = 8, 16


def weight(rows, cols, seed=0):
    return nn.Parameter(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)))


def vector(size, seed=1):
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def tokens(*shape, grad=True, seed=2):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(grad)


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def regions(function, *args, **options):
    """Check the twin of every graph, and the graphs as they are; how many regions were made."""
    count = 0
    for module, inputs in twin.capture(function, *args, **options).graphs:
        found = twin.twin(module, inputs)
        found.check(1e-11)
        count += len(found.report.calls)
        plain, _ = twin.rewritten(module, inputs)
        twin.Twin(found.report, twin.run(module, inputs), twin.run(plain, inputs)).check(1e-4)
    return count


# ------------------------------------------------------------------------------ written into
def test_a_tensor_written_into_after_it_was_read():
    w, v = weight(N, D), weight(D, N, 3)

    def model(x):
        h = x * 2
        y = F.linear(h.clone(), w)
        h.add_(1.0)
        return F.linear(y, v) + h

    regions(model, tokens(3, 5, D))


def test_a_view_written_into_changes_what_it_views():
    w, g = weight(N, D), vector(D)

    def model(x):
        h = x * 2
        y = F.linear(h.clone(), w)
        h[:, 0] = 0.5
        h.view(-1)[1:7].mul_(3.0)
        return y, F.linear(rms(h, g), w)

    regions(model, tokens(3, 5, D))


def test_an_input_written_into():
    w = weight(N, D)

    def model(x, state):
        y = F.linear(x, w) + state
        state.mul_(0.5)
        return y + state

    regions(model, tokens(3, 5, D), torch.ones(N))


def test_a_result_written_into_after_it_was_made():
    w = weight(N, D)

    def model(x):
        y = F.linear(rms(x, g), w)
        z = y + 1.0
        y.relu_()
        return y, z

    g = vector(D)
    regions(model, tokens(3, 5, D))


def test_a_foreign_read_stays_before_the_write_that_follows_it():
    w, g = weight(D, D), vector(D)

    def model(x, state):
        y = F.linear(rms(x, g), w)
        z = torch.cumsum(y, 1) + torch.cumsum(state, 1)
        state.zero_()
        return z * torch.cumsum(state, 1).cosh()

    regions(model, tokens(3, 5, D), torch.ones(3, 5, D))


# --------------------------------------------------------------------------------- gradients
def test_detached_values_pass_no_gradient():
    w, v, g = weight(N, D), weight(N, D, 3), vector(D)

    def model(x):
        h = rms(x, g)
        return F.linear(h, w) * torch.sigmoid(F.linear(h.detach(), v))

    assert regions(model, tokens(3, 5, D)) >= 1


def test_a_part_without_gradients():
    w, v, g = weight(N, D), weight(N, D, 3), vector(D)

    def model(x):
        h = rms(x, g)
        with torch.no_grad():
            scale = torch.tanh(F.linear(h, v))
        return F.linear(h, w) * scale

    regions(model, tokens(3, 5, D))


def test_activations_and_weights_that_need_no_gradient():
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)
    w.requires_grad_(False)

    def model(x):
        return x + F.linear(F.silu(F.linear(rms(x, g), w)), v)

    assert regions(model, tokens(3, 5, D, grad=False)) == 1


def test_one_weight_in_two_layers():
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)

    def model(x):
        for _ in range(2):
            x = x + F.linear(F.gelu(F.linear(rms(x, g), w)), v)
            x = torch.cumsum(x, 1)
        return x

    assert regions(model, tokens(3, 5, D)) == 2


# ------------------------------------------------------------------------------------ shapes
@pytest.mark.parametrize(
    "shape", [(1, 5, D), (3, 1, D), (1, 1, D), (D, D, D), (2, 4, D), (N, 1, D), (5, D), (1, D)]
)
def test_shapes_that_could_be_taken_for_one_another(shape):
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)

    def model(x):
        y = F.linear(rms(x, g), w)
        y = y.view(*y.shape[:-1], 2, D) * g
        return x + F.linear(F.silu(y.flatten(-2)), v)

    regions(model, tokens(*shape))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_as_many_heads_as_columns_or_tokens(heads):
    w, g = weight(8 * heads, D), vector(8)

    def model(x):
        q = F.linear(rms(x, g), w).view(2, 8, heads, 8)
        q = rms(q, g).transpose(1, 2)
        return q * torch.arange(1.0, heads + 1)[None, :, None, None]

    regions(model, tokens(2, 8, D))


def test_rows_of_a_matrix_taken_as_tokens_of_two_axes():
    w, g = weight(N, D), vector(D)

    def model(x):
        flat = torch.cumsum(x.view(-1, D), 0)
        y = F.linear(rms(flat, g), w)
        return y.view(3, 5, N).transpose(0, 1), y.view(3, 5, 2, D).transpose(1, 2)

    assert regions(model, tokens(3, 5, D)) == 1


def test_two_streams_of_different_lengths():
    w, gate, g = weight(N, D), vector(1), vector(D)

    def model(x, y):
        s = torch.sigmoid(gate) * 2
        return F.linear(rms(x, g), w) * s, F.linear(rms(y, g), w) * s

    regions(model, tokens(2, 8, D), tokens(2, 5, D, seed=4))


def test_a_square_batch_and_its_transpose():
    w, v = weight(N, D), weight(N, D, 3)

    def model(x):
        return F.linear(x, w) + F.linear(x.transpose(0, 1), v)

    regions(model, tokens(5, 5, D))


def test_a_position_bias_is_no_row():
    w = weight(D, D)
    bias = weight(D, D, 5)

    def model(x):
        return F.linear(x, w) + bias

    regions(model, tokens(3, D, D))


@pytest.mark.parametrize("shape", [(D,), (1, D), (1, 1, D), (5, D), (3, 5, D), (5, 1), (3, 1, 1)])
def test_biases_of_every_shape(shape):
    w, b = weight(D, D), nn.Parameter(tokens(*shape).detach())

    def model(x):
        return F.relu(F.linear(x, w) + b.expand(3, 5, D))

    regions(model, tokens(3, 5, D))


def test_sizes_that_are_symbols():
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)

    def model(x):
        b, t, _ = x.shape
        y = F.linear(rms(x, g), w) / t
        y = y.view(b, t, 2, D).transpose(1, 2)
        y = torch.cumsum(y, 2).transpose(1, 2).reshape(b, t, N)
        x = x + F.linear(F.silu(y), v)
        return x[:, 1:], x[:, -1]

    assert regions(model, tokens(3, 5, D), dynamic=True) == 2


def test_a_flat_input_of_symbolic_size():
    w, g = weight(N, D), vector(D)

    def model(x, b):
        y = F.linear(rms(torch.cumsum(x, 0), g), w)
        return y.view(b.shape[0], -1, N).transpose(0, 1)

    assert regions(model, tokens(15, D), torch.ones(3), dynamic=True) == 1


def test_scalars():
    w, g, alpha = weight(N, D), vector(D), nn.Parameter(torch.tensor(0.7))
    factor = torch.tensor(D**0.5)

    def model(x):
        return alpha * F.linear(rms(x * factor, g), w) * torch.tensor(2.0)

    assert regions(model, tokens(3, 5, D)) == 1


# ------------------------------------------------------------------------------------ dtypes
def test_masks_and_integers():
    w, g = weight(N, D), vector(D)

    def model(x, keep, ids):
        y = F.linear(rms(x, g), w) * keep[..., None]
        y = y.masked_fill(~keep[..., None], 0.0)
        return y + ids[..., None]

    keep = torch.arange(15).view(3, 5) % 3 > 0
    regions(model, tokens(3, 5, D), keep, torch.arange(15).view(3, 5))


def test_a_rounding_to_fewer_digits_is_kept():
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)

    def model(x):
        y = F.linear(rms(x, g), w)
        y = y.to(torch.bfloat16).to(torch.float32)
        return F.linear(y, v)

    for module, inputs in twin.capture(model, tokens(3, 5, D)).graphs:
        made, _ = twin.rewritten(module, inputs)
        expected, found = twin.run(module, inputs), twin.run(made, inputs)
        # A rounding lost is an error of 2^-9 or so.
        torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-4, atol=1e-4)


def test_a_part_in_fp64_keeps_its_digits():
    w, g = weight(N, D), vector(D)

    def model(x):
        y = F.linear(rms(x, g), w).double()
        return ((y + 1e9) - 1e9).float()

    for module, inputs in twin.capture(model, tokens(3, 5, D)).graphs:
        made, _ = twin.rewritten(module, inputs)
        expected, found = twin.run(module, inputs), twin.run(made, inputs)
        torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-4, atol=1e-4)


def test_norm_weights_in_fp32_of_a_model_in_bf16():
    w, g = nn.Parameter(weight(N, D).bfloat16()), vector(D)

    def model(x):
        return F.linear(rms(x.float(), g).to(torch.bfloat16), w)

    for module, inputs in twin.capture(model, tokens(3, 5, D).detach().bfloat16()).graphs:
        made, _ = twin.rewritten(module, inputs)
        wide, values = twin.promoted(module, inputs)
        exact = twin.run(wide, values)
        expected, found = twin.run(module, inputs), twin.run(made, inputs)
        for name, y in found.gradients.items():
            assert y.dtype == expected.gradients[name].dtype
            theirs = (expected.gradients[name].double() - exact.gradients[name]).norm()
            ours = (y.double() - exact.gradients[name]).norm()
            assert ours <= 2 * theirs + 2 * torch.finfo(y.dtype).eps * exact.gradients[name].norm()


def test_autocast_around_and_inside():
    w, v, g = weight(N, D), weight(D, N, 3), vector(D)

    def model(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(rms(x, g), w)
        with torch.autocast("cpu", enabled=False):
            return F.linear(F.silu(y.float()), v)

    for outside in (False, True):
        for module, inputs in twin.capture(model, tokens(3, 5, D)).graphs:
            made, _ = twin.rewritten(module, inputs)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
                expected, found = twin.run(module, inputs), twin.run(made, inputs)
            for x, y in zip(expected.outputs, found.outputs, strict=True):
                assert x.dtype == y.dtype
                torch.testing.assert_close(y, x, rtol=3e-2, atol=3e-2)


# ----------------------------------------------------------------------------------- outputs
def test_a_result_returned_twice_an_unused_one_and_a_view_of_an_input():
    w, g = weight(N, D), vector(D)

    def model(x):
        y = F.linear(rms(x, g), w)
        torch.tanh(y)
        return y, y, x.transpose(0, 1), y.view(3, 5, 2, D).transpose(1, 2), y[..., :D]

    assert regions(model, tokens(3, 5, D)) == 1


# ----------------------------------------------------------------------------------- the order
def test_random_numbers_are_drawn_in_the_same_order():
    w, g = weight(D, D), vector(D)

    def model(x):
        late = F.dropout(torch.cumsum(F.linear(rms(x, g), w), 1), 0.5, True)
        early = F.dropout(torch.cumsum(x, 1), 0.5, True)
        return late + early

    for module, inputs in twin.capture(model, tokens(3, 5, D)).graphs:
        wide, values = twin.promoted(module, inputs)
        made, report = twin.rewritten(wide, values)
        assert report.calls
        torch.manual_seed(0)
        expected = twin.run(wide, values)
        torch.manual_seed(0)
        twin.Twin(report, expected, twin.run(made, values)).check(1e-11)


# ------------------------------------------------------------------------------------ rotation
@pytest.mark.parametrize("kind", ["permuted", "other_halves", "wrong_sign", "shuffled_halves"])
def test_what_only_looks_like_a_rotation(kind):
    w = weight(16, D)

    def model(x, angles):
        q = F.linear(x, w).view(2, 5, 2, 8).transpose(1, 2)
        table = torch.cat((angles, angles), -1)
        if kind == "permuted":
            table = table[:, torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])]
        if kind == "other_halves":
            table = torch.cat((angles, angles * 2), -1)
        cos, sin = table.cos(), table.sin()
        a, b = q[..., :4], q[..., 4:]
        if kind == "wrong_sign":
            turned = torch.cat((b, -a), -1)
        elif kind == "shuffled_halves":
            turned = torch.cat((-a, b), -1)
        else:
            turned = torch.cat((-b, a), -1)
        return q * cos + turned * sin

    regions(model, tokens(2, 5, D), tokens(5, 4, seed=7).detach())
