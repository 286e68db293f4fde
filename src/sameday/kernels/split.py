"""Attention over shared prefixes as a few variable-length calls: causal over every piece, and dense over what pieces
share, branches over their own prefix, forks over theirs, branches over their own fork, merged by log-sum-exp. In the
backward pass each call gets the merged output and log-sum-exp, which makes its part of the gradient exact, and nothing
flows through the merge.

On a GPU in half precision the calls are flash attention. Elsewhere they are plain PyTorch, which proves the splitting
and merging in float64."""

# No `from __future__ import annotations`: torch reads the operators' schemas from real annotations.
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """One call over what is shared. Its runs of queries and of keys, the first of which begin at `queries` and `keys`,
    follow each other without a gap; `cu` are their bounds from there on. Each run of queries sees one whole run of
    keys. `longest`, of queries and of keys: what no run exceeds, where that is not told by the bounds."""

    queries: int
    keys: int
    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int] | None = None


class Segments(NamedTuple):
    """Where the pieces of a packed row begin and end, and what they see of other pieces.

    cu: every piece's bounds. cu_queries, cu_keys: those of the dense calls, one call after the other. at: the longest
    piece, and of each call what `Call` has; a tensor on the CPU, because a compiled layer would be compiled again for
    each new number."""

    cu: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    at: Tensor

    @classmethod
    def of(cls, cu: Tensor, calls: Sequence[Dense], longest: int | None = None) -> "Segments":
        at = [longest or _longest(cu)]
        for queries, keys, cu_queries, cu_keys, most in calls:
            ends = queries + int(cu_queries[-1]), keys + int(cu_keys[-1])
            most = most or (_longest(cu_queries), _longest(cu_keys))
            at += Call(queries, ends[0], keys, ends[1], len(cu_keys), *most)
        of_queries, of_keys = torch.cat([c.cu_queries for c in calls]), torch.cat([c.cu_keys for c in calls])
        return cls(cu, of_queries, of_keys, torch.tensor(at))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Segments":
        cu, queries, keys = (x.to(device, non_blocking=non_blocking) for x in self[:3])
        return Segments(cu, queries, keys, self.at)

    def pin_memory(self) -> "Segments":
        cu, queries, keys = (x.pin_memory() for x in self[:3])
        return Segments(cu, queries, keys, self.at)

    def runs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """How long the runs of queries and of keys of each dense call are."""
        for _call, bounds in _calls(self.at)[1]:
            yield self.cu_queries[bounds].diff(), self.cu_keys[bounds].diff()


class Call(NamedTuple):
    """Where queries and keys of a dense call stand, how many bounds it has, and its longest run of each."""

    start: int
    end: int
    first_key: int
    last_key: int
    bounds: int
    longest: int
    longest_keys: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.end)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.last_key)


def _longest(cu: Tensor) -> int:
    return max(cu.diff().tolist(), default=1)


def _calls(at: Tensor) -> tuple[int, list[tuple[Call, slice]]]:
    """The longest piece, and the calls that have queries, each with the place of its bounds among those of all."""
    calls, first = [], 0
    for call in all_calls(at):
        if call.end > call.start:
            calls.append((call, slice(first, first + call.bounds)))
        first += call.bounds
    return int(at[0]), calls


def all_calls(at: Tensor) -> list[Call]:
    """Of `Segments.at`, also those that have no queries."""
    numbers, width = at.tolist()[1:], len(Call._fields)
    return [Call(*numbers[n : n + width]) for n in range(0, len(numbers), width)]


def shared_prefix_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Segments, scale: float) -> Tensor:
    """(tokens, heads, width) of a whole row; fewer key heads than query heads are shared among them."""
    return _forward(query, key, value, *pieces, scale)[0]


