"""Random programs under torch.compile: what is compiled, how it is called, and what is around it.

    python benchmarks/truth_compiled.py FOLDER --count 60 --seed 7
    python benchmarks/truth.py --programs FOLDER

A program is a template whose parts are chosen by a seed. None is run before it is written: those
that fail on both devices say nothing.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from textwrap import indent

HEADER = """\
import contextlib
from functools import partial

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch._dynamo.reset()
aten = torch.ops.aten
SAVED = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
selective = partial(create_selective_checkpoint_contexts, SAVED)


class Gated(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sigmoid()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        s = y.sigmoid()
        return g * s, g * x * s * (1 - s)


class Attention(nn.Module):
    def __init__(self, dropout=0.0, causal=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.dropout, self.causal = dropout, causal

    def forward(self, x):
        q, k, v = (a.unflatten(-1, (3, 16)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, None, self.dropout, self.causal)
        return self.out(x.transpose(1, 2).flatten(2))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(48))
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x):
        if self.training:
            self.seen.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return (x - self.seen) * self.weight


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 48)

    def forward(self, x):
        words = (x[..., 0].detach().abs() * 100).long() % 200
        scores = F.linear(x + self.table(words), self.table.weight)
        return x + F.cross_entropy(scores.flatten(0, 1).float(), words.flatten())


@torch.library.custom_op("truth::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, g: g * 2)


@torch.library.custom_op("truth::shift", mutates_args=("x",))
def shift(x: torch.Tensor) -> None:
    x.add_(1)


@torch.compiler.disable
def uncompiled(x):
    return F.gelu(x) * x


def heads(x):
    return x.unflatten(-1, (3, 16)).transpose(1, 2)


def flexible(x, **options):
    return flex_attention(heads(x), heads(x), heads(x), **options).transpose(1, 2).flatten(2)


def total(out):
    return sum(a.float().square().mean() for a in tree_leaves(out) if a.requires_grad) + nothing


class Net(nn.Module):
    def __init__(self, body, *parts):
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts)

    def forward(self, x):
        return self.body(x)


kernel = torch.randn(3, 3, 3, 3, device="cuda", requires_grad=True)
table = nn.Embedding(10, 48, device="cuda")
nothing = torch.zeros((), device="cuda", requires_grad=True)
seen, count = torch.zeros(16, 48, device="cuda"), torch.zeros((), device="cuda")
"""

TRITON = """
import triton
import triton.language as tl

@triton.jit
def _added(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < count), tl.load(y_ptr + at, at < count)
    tl.store(out_ptr + at, x + y, at < count)


def added(x):
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    _added[(triton.cdiv(out.numel(), 128),)](x, x, out, out.numel(), BLOCK=128)
    return out
"""

PROGRAM = """
m, n = (each.cuda() for each in (@MODULE, @MODULE))
def body(x):
    @STATEMENTS
    return @RESULT
@COMPILED
parameters = [*m.parameters(), *n.parameters()]
optimizer = @OPTIMIZER
scaler = torch.amp.GradScaler(enabled=@RARE)
update = @UPDATE
for size in @SIZES:
    x = @INPUT
    with @CONTEXT:
        out = @CALL
    @BACKWARD
    @AFTER
    optimizer.zero_grad(@FLAG)
"""

PARTS = {
    "MODULE": """
nn.Sequential(nn.Linear(48,96),nn.GELU(),nn.Dropout(0.1),nn.LayerNorm(96),nn.Linear(96,48))
nn.Sequential(nn.Linear(48,64),nn.ReLU(inplace=True),nn.Linear(64,48,bias=False))
nn.TransformerEncoderLayer(48,4,96,batch_first=True)
nn.TransformerEncoderLayer(48,4,96,0.,norm_first=True,batch_first=True)
nn.Sequential(nn.Conv1d(16,32,3,padding=1),nn.BatchNorm1d(32),nn.SiLU(),nn.Conv1d(32,16,1))
nn.Sequential(nn.Unflatten(1,(4,4)),nn.Conv2d(4,8,3,padding=1),nn.BatchNorm2d(8),nn.ReLU(),nn.Conv2d(8,4,1),nn.Flatten(1,2)).to(memory_format=torch.channels_last)
nn.Sequential(nn.Unflatten(1,(4,4)),nn.Conv2d(4,8,3,padding=1),nn.GroupNorm(2,8),nn.Conv2d(8,4,1),nn.Flatten(1,2))
nn.utils.parametrizations.weight_norm(nn.Linear(48,48))
nn.Sequential(nn.RMSNorm(48),nn.Linear(48,128),nn.GLU(),nn.Linear(64,48))
nn.Sequential(nn.Linear(48,48),nn.InstanceNorm1d(16),nn.PReLU(),nn.Linear(48,48))
nn.Sequential(nn.LayerNorm(48),Attention(0.1))
nn.Sequential(nn.RMSNorm(48),Attention(0.,True))
Attention().requires_grad_(False)
nn.Sequential(Normed(),nn.Linear(48,48))
Tied()
nn.Sequential(nn.Linear(48,48),nn.Softplus(),nn.LayerNorm(48)).eval()
nn.Sequential(nn.BatchNorm1d(16),nn.Linear(48,48)).eval()
""",
    "STATEMENT": """
x=m(x)
x=m(x)
x=x+n(x)
x=n(x)
with torch.autocast('cuda',torch.bfloat16):\\n    x=m(x).float()
with torch.autocast('cuda',torch.float16):\\n    x=n(x)
with torch.autocast('cuda',enabled=False):\\n    x=m(x.float())
x=checkpoint(m,x,use_reentrant=False)
x=checkpoint(m,x,use_reentrant=False,context_fn=selective)
x=checkpoint(lambda y:F.dropout(F.gelu(n(y)),0.1),x,use_reentrant=False)
torch._dynamo.graph_break()
print('',end='')
x=uncompiled(x)
x=twice(x)
y=x.clone();shift(y);x=x*y
x=added(x)+x
x=F.scaled_dot_product_attention(*[heads(x)]*3,is_causal=True).transpose(1,2).flatten(2)
x=F.scaled_dot_product_attention(*[heads(x).bfloat16()]*3,dropout_p=0.1).transpose(1,2).flatten(2).float()
x=F.scaled_dot_product_attention(*[heads(x)]*3,attn_mask=torch.ones(16,16,device='cuda',dtype=torch.bool).tril()).transpose(1,2).flatten(2)
x=flexible(x)
x=flexible(x,score_mod=lambda s,b,h,q,k:s+q-k)
x=x+F.dropout(x,0.1)
x=F.dropout(x,0.5,m.training)
x=x.softmax(-1)*x.tanh()
x=x*x.square().mean(-1,keepdim=True).rsqrt()
x=x.cumsum(1)
x=x.sort(-1).values
x=(x@x.mT).softmax(-1)@x
x=x.flip(0)
x=x.transpose(1,2).contiguous().transpose(1,2)
x=F.conv2d(x.unflatten(2,(3,16)).transpose(1,2).to(memory_format=torch.channels_last),kernel,padding=1).transpose(1,2).flatten(2)
x=F.conv2d(x.unflatten(2,(3,16)).transpose(1,2),kernel,padding=1).transpose(1,2).flatten(2)
with torch.no_grad():\\n    y=m(x)\\nx=x+y
y=x.detach().clone();y.mul_(2);x=x+y
count.add_(1);x=x+count
seen.copy_(x.detach().mean(0));x=x-seen
x=torch.vmap(lambda a:a@a.mT@a)(x)
x=x+torch.func.grad(lambda a:a.sin().sum())(x)
x=x+torch.func.vmap(torch.func.grad(lambda a:a.square().mean()))(x.detach())
x=Gated.apply(x,x.cos())
x=table(x[...,0].long()%10)+x
x=x+F.cross_entropy(x.flatten(0,1),x.detach().argmax(-1).flatten())
x=F.layer_norm(x,(48,))
if x.shape[0]>4:\\n    x=x*2
x=x+torch.arange(48,device='cuda')
x=x+torch.rand_like(x)
x=x[torch.randperm(x.shape[0],device='cuda')]
x=torch.cat([x,x.sin()],-1)[...,:48]
x=torch.stack([x,x*2]).mean(0)
x=(x.bfloat16()@x.bfloat16().mT).float()@x
x=x.mean(0,keepdim=True)+x
x=x.masked_fill(x>0,0.)
x=x.scatter_add(1,torch.zeros_like(x,dtype=torch.long),x)
x=F.interpolate(x,scale_factor=2)[...,::2]
x=F.max_pool1d(x,3,1,1)
x=F.pad(x,(1,1))[...,1:-1]
x=torch.where(x>0,x,x.exp())
x=x.clone();x[:,0]=1.;x=x*2
x=F.group_norm(x,4)
x=torch.utils.checkpoint.checkpoint(uncompiled,x,use_reentrant=False)
x=torch.einsum('bij,bkj->bik',x,x)@x
x=x.unfold(1,16,1).squeeze(1).transpose(1,2)
x=x.topk(48).values
x=F.gumbel_softmax(x)
x=x+torch.linalg.vector_norm(x,dim=-1,keepdim=True)
x=x+x.shape[0]
for each in m.parameters():\\n    x=x+each.mean()
x=torch.compile(n)(x)
x=x.float()
""",
    "RESULT": "x\nx\nx\nx,x.detach()\nx[0]\nx.view(-1,48)\n{'a':x,'b':x.mT}\nx.sum()\nx,seen",
    "COMPILED": """
f=torch.compile(body@OPTIONS)
f=torch.compile(body@OPTIONS)
f=torch.compile(body@OPTIONS)
f=torch.compile(Net(body,m,n)@OPTIONS)
m.compile(@OPTIONS);f=body
m=torch.compile(m@OPTIONS);n=torch.compile(n);f=body
f=Net(body,m,n);f.compile(@OPTIONS)
m.compile(@OPTIONS);f=torch.compile(body)
def outer(x):return body(x.sin()).__class__ and body(x)\\nf=torch.compile(outer@OPTIONS)
""",
    "OPTIONS": """


,mode='reduce-overhead'
,mode='max-autotune-no-cudagraphs'
,dynamic=True
,dynamic=False
,backend='aot_eager'
,options={'triton.unique_kernel_names':True}
""",
    "OPTIMIZER": """
torch.optim.AdamW(parameters)
torch.optim.AdamW(parameters,fused=True)
torch.optim.SGD(parameters,0.1,momentum=0.9)
torch.optim.Adam(parameters,foreach=False)
torch.optim.RMSprop(parameters,centered=True)
torch.optim.Adam([{'params':[a]} for a in parameters],capturable=True)
""",
    "UPDATE": "optimizer.step\noptimizer.step\ntorch.compile(optimizer.step)",
    "SIZES": "(4,4)\n(4,4,4)\n(4,6,9)\n(4,4,1)\n(8,4,8)\n(64,64)",
    "INPUT": """
torch.randn(size,16,48,device='cuda')
torch.randn(size,16,48,device='cuda',requires_grad=True)
torch.randn(size,16,48,device='cuda',requires_grad=True)*1
torch.randn(size,48,16,device='cuda').mT
torch.randn(16,size,48,device='cuda',requires_grad=True).transpose(0,1)
torch.randn(size,16,96,device='cuda')[...,:48]
""",
    "CONTEXT": """
contextlib.nullcontext()
contextlib.nullcontext()
contextlib.nullcontext()
torch.autocast('cuda',torch.bfloat16)
torch.autocast('cuda',torch.bfloat16)
torch.autocast('cuda',torch.float16)
torch.no_grad()
torch.inference_mode()
torch.autograd.graph.save_on_cpu()
torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
torch.set_grad_enabled(size==4)
""",
    "CALL": "f(x)\nf(x)\nf(x)\nf(x)\ncheckpoint(f,x,use_reentrant=False)",
    "BACKWARD": """
scaler.scale(total(out)).backward();scaler.step(optimizer);scaler.update()
total(out).backward();update()
total(out).backward();update()
total(out).backward();nn.utils.clip_grad_norm_(parameters,1.);update()
total(out).backward(retain_graph=True);total(out).backward()
torch.autograd.grad(total(out),parameters,allow_unused=True)
pass
loss=total(out);del x,out;loss.backward()
""",
    "AFTER": "pass\npass\nm.eval()\ntorch.cuda.empty_cache()\nkept=locals().get('out')",
    "FLAG": "True\nFalse",
    "RARE": "False\nFalse\nFalse\nTrue",
}


def written(seed: int) -> str:
    """Return the text of a program."""
    rng = random.Random(seed)

    def chosen(kind: str) -> str:
        found = rng.choice(PARTS[kind].strip("\n").split("\n")).replace(r"\n", "\n")
        return re.sub(r"@([A-Z]+)", lambda one: chosen(one[1]), found)

    def part(found: re.Match[str]) -> str:
        before, kind = found[1], found[2]
        if kind == "STATEMENTS":
            lines = [chosen("STATEMENT") for _ in range(rng.randint(1, 6))]
            return indent("\n".join(lines), before)
        return indent(chosen(kind), before) if before else chosen(kind)

    text = re.sub(r"(?:(?<=\n)( +))?@([A-Z]+)", part, PROGRAM)
    text = text.replace("(,", "(")
    return HEADER + (TRITON if "added(" in text else "") + text


def main() -> None:
    """Write programs into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seed, options.seed + options.count):
        (options.folder / f"{seed:06}.py").write_text(written(seed), encoding="utf-8")


if __name__ == "__main__":
    main()
