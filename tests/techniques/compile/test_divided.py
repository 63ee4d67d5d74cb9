"""A compiler reads the rules of divided tensors: nothing of them is left at run time."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401
from lightning_parallel.techniques.divided.in_graph import InGraph
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.tiers import sampled


def block(x: Tensor, entering: Tensor, leaving: Tensor, norm: Tensor) -> Tensor:
    h = F.linear(F.rms_norm(x, (32,), norm), entering)
    q, k, v = (part.view(2, 6, 4, 8).transpose(1, 2) for part in h.split(32, -1))
    rotated = torch.cat((-q[..., 4:], q[..., :4]), -1)
    y = F.scaled_dot_product_attention(rotated, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 32)
    return x + F.linear(F.gelu(y), leaving)


@sampled(1, "sequence_dim", [1, None])
@ranks(2)
def test_block_compiles_in_one_graph(sequence_dim):
    among = Ranks(dist.group.WORLD, "tp", sequence_dim)
    columns, rows = among.chunks(32, 32, 32), among.chunks(32)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(*shape, generator=generator) / 4 for shape in ((2, 6, 32), (96, 32), (32, 32), (32,))]
    for leaf in whole:
        leaf.requires_grad_()
    expected = block(*whole)
    expected.square().sum().backward()

    def run(x, entering, leaving, norm):
        with InGraph():
            made = block(x, Divided(entering, {0: columns}), Divided(leaving, {1: rows}), norm)
        return made.own if isinstance(made, Divided) else made

    cuts = [None, (0, columns), (1, rows), None]
    own = [
        leaf.detach() if cut is None else cut[1].take(leaf.detach(), cut[0])
        for leaf, cut in zip(whole, cuts, strict=True)
    ]
    own = [leaf.clone().requires_grad_() for leaf in own]
    torch._dynamo.reset()
    made = torch.compile(run, fullgraph=True, backend="aot_eager")(*own)
    kept = expected if sequence_dim is None else among.chunks(6).take(expected, 1)
    torch.testing.assert_close(made, kept, rtol=1e-4, atol=1e-4)
    made.square().sum().backward()
    for leaf, mine, cut in zip(whole, own, cuts, strict=True):
        torch.testing.assert_close(
            mine.grad, leaf.grad if cut is None else cut[1].take(leaf.grad, cut[0]), rtol=1e-3, atol=1e-3
        )