@torch.library.custom_op("sameday::shared_prefix_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    at: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    longest, calls = _calls(at)
    out, lse = variable_length(q, k, v, cu, cu, longest, longest, True, scale)
    if len(calls) > 1:
        out = out.to(lse.dtype)  # some places are merged twice, and rounded once
    for call, bounds in calls:
        far, far_lse = variable_length(
            q[call.queries],
            k[call.keys],
            v[call.keys],
            cu_queries[bounds],
            cu_keys[bounds],
            call.longest,
            call.longest_keys,
            False,
            scale,
        )
        near, near_lse = out[call.queries], lse[:, call.queries]
        both = torch.logaddexp(near_lse, far_lse)
        weight = (near_lse - both).exp().T[..., None]
        # Not lerp in half precision: the weights must be applied before rounding.
        merged = near.to(weight.dtype) * weight + far.to(weight.dtype) * (far_lse - both).exp().T[..., None]
        out[call.queries] = merged.to(out.dtype)
        lse[:, call.queries] = both
    return out.to(q.dtype), lse


@torch.library.custom_op("sameday::shared_prefix_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    at: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    longest, calls = _calls(at)
    grad = grad.contiguous()
    dq, dk, dv = _call_backward(grad, q, k, v, out, lse, cu, cu, longest, longest, True, scale)
    if len(calls) > 1:
        dq, dk, dv = (x.to(lse.dtype) for x in (dq, dk, dv))
    for call, bounds in calls:
        far = _call_backward(
            grad[call.queries],
            q[call.queries],
            k[call.keys],
            v[call.keys],
            out[call.queries],
            lse[:, call.queries].contiguous(),
            cu_queries[bounds],
            cu_keys[bounds],
            call.longest,
            call.longest_keys,
            False,
            scale,
        )
        dq[call.queries] += far[0]
        dk[call.keys] += far[1]
        dv[call.keys] += far[2]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def register(forward: torch.library.CustomOpDef, backward: torch.library.CustomOpDef) -> None:
    """What torch.compile and autograd must know of two operators with the arguments of those above."""

    def outputs(q, k, v, cu, cu_queries, cu_keys, at, scale):  # type: ignore[no-untyped-def]
        return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype(q))

    def gradients(grad, q, k, v, out, lse, cu, cu_queries, cu_keys, at, scale):  # type: ignore[no-untyped-def]
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
        q, k, v, cu, cu_queries, cu_keys, at, scale = inputs
        ctx.save_for_backward(q, k, v, *output, cu, cu_queries, cu_keys, at)
        ctx.scale = scale

    def derive(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        return *backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None

    forward.register_fake(outputs)
    backward.register_fake(gradients)
    forward.register_autograd(derive, setup_context=keep)


register(_forward, _backward)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def variable_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (tokens, heads, width) and log-sum-exp (heads, tokens) of one variable-length call. Without flash the
    output is not rounded to half precision yet, so that merging does not round twice."""
    if _flash(q):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, most_q, most_k, 0.0, causal, False, scale=scale
        )
        return out, lse
    out, lse = torch.empty_like(q, dtype=lse_dtype(q)), q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype(q))
    for a, b in _pairs(cu_q, cu_k):
        scores = _scores(q[a], k[b], causal, scale)
        lse[:, a] = scores.logsumexp(-1)
        with torch.autocast(q.device.type, enabled=False):
            out[a] = (scores.softmax(-1) @ _heads(v[b], q)).transpose(0, 1)
    return out, lse


def _call_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if _flash(q):
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the generator's state; there is no dropout
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu_q, cu_k, most_q, most_k, 0.0, causal, unused, unused[0], scale=scale
        )
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    share = q.shape[1] // k.shape[1]
    for a, b in _pairs(cu_q, cu_k):
        p = (_scores(q[a], k[b], causal, scale) - lse[:, a, None]).exp()
        g = grad[a].transpose(0, 1).to(p.dtype)
        delta = (g * out[a].transpose(0, 1)).sum(-1, keepdim=True)
        ds = p * (g @ _heads(v[b], q).transpose(1, 2) - delta) * scale
        dq[a] += (ds @ _heads(k[b], q)).transpose(0, 1)
        for total, part in (
            (dk, ds.transpose(1, 2) @ q[a].transpose(0, 1).to(p.dtype)),
            (dv, p.transpose(1, 2) @ g),
        ):
            total[b] += part.unflatten(0, (-1, share)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _pairs(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    return [
        (slice(a, b), slice(c, d))
        for a, b, c, d in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    ]


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """(tokens, key heads, width) -> (query heads, tokens, width), at least float32."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1).to(lse_dtype(q))


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):  # it would take the product back to half precision
        scores = _heads(q, q) @ _heads(k, q).transpose(1, 2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores
