"""Random programs: operators, modules, passes and contexts in mixes that no corpus has.

    python -m pytest_gpumem.dry benchmarks/truth_random.py FOLDER --count 100 --seed 7
    python benchmarks/truth.py --programs FOLDER

A program is the text of Python statements, chosen by a seed one after the other; a statement stays
where it runs on the dry device. Programs that raise when they run as a whole are not written.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

HEADER = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.long, device="cuda")
"""

SIZES = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 129)
LARGEST = 2**21
"""Elements of a result."""
PATIENCE = 60
"""Seconds to write one program."""

UNARY = """
x.abs() x.neg() x.sigmoid() x.tanh() x.relu() F.gelu(x) F.gelu(x,approximate='tanh') F.silu(x)
F.elu(x) F.softplus(x) F.leaky_relu(x) F.hardswish(x) F.mish(x) x.exp() x.square() x.sin()
x.cos() x.erf() x.rsqrt() x.sqrt() x.log1p() x.clamp(min=-1) x.clamp(-1,1) x.clone()
x.contiguous() x.detach() x+1 x*2 x/3 2-x x**2 x**3 x**1.5 x.flip(0) x.roll(1,0) x.tril()
x.triu(1) x.t() x.mT x.transpose(0,-1) x.unsqueeze(0) x.unsqueeze(-1) x.squeeze() x.flatten()
x[0] x[...,0] x[1:] x[::2] x[...,:-1] x[...,None] x.float() x.half() x.bfloat16() x.double()
x.sum() x.mean() x.sum(0) x.sum(-1) x.mean(-1,keepdim=True) x.var(-1) x.std(0) x.amax(-1)
x.max(-1).values x.min(0).values x.max() x.norm() x.norm(dim=-1) x.logsumexp(-1) x.prod(-1)
x.cumsum(0) x.cumsum(-1) x.softmax(-1) x.log_softmax(-1) x.softmax(0)
F.softmax(x,-1,dtype=torch.float32) F.dropout(x,0.1) F.dropout(x,0.5,training=False)
F.normalize(x) F.layer_norm(x,x.shape[-1:]) F.rms_norm(x,x.shape[-1:]) F.glu(x)
x.chunk(2,-1)[0] x.split(2)[0] x.unbind(0)[-1] x.repeat(2,*[1]*(x.dim()-1))
x.expand(2,*x.shape) x.masked_fill(x>0,0.) torch.where(x>0,x,0.) torch.where(x>0,x,-x)
x.sort(-1).values x.topk(1).values x.argmax(-1) x.sign() x.round() F.pad(x,(1,1))
F.pad(x,(0,2),value=1.) x.view(-1) x.reshape(-1,2) torch.cat([x,x]) torch.cat([x,x],-1)
torch.stack([x,x]) torch.stack([x,x*2],-1) torch.zeros_like(x) torch.rand_like(x)
torch.empty_like(x) x.new_zeros(3,4) x.diff() x.lerp(x.sin(),0.3)
torch.outer(x.flatten()[:50],x.flatten()[:60]) x.index_select(0,zeros(4))
x.gather(-1,zeros(*x.shape)) x.bernoulli(0.3) x.unfold(-1,2,1) x.movedim(0,-1)
x.diagonal(0,-2,-1) x.repeat_interleave(2,0) x.addcmul(x,x) x.logit(1e-3) x.softmax(-1)@x.mT
F.logsigmoid(x) F.threshold(x,0,1) F.hardtanh(x) F.selu(x) F.celu(x) x.view(x.shape[0],-1)
x.to(memory_format=torch.channels_last) F.avg_pool1d(x,2) F.max_pool1d(x,2) F.avg_pool2d(x,2)
F.max_pool2d(x,2) F.adaptive_avg_pool2d(x,1) F.interpolate(x,scale_factor=2)
F.interpolate(x,scale_factor=2,mode='bilinear') F.interpolate(x,scale_factor=2,mode='linear')
F.unfold(x,2) F.pixel_shuffle(x,1) F.instance_norm(x) F.group_norm(x,1)
F.batch_norm(x,None,None,training=True) F.local_response_norm(x,2)
F.cosine_similarity(x,x.cos(),-1) F.one_hot(x.argmax(-1),200).float() x.nan_to_num() x.frac()
x.reciprocal() x.digamma() x.lgamma() x.atan2(x.cos()) x.hypot(x) x.fmod(1) x.remainder(2)
x.copysign(-1.) x.heaviside(x) x.cumprod(-1) x.logcumsumexp(-1) x.cummax(-1).values
x.fill_diagonal_(0) torch.linalg.vector_norm(x,dim=-1) x.std_mean(-1)[0]
torch.var_mean(x,0)[0] x.aminmax()[0] x.median(-1).values x.kthvalue(1).values x.quantile(0.5)
x.nansum(-1) x.nanmean(0) x.any(-1).float() x.all().float() x.count_nonzero(0).float()
torch.fft.rfft(x).abs() torch.fft.fft(x).real x.view(torch.int32).float() x.long()
x.to(torch.int8).float() x.bool().float() x.type_as(x) x.pow(2).sum(-1,keepdim=True)
x.expand_as(x) x.swapaxes(0,-1).contiguous() x.tile(2) x.narrow(0,0,1) x.select(-1,0)
x.take_along_dim(x.argsort(-1),-1) x.scatter(-1,zeros(*x.shape),1.)
x.index_add(0,zeros(x.shape[0]),x) x.scatter_reduce(0,zeros(*x.shape),x,'amax')
x.index_copy(0,zeros(1),x[:1]) x.index_fill(0,zeros(1),2.) x[zeros(3)] x[:,zeros(3)]
x.index_put((zeros(3),),x[:1],accumulate=True) torch.tensor_split(x,2)[1] x.rot90()
x.renorm(2,0,1.) x.dist(x) x.cov() x.cdist(x) torch.block_diag(x[0],x[0])
torch.cartesian_prod(x.flatten()[:5],x.flatten()[:6])
torch.meshgrid(x.flatten()[:5],x.flatten()[:6],indexing='ij')[0]
torch.tril_indices(4,4,device=x.device).float()
torch.bucketize(x,x.flatten()[:5].detach()).float()
torch.linspace(0,1,7,device=x.device)*x.sum() torch.einsum('...i,...i->...',x,x)
torch.einsum('...ij,...kj->...ik',x,x) torch.tensordot(x,x,dims=([-1],[-1]))
torch.kron(x.flatten()[:5],x.flatten()[:6]) torch.trapezoid(x) torch.vander(x.flatten()[:5])
torch.logaddexp(x,x) torch.special.entr(x) torch.special.i0(x) torch.special.erfcx(x)
torch.nn.utils.parameters_to_vector([x])
torch.utils.checkpoint.checkpoint(torch.sin,x,use_reentrant=False)
torch.func.vmap(torch.sin)(x) torch.func.vmap(lambda r:r.softmax(-1))(x)
torch.func.grad(lambda r:r.sin().sum())(x) torch.func.jvp(torch.tanh,(x,),(x,))[1]
torch.func.vjp(torch.tanh,x)[0]
""".split()
"""Of one tensor."""

BINARY = """
x+y x-y x*y x/y torch.maximum(x,y) torch.minimum(x,y) torch.where(x>y,x,y) x@y x@y.mT
torch.cat([x,y]) torch.cat([x,y],-1) torch.stack([x,y]) x.addcmul(y,y) x.addcdiv(y,x)
torch.lerp(x,y,0.5) x.copysign(y) torch.atan2(x,y) x.dist(y) F.linear(x,y) F.mse_loss(x,y)
F.l1_loss(x,y) F.smooth_l1_loss(x,y) F.huber_loss(x,y,reduction='none')
F.kl_div(x.log_softmax(-1),y.softmax(-1),reduction='batchmean')
F.binary_cross_entropy_with_logits(x,y.sigmoid()) F.cosine_similarity(x,y,-1)
F.cross_entropy(x,y.softmax(-1)) torch.outer(x.flatten()[:9],y.flatten()[:9])
torch.baddbmm(x,y,y.mT) torch.addmm(x,y,y.mT) torch.bmm(x,y) torch.mm(x,y) torch.mv(x,y)
torch.dot(x,y) x.mul(y).add(x) x.pow(y) torch.fmax(x,y) torch.xlogy(x,y) (x>y).float()
x.masked_fill(y>0,1.) x.expand_as(y)*y x.type_as(y) F.prelu(x,y) F.conv1d(x,y) F.conv2d(x,y)
F.conv_transpose2d(x,y) F.bilinear(x,x,y) F.scaled_dot_product_attention(x,y,y)
F.scaled_dot_product_attention(x,y,y,is_causal=True)
F.scaled_dot_product_attention(x,x,x,attn_mask=y) F.multilabel_margin_loss(x,y.long())
F.pairwise_distance(x,y) F.triplet_margin_loss(x,y,x) F.gaussian_nll_loss(x,y,x.abs())
F.poisson_nll_loss(x,y) torch.cdist(x,y) torch.einsum('...ij,...jk->...ik',x,y)
torch.einsum('bi,bj->bij',x,y) torch.tensordot(x,y,1) torch.inner(x,y) torch.kron(x[:2],y[:2])
torch.hstack([x,y]) torch.vstack([x,y]) torch._foreach_add([x,y],1)[0]
torch._foreach_mul([x,y],[y,x])[1] torch._foreach_norm([x,y])[0]
torch.broadcast_tensors(x,y)[0].contiguous() torch.func.vmap(torch.mul)(x,y)
torch.func.vmap(torch.dot)(x,y) torch.func.jvp(torch.mul,(x,y),(x,y))[1] checkpoint(lambda
a,b:(a*b).sin()+b,x,y,use_reentrant=False) checkpoint(lambda
a,b:F.gelu(a)*b.sigmoid(),x,y,use_reentrant=True)
""".split()
"""Of two tensors."""

INPLACE = """
x.add_(1) x.mul_(2) x.relu_() x.sigmoid_() x.clamp_(min=0) x.copy_(y) x.add_(y) x.mul_(y)
x.zero_() x.fill_(1) x.masked_fill_(x>0,0.) x[0]=1 x[...,0]=0 x[0]=y x[...,0].add_(1)
x.div_(y) x.sub_(y,alpha=2) x.t_() x.unsqueeze_(0) x.normal_() x.uniform_() x.addcmul_(y,y)
x.lerp_(y,0.1) x.tanh_() x.exp_() x.index_add_(0,zeros(x.shape[0]),x) x.clamp_max_(1)
x.bernoulli_(0.5) x.cumsum_(0) x.square_() x.requires_grad_() x.dropout_(0.5,True)
F.dropout(x,0.3,inplace=True) F.silu(x,inplace=True) F.leaky_relu(x,inplace=True)
""".split()
"""Statements that change a tensor."""

MODULES = """
nn.Linear(I,32) nn.Linear(I,100,bias=False) nn.Linear(I,I) nn.LayerNorm(I) nn.RMSNorm(I)
nn.BatchNorm1d(C) nn.BatchNorm2d(C) nn.GroupNorm(1,C) nn.InstanceNorm2d(C) nn.Conv1d(C,8,3)
nn.Conv2d(C,16,3,padding=1) nn.Conv2d(C,C,3,groups=C,bias=False) nn.ConvTranspose2d(C,4,2)
nn.Dropout(0.2) nn.Softmax(-1) nn.GELU() nn.PReLU()
nn.Sequential(nn.Linear(I,64),nn.ReLU(),nn.Linear(64,I))
nn.Sequential(nn.Linear(I,33),nn.ReLU(inplace=True),nn.Dropout(0.1),nn.Linear(33,8))
nn.LSTM(I,16,batch_first=True) nn.GRU(I,24,2) nn.RNN(I,16) nn.LSTMCell(I,16) nn.GRUCell(I,20)
nn.MultiheadAttention(I,1,batch_first=True)
nn.TransformerEncoderLayer(I,1,64,batch_first=True)
nn.TransformerEncoderLayer(I,1,32,norm_first=True,activation='gelu',dropout=0.)
nn.TransformerDecoderLayer(I,1,64) nn.Bilinear(I,I,6) nn.Embedding(100,I) nn.MaxPool2d(2)
nn.AdaptiveAvgPool2d((1,1)) nn.Upsample(scale_factor=2) nn.Flatten() nn.Conv3d(C,4,1)
nn.utils.parametrizations.weight_norm(nn.Linear(I,32))
nn.utils.parametrizations.spectral_norm(nn.Linear(I,32)) nn.EmbeddingBag(50,I)
nn.CosineSimilarity() nn.Identity()
""".split()
"""``I``: the last size of the input, ``C``: its second one."""

OPTIMIZERS = """
torch.optim.SGD(P,0.1) torch.optim.SGD(P,0.1,momentum=0.9) torch.optim.AdamW(P)
torch.optim.AdamW(P,fused=True) torch.optim.Adam(P,foreach=False)
torch.optim.Adam(P,amsgrad=True) torch.optim.RMSprop(P) torch.optim.Adagrad(P)
torch.optim.Adafactor(P) torch.optim.NAdam(P) torch.optim.RAdam(P) torch.optim.Rprop(P)
torch.optim.Adadelta(P) torch.optim.SGD(P,0.1,foreach=True,nesterov=True,momentum=0.5)
""".split()
"""``P``: parameters."""

CONTEXTS = """
torch.autocast('cuda',torch.bfloat16) torch.autocast('cuda',torch.float16)
torch.autocast('cuda',torch.bfloat16,cache_enabled=False) torch.no_grad()
torch.inference_mode() torch.enable_grad() torch.cuda.stream(torch.cuda.Stream())
torch.autograd.graph.save_on_cpu() torch.autograd.set_detect_anomaly(True)
torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
""".split()

CALLS = {
    "nn.MultiheadAttention": ("m(x,x,x)[0]", "m(x,x,x,need_weights=False)[0]"),
    "nn.LSTM(": ("m(x)[0]",),
    "nn.GRU(": ("m(x)[0]",),
    "nn.RNN(": ("m(x)[0]",),
    "nn.LSTMCell": ("m(x)[0]",),
    "nn.Bilinear": ("m(x,x)",),
    "nn.TransformerDecoder": ("m(x,x)",),
    "nn.Embedding": ("m(zeros(3,5))",),
    "nn.CosineSimilarity": ("m(x,x.sin())",),
}
"""How modules are called whose call is not ``m(x)``."""


class Writer:
    """A program while it is written: its lines, and the values of its names."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}
        self._count = 0
        self._indent = ""
        exec(HEADER, self._values)

    def write(self) -> str:
        """Return the whole program."""
        choices: list[Callable[[], None]] = [
            self._source, *[self._operator] * 8, self._change, *[self._module] * 2,
            self._backward, self._step, self._block,
        ]  # fmt: skip
        self._source()
        for _ in range(self._rng.randint(6, 40)):
            self._rng.choice(choices)()
        self._backward()
        return "\n".join(self._lines)

    def _named(self, letter: str) -> list[str]:
        return [name for name in self._values if re.fullmatch(rf"{letter}\d+", name)]

    def _new(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _keeps(self, line: str, made: str = "") -> bool:
        """Append ``line`` if it runs; what it has ``made`` has to be a tensor that is not large."""
        values = dict(self._values)
        try:
            exec(line, values)
        except Exception:
            return False
        made_one = values.get(made)
        if made and not (isinstance(made_one, torch.Tensor) and made_one.numel() <= LARGEST):
            return False
        self._values = values
        self._lines.append(self._indent + line)
        return True

    def _source(self) -> None:
        rng, name = self._rng, self._new("t")
        known = [list(self._values[one].shape) for one in self._named("t")]
        shape = [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4)))]
        if prod(shape) > 2**18 or (known and rng.random() < 0.5):
            shape = rng.choice(known) if known else [64, 64]
        dtype = rng.choice(["float32"] * 6 + ["bfloat16", "float16"])
        kind, grad = rng.choice(("randn", "ones", "empty", "rand")), rng.random() < 0.5
        given = f"{shape},device='cuda',dtype=torch.{dtype},requires_grad={grad}"
        self._keeps(f"{name}=torch.{kind}({given})", name)

    def _operator(self) -> None:
        for _ in range(30):
            found = self._named("t")
            name = self._new("t")
            table = UNARY if self._rng.random() < 0.6 else BINARY
            if self._keeps(f"{name}={self._filled(self._rng.choice(table))}", name):
                if self._rng.random() < 0.25 and len(found) > 3:
                    self._keeps(f"del {self._rng.choice(found)}")
                return

    def _change(self) -> None:
        any(self._keeps(self._filled(self._rng.choice(INPLACE))) for _ in range(10))

    def _filled(self, text: str) -> str:
        """Return ``text`` with tensors, late ones more often, for x and y."""
        found = self._named("t")
        x, y = self._rng.choice(found[-8:]), self._rng.choice(found)
        return re.sub(r"\by\b", y, re.sub(r"\bx\b", x, text))

    def _module(self) -> None:
        for _ in range(20):
            x, module, name = self._rng.choice(self._named("t")), self._new("m"), self._new("t")
            shape = self._values[x].shape
            if not shape:
                continue
            kind = self._rng.choice(MODULES)
            calls = next((one for key, one in CALLS.items() if kind.startswith(key)), ("m(x)",))
            text = re.sub(r"\bI\b", str(shape[-1]), kind)
            text = re.sub(r"\bC\b", str(shape[min(1, len(shape) - 1)]), text)
            call = re.sub(r"\bm\b", module, re.sub(r"\bx\b", x, self._rng.choice(calls)))
            mode = self._rng.choice(("", "", "", ".eval()"))
            before = self._values
            if self._keeps(f"{module}={text}.to('cuda'){mode}"):
                if self._keeps(f"{name}={call}", name):
                    return
                self._values = before
                self._lines.pop()

    def _backward(self) -> None:
        rng = self._rng
        found = [one for one in self._named("t") if self._values[one].requires_grad]
        if not found:
            return
        sums = ("sum()", "float().mean()", "square().sum()")
        chosen = rng.sample(found, min(len(found), rng.choice((1, 1, 2, 3))))
        loss = "+".join(f"{one}.{rng.choice(sums)}" for one in chosen)
        if rng.random() < 0.2:
            name, leaf, again = self._new("t"), rng.choice(found), rng.random() < 0.5
            self._keeps(f"{name}=torch.autograd.grad({loss},{leaf},create_graph={again})[0]", name)
        else:
            self._keeps(f"({loss}).backward()")

    def _step(self) -> None:
        tensors = [(one, self._values[one]) for one in self._named("t")]
        leaves = [name for name, one in tensors if one.requires_grad and one.is_leaf]
        parts = [*(f"*{one}.parameters()" for one in self._named("m")), *leaves]
        name = self._new("o")
        kind = self._rng.choice(OPTIMIZERS).replace("P", f"[{','.join(parts)}]", 1)
        if self._keeps(f"{name}={kind}") and self._keeps(f"{name}.step()"):
            self._keeps(f"{name}.zero_grad({self._rng.choice(('', 'False'))})")

    def _block(self) -> None:
        context = self._rng.choice(CONTEXTS)
        self._lines.append(f"with {context}:")
        before, self._indent = len(self._lines), "    "
        with eval(context, self._values):
            for _ in range(self._rng.randint(1, 5)):
                self._rng.choice((self._operator, self._operator, self._module, self._change))()
        self._indent = ""
        if len(self._lines) == before:
            self._lines.pop()


def run(program: str) -> None:
    """Run a program, of which nothing is left."""
    exec(HEADER + program, {})


def main() -> None:
    """Write programs into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    torch.cuda._is_in_bad_fork = lambda: False  # the dry runtime survives a fork
    for seed in range(options.seed, options.seed + options.count):
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            text = Writer(seed).write()
            run(text)
            (options.folder / f"{seed:06}.py").write_text(text, encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
