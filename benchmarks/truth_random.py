"""Random programs: operators, modules, passes and contexts in mixes that no corpus has.

    python -m pytest_gpumem.dry benchmarks/truth_random.py FOLDER --count 100 --seed 7
    python benchmarks/truth.py --programs FOLDER

A program is the text of Python statements, chosen by a seed one after the other; a statement stays
where it runs on the dry device. Programs that raise when they run as a whole are not written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from truth_mixes import CONFS, MIXES, RANKS, RANKS_HEADER, WORLDS
from truth_mixes import PARTS as MIXED

HEADER = """
import copy
from functools import partial

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.long, device="cuda")

class Gated(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sigmoid(), x.sum()

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        s = y.sigmoid()
        return g * s + h, (g * x * s * (1 - s) if ctx.needs_input_grad[1] else None)

class Doubled(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2, x > 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, _):
        return None if g is None else g * ctx.saved_tensors[0] + ctx.saved_tensors[1]

class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2

class Quarter(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x):
        ctx.kept = x
        return x @ x.mT

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        return (g + g.mT) @ ctx.kept
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

SNIPPETS = r"""
_t=Gated.apply(x,y)[0]
_t,_a=Gated.apply(x,x)
_t=Doubled.apply(x)[0]
_t=vmap(Doubled.apply)(x)[0]
_t=Dirty.apply(x*1)
_t=Quarter.apply(x)
_t=x*2;_t.register_hook(lambda g:g*2)
_t=x.sin();_t.register_hook(lambda g:g.mul_(2))
_t=x.exp();_t.retain_grad()
x.register_post_accumulate_grad_hook(lambda p:setattr(p,'grad',None))
_o=torch.optim.AdamW([x]);x.register_post_accumulate_grad_hook(lambda p:(_o.step(),_o.zero_grad()))
x.grad_fn.register_hook(lambda gi,go:tuple(None if g is None else g*2 for g in gi))
x.grad_fn.register_prehook(lambda go:tuple(None if g is None else g+1 for g in go))
torch.autograd.graph.register_multi_grad_hook([x,y],lambda gs:[g.sum() for g in gs if g is not None])
torch.autograd.graph.register_multi_grad_hook([x,y],lambda g:g.norm(),mode='any')
_h=_M.register_forward_hook(lambda m,a,o:o*2)
_h=_M.register_forward_pre_hook(lambda m,a:(a[0]*1,*a[1:]))
_h=_M.register_full_backward_hook(lambda m,gi,go:tuple(None if g is None else g*2 for g in gi))
_h=_M.register_full_backward_pre_hook(lambda m,go:tuple(None if g is None else g+1 for g in go))
_t=_M(x)
_t=_M(x);del _M
_t=checkpoint(_M,x,use_reentrant=False)
_t=checkpoint(_M,x,use_reentrant=True)
_t=checkpoint(_M,x,use_reentrant=False,preserve_rng_state=False)
_t=checkpoint(lambda a:checkpoint(_M,a.sin(),use_reentrant=False).cos(),x,use_reentrant=False)
_t=checkpoint(lambda a:(a@a.mT).softmax(-1)@a,x,use_reentrant=False,context_fn=partial(create_selective_checkpoint_contexts,[torch.ops.aten.mm.default,torch.ops.aten.bmm.default]))
_t=checkpoint(lambda a:F.gelu(a).sin()@a.mT,x,use_reentrant=False,context_fn=partial(create_selective_checkpoint_contexts,[torch.ops.aten.gelu.default]))
_t=torch.utils.checkpoint.checkpoint_sequential([_M,nn.ReLU(),_M],2,x,use_reentrant=False)
_t=functional_call(_M,{k:v*0.9 for k,v in _M.named_parameters()},(x,))
_a=grad(lambda p:functional_call(_M,p,(x,)).square().mean())(dict(_M.named_parameters()))
_p,_b=stack_module_state([copy.deepcopy(_M) for _ in range(3)]);_t=vmap(lambda p,b:functional_call(_M,(p,b),(x,)))(_p,_b)
_a=vmap(grad(lambda p,a:functional_call(_M,p,(a[None],)).square().mean()),(None,0))({k:v.detach() for k,v in _M.named_parameters()},x)
_t=vmap(lambda r:_M(r[None])[0])(x)
_t=vmap(lambda r:F.dropout(r,0.5),randomness='different')(x)
_t=jacrev(lambda a:a.sin().sum(-1))(x[:2].detach())
_t=torch.func.jacfwd(lambda a:a.sin().sum(-1))(x[:2].detach())
_t=torch.func.hessian(lambda a:a.pow(3).sum())(x.flatten()[:5].detach())
_t=torch.func.jvp(_M,(x,),(x,))[1]
_t=torch.func.functionalize(lambda a:a.clone().add_(1).view(-1))(x)
_t=torch.func.linearize(torch.sin,x)[1](x)
_a=x.view(-1);_a.mul_(2);_t=_a.sin()
_t=x*1;_t[0].add_(1);_t.t().mul_(2)
_t=x.clone();_t[...,0]=y.flatten()[0];_t.unsqueeze(0).sigmoid_()
_t=x.sin();_t[:1].copy_(y[:1]);_t.diagonal(0,-2,-1).zero_()
_t=x.clone();_a,_b=_t.chunk(2,-1);_t.mul_(2)
_t=x.clone();_t.select(0,0).exp_();_t.detach().zero_()
_t=torch.empty(0,device='cuda');torch.add(x.detach(),y.detach(),out=_t)
_t=torch.empty_like(x);torch.mul(x.detach(),y.detach(),out=_t)
_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.matmul(x.detach(),x.detach().mT,out=_t)
_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.cat([x.detach(),y.detach()],out=_t)
_t=torch.empty_like(x);torch.cumsum(x.detach(),0,out=_t)
_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.sum(x.detach(),-1,out=_t)
_a=torch.empty(0,device='cuda',dtype=torch.long);_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.sort(x.detach(),out=(_t,_a))
_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.index_select(x.detach(),0,zeros(3),out=_t)
_t=torch.empty(0,device='cuda',dtype=x.dtype);torch.bmm(x.detach(),y.detach(),out=_t)
_t=x.to(torch.complex64).abs()
_t=torch.complex(x.float(),y.float()).angle()
_a=x.to(torch.complex64);_t=(_a*_a.conj()).real
_a=x.to(torch.complex64);_t=(_a@_a.mH).imag
_a=torch.fft.fft2(x.float());_t=torch.fft.ifft2(_a*2).real
_t=torch.fft.irfft(torch.fft.rfft(x.float(),dim=-1)*2)
_t=torch.view_as_real(x.to(torch.complex64).exp()).sum(-1)
_a=torch.polar(x.float().abs(),y.float());_t=_a.conj().resolve_conj().real
_a=x.to(torch.complex64);_a.mul_(1j);_t=_a.imag.contiguous()
_a=torch.randint(0,9,x.shape,device='cuda');_t=x*_a
_a=torch.randint(0,9,x.shape,device='cuda',dtype=torch.int32);_t=(_a//2+_a%3).float()*x
_a=(x>0)&(y>0);_t=x.masked_fill(~_a,0)
_a=x.to(torch.int16);_t=(_a<<1|_a).half()
_a=x.to(torch.uint8);_t=_a.sum()+_a.max()
_a=torch.randint(0,9,(x.shape[0],),device='cuda');_t=F.embedding(_a,y[:9]) if y.dim()==2 else x
_t=F.embedding(zeros(3,4),x,padding_idx=0)
_t=F.embedding_bag(zeros(3,4),x,mode='mean')
_t=F.cross_entropy(x,zeros(x.shape[0]))
_t=F.cross_entropy(x.float(),zeros(x.shape[0]),label_smoothing=0.1,reduction='none')
_t=F.nll_loss(x.log_softmax(1),zeros(x.shape[0],*x.shape[2:]))
_t=F.ctc_loss(x.log_softmax(-1),zeros(x.shape[1],2)+1,(x.shape[0],)*x.shape[1],(2,)*x.shape[1])
_t=F.multi_margin_loss(x,zeros(x.shape[0]))
_t=torch.scatter_add(x,0,zeros(*x.shape),y)
_t=x.clone();_t.index_put_((zeros(5),),y[:1])
_t=x.clone();_t[zeros(3)]+=1
_s=torch.sparse_coo_tensor(zeros(2,1),x.detach().flatten()[:1],(x.shape[-2],x.shape[-2]),is_coalesced=True);_t=torch.sparse.mm(_s.detach(),x.detach())
_s=torch.sparse_coo_tensor(zeros(1,3),x[:3].detach(),(8,*x.shape[1:]));_t=_s.to_dense()
_s=torch.sparse_coo_tensor(zeros(1,3),x[:3].detach(),(8,*x.shape[1:]));_t=(_s+_s)._values()
_t=F.embedding(zeros(3,4),x,sparse=True)
_n=torch.nested.as_nested_tensor([x[:2],x[:1]],layout=torch.jagged);_t=_n.sin().to_padded_tensor(0.)
_n=torch.nested.as_nested_tensor([x[:2],x[:1]],layout=torch.jagged);_t=(_n*2).values()
_n=torch.nested.as_nested_tensor([x[:2],x[:1]],layout=torch.jagged);_t=_M(_n).values()
_n=torch.nested.as_nested_tensor([x[:2],x[:1]],layout=torch.jagged);_t=_n.softmax(-1).to_padded_tensor(0.)
_n=torch.nested.as_nested_tensor([x[:2],x[:1]],layout=torch.jagged);_t=_n.sum(1)
_t=x.to('cpu').to('cuda')
_t=x.detach().cpu().pin_memory().to('cuda',non_blocking=True)
_a=x.to('cpu',non_blocking=True);_t=_a.cuda(non_blocking=True)
_t=torch.ones(x.shape).to('cuda',torch.bfloat16,non_blocking=True)*x
_t=x.to('cuda',torch.float16,copy=True)
_t=x.mT.to('cpu').cuda()
_t=torch.empty_strided((8,8),(1,8),device='cuda');_t.copy_(torch.ones(8,8))
_s=torch.cuda.Stream();_s.wait_stream(torch.cuda.current_stream());torch.cuda.set_stream(_s);_t=x*2;torch.cuda.set_stream(torch.cuda.default_stream());_t.record_stream(torch.cuda.current_stream())
_s=torch.cuda.Stream();x.record_stream(_s);_t=x+1;torch.cuda.current_stream().wait_stream(_s)
_s=torch.cuda.Stream();_a=x*2;_a.record_stream(_s);del _a;_t=x*2
_s=torch.cuda.Stream();_a=x*2;_a.record_stream(_s);del _a;_s.synchronize();_t=x*2
_s=torch.cuda.Stream();_a=x*2;_a.record_stream(_s);del _a;torch.cuda.synchronize();_t=x*3
_e=torch.cuda.Event();_e.record();_t=x.sin();_e.synchronize()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=(x.detach().sin()+y.detach()).sum()\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=_M(x.detach())\n_g.replay();del _g
_f=torch.cuda.make_graphed_callables(nn.Linear(x.shape[-1],8).cuda(),(torch.zeros_like(x).requires_grad_(),));_t=_f(x)
_a=torch.optim.swa_utils.AveragedModel(_M);_a.update_parameters(_M);_a.update_parameters(_M)
_a=torch.optim.swa_utils.AveragedModel(_M,multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),use_buffers=True);_a.update_parameters(_M);_a.update_parameters(_M)
_m=copy.deepcopy(_M);torch.utils.swap_tensors(*[next(iter(a.parameters())) for a in (_m,_M)])
_M.load_state_dict(copy.deepcopy(_M.state_dict()))
_M.load_state_dict({k:v.cpu() for k,v in _M.state_dict().items()},assign=True);_M.cuda()
_m=copy.deepcopy(_M).to(torch.bfloat16)
_M.half();_M.float()
_M.requires_grad_(False)
_M.zero_grad(set_to_none=False)
_M.cpu();_M.cuda()
_a=nn.utils.clip_grad_norm_(_M.parameters(),1.0)
_a=nn.utils.clip_grad_norm_([x,y],1.0,norm_type='inf',foreach=False)
nn.utils.clip_grad_value_(_M.parameters(),1.0)
_a=nn.utils.get_total_norm([x,y])
_t=nn.utils.parameters_to_vector(_M.parameters())
_a=nn.utils.stateless.functional_call(_M,dict(_M.named_parameters()),(x,))
prune.l1_unstructured(_M,'weight',0.5)
_t=nn.utils.fuse_conv_bn_eval(nn.Conv2d(x.shape[1],8,1).cuda().eval(),nn.BatchNorm2d(8).cuda().eval())(x)
_t=nn.utils.rnn.pad_sequence([x[0],x[1],y[0]],batch_first=True)
_a=nn.utils.rnn.pack_padded_sequence(x,torch.tensor([x.shape[1]]*x.shape[0]),batch_first=True);_t=nn.GRU(x.shape[-1],8,batch_first=True).cuda()(_a)[0].data
torch.cuda.empty_cache()
_a=[torch.empty(n,device='cuda') for n in (70000,200000,300,400000,5000000,100)];del _a[::2];torch.cuda.empty_cache();_t=torch.ones(150000,device='cuda')
_a=[torch.empty(n*1000,device='cuda') for n in range(90,600,70)];del _a[1::2];_b=[torch.empty(n*1100,device='cuda') for n in range(60,600,90)];del _a,_b
_a=[torch.empty(n<<18,device='cuda') for n in (3,9,1,20,40,5)];del _a[1],_a[2];_b=[torch.empty(n<<18,device='cuda') for n in (2,8,11,19)]
with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    _t=(x*x).sin()*x
with saved_tensors_hooks(lambda a:a.to(torch.bfloat16),lambda a:a.float()):\n    _t=(x.sin()*y).exp()
with saved_tensors_hooks(lambda a:a.cpu(),lambda a:a.cuda()):\n    _t=_M(x)
with torch.autograd.graph.disable_saved_tensors_hooks('no'):\n    _t=x.sigmoid()
with torch.autograd.graph.allow_mutation_on_saved_tensors():\n    _t=x.sin();_t.mul_(2);_t.sum().backward()
with torch.backends.cuda.sdp_kernel():\n    _t=F.scaled_dot_product_attention(x,x,x)
with torch.autocast('cuda',torch.bfloat16):\n    _t=checkpoint(_M,x,use_reentrant=False)
with torch.autocast('cuda',torch.float16):\n    _t=_M(x);_t=_t.float().square()
with torch.autocast('cuda',torch.bfloat16):\n    _t=_M(x)\n    with torch.autocast('cuda',enabled=False):\n        _t=_t.float().sin()
with torch.device('cuda'):\n    _m=nn.Linear(x.shape[-1],24,dtype=x.dtype);_t=_m(x)
with torch.random.fork_rng():\n    _t=F.dropout(x,0.5)
_m=nn.Sequential(nn.Linear(x.shape[-1],40),nn.LayerNorm(40),nn.GELU(),nn.Linear(40,x.shape[-1])).cuda();_m.register_full_backward_hook(lambda m,gi,go:None);_t=_m(x)
_m=nn.Linear(x.shape[-1],40).cuda();_m.weight.register_post_accumulate_grad_hook(lambda p:p.grad.mul_(2));_t=_m(x)
_m=nn.utils.parametrizations.orthogonal(nn.Linear(x.shape[-1],8).cuda());_t=_m(x)
_t=nn.functional.multi_head_attention_forward(x,x,x,x.shape[-1],1,torch.ones(3*x.shape[-1],x.shape[-1],device='cuda'),None,None,None,False,0.,torch.ones(x.shape[-1],x.shape[-1],device='cuda'),None)[0]
_t=F.scaled_dot_product_attention(x[None],x[None],x[None],dropout_p=0.1)
_t=F.scaled_dot_product_attention(*[x.reshape(1,2,-1,8)]*3,is_causal=True)
_t=F.scaled_dot_product_attention(*[x.reshape(1,4,-1,16).half()]*3)
_t=F.scaled_dot_product_attention(x.reshape(1,4,-1,16).bfloat16(),*[x.reshape(1,4,-1,16)[:,:2].bfloat16()]*2,enable_gqa=True)
_t=varlen_attn(*[x.reshape(-1,2,16).half()]*3,zeros(2).int(),zeros(2).int(),8,8)
_t=torch._foreach_add([x,y,x],[y,x,x],alpha=2)[2]
_a=torch._foreach_norm([x,y]);_t=torch.stack(_a)
torch._foreach_mul_([x.data,y.data],2.)
torch._foreach_copy_([x.data],[y.data])
torch._foreach_lerp_([x.data],[y.data],0.5)
_t=torch.stack([x,y]).sum(0).relu_()
_a=torch.autograd.functional.vhp(lambda a:a.pow(3).sum(),x,x)
_a=torch.autograd.functional.jacobian(lambda a:a.sum(-1),x[:2])
_a=torch.autograd.forward_ad\nwith _a.dual_level():\n    _t=_a.unpack_dual(_M(_a.make_dual(x.detach(),x.detach()))).tangent
(_t:=x.sin().sum()).backward(retain_graph=True);_t.backward()
(x*y).backward(torch.ones_like(x*y))
(x.square().sum()+y.mean()).backward(inputs=[x])
_t=torch.autograd.grad(x.sum()+y.sum(),[x,y],allow_unused=True)[0]
_t=torch.autograd.grad(x.square(),x,torch.eye(x.numel(),device='cuda').view(-1,*x.shape)[:3],is_grads_batched=True)[0]
_t=x.grad*2
x.grad=None
x.grad.zero_()
x.data=y.data.clone()
x.set_(y.detach())
x.resize_(3,5)
x.untyped_storage().resize_(0)
_t=x.requires_grad_().as_strided((2,2),(1,1)).sin()
_t=torch.linalg.inv(x@x.mT+torch.eye(x.shape[-2],device='cuda'))
_t=torch.linalg.qr(x)[0]
_t=torch.linalg.svdvals(x)
_t=torch.linalg.cholesky_ex(x@x.mT)[0]
_t=torch.linalg.solve(x@x.mT,x)
_t=torch.linalg.matrix_norm(x)
_t=torch.linalg.multi_dot([x,x.mT,x])
_t=torch.linalg.det(x@x.mT)
_t=torch.cumulative_trapezoid(x)
_t=x.unflatten(-1,(2,-1)).transpose(-1,-2).reshape(x.shape)
_t=torch.nn.functional.grid_sample(x,torch.zeros(x.shape[0],4,4,2,device='cuda'),align_corners=False)
_t=F.affine_grid(torch.ones(2,2,3,device='cuda',requires_grad=True),(2,1,8,8))
_t=F.fold(F.unfold(x,2),x.shape[-2:],2)
_t=F.max_pool2d(x,2,return_indices=True)[0]
_t=F.max_unpool2d(*F.max_pool2d(x,2,return_indices=True),2)
_t=F.adaptive_max_pool2d(x,2)
_t=F.conv2d(x,torch.ones(8,x.shape[1],3,3,device='cuda',dtype=x.dtype,requires_grad=True),padding=1,stride=2)
_t=F.conv2d(x.to(memory_format=torch.channels_last),torch.ones(8,x.shape[1],3,3,device='cuda',dtype=x.dtype,requires_grad=True),padding=1)
_t=F.gumbel_softmax(x,hard=True)
_t=torch.randperm(50,device='cuda').float()
_t=torch.multinomial(x.softmax(-1),2,replacement=True).float()
_t=torch.histc(x,10)
_t=torch.bincount(zeros(10)+3,minlength=9).float()
_t=torch.searchsorted(x.detach().sort(-1).values,y.detach()).float()
""".strip().splitlines()  # noqa: E501  # a statement a line
"""Statements of a program: ``_t`` is a new tensor, ``_m`` a new module, ``_o`` an optimizer, ``_a``
another new name, ``_M`` a module that exists."""

LOOP = """
_m=@MODULE
_b=@SHAPE
_o=@OPTIMIZER
_s=torch.amp.GradScaler('cuda',enabled=@FLAG)
for _i in range(@COUNT):
    for _j in range(@FEW):
        _a=torch.rand(_b,@FROM)
        with torch.autocast('cuda',torch.float16,enabled=@FLAG):
            _a=@CALL
            _l=@LOSS
        _s.scale(_l).backward()
    @BEFORE
    _s.step(_o)
    _s.update()
    _o.zero_grad(@FLAG)
    @AFTER
"""
"""A loop of training; what follows ``@`` is one of ``PARTS``."""

PARTS = {
    "MODULE": """
nn.Sequential(nn.Linear(48,96),nn.GELU(),nn.Dropout(0.1),nn.LayerNorm(96),nn.Linear(96,48)).cuda()
nn.Sequential(nn.Linear(48,64),nn.ReLU(inplace=True),nn.Linear(64,48,bias=False)).cuda()
nn.TransformerEncoder(nn.TransformerEncoderLayer(48,4,96,batch_first=True),2).cuda()
nn.TransformerEncoder(nn.TransformerEncoderLayer(48,4,96,0.,norm_first=True,batch_first=True),2,enable_nested_tensor=False).cuda()
nn.Sequential(nn.Conv1d(16,32,3,padding=1),nn.BatchNorm1d(32),nn.SiLU(),nn.Conv1d(32,16,1)).cuda()
nn.Sequential(nn.Unflatten(1,(4,4)),nn.Conv2d(4,8,3,padding=1),nn.BatchNorm2d(8),nn.ReLU(),nn.Conv2d(8,4,1),nn.Flatten(1,2)).cuda()
nn.Sequential(nn.Unflatten(1,(4,4)),nn.Conv2d(4,8,3,padding=1),nn.GroupNorm(2,8),nn.Conv2d(8,4,1),nn.Flatten(1,2)).cuda().to(memory_format=torch.channels_last)
nn.utils.parametrizations.weight_norm(nn.Linear(48,48)).cuda()
nn.Sequential(nn.RMSNorm(48),nn.Linear(48,128),nn.GLU(),nn.Linear(64,48)).cuda().to(torch.bfloat16).float()
nn.Sequential(nn.Linear(48,48),nn.InstanceNorm1d(16),nn.PReLU(),nn.Linear(48,48)).cuda()
""",
    "SHAPE": "(2,16,48)\n(7,16,48)\n(16,16,48)\n(100,16,48)",
    "OPTIMIZER": """
torch.optim.AdamW(_m.parameters())
torch.optim.AdamW(_m.parameters(),fused=True)
torch.optim.Adam(_m.parameters(),capturable=True)
torch.optim.AdamW(_m.parameters(),foreach=False,amsgrad=True)
torch.optim.Adam([{'params':[a]} for a in _m.parameters()],fused=True)
torch.optim.SGD(_m.parameters(),0.1,momentum=0.9,fused=True)
torch.optim.SGD(_m.parameters(),0.1,nesterov=True,momentum=0.9,maximize=True)
torch.optim.Adafactor(_m.parameters(),foreach=False)
torch.optim.Adafactor(_m.parameters())
torch.optim.Muon([a for a in _m.parameters() if a.dim()==2])
torch.optim.NAdam(_m.parameters(),capturable=True,decoupled_weight_decay=True)
torch.optim.RAdam(_m.parameters(),foreach=False)
torch.optim.Adagrad(_m.parameters(),fused=True)
torch.optim.RMSprop(_m.parameters(),centered=True,momentum=0.9)
torch.optim.Rprop(_m.parameters(),capturable=True)
torch.optim.ASGD(_m.parameters(),capturable=True)
torch.optim.Adamax(_m.parameters(),capturable=True)
torch.optim.Adadelta(_m.parameters(),capturable=True)
torch.optim.AdamW(_m.parameters(),lr=torch.tensor(0.1),foreach=True,capturable=True)
""",
    "FLAG": "True\nFalse",
    "COUNT": "1\n2\n3",
    "FEW": "1\n1\n2\n3",
    "FROM": """
device='cuda'
device='cuda',requires_grad=True
pin_memory=True).cuda(non_blocking=True
""",
    "CALL": """
_m(_a)
checkpoint(_m,_a,use_reentrant=False)
_m(_a)*2
functional_call(_m,{k:v*1 for k,v in _m.named_parameters()},(_a,))
""",
    "LOSS": """
_a.float().square().mean()
F.mse_loss(_a,torch.zeros_like(_a))
F.cross_entropy(_a.flatten(0,1),zeros(_a.shape[0]*16))
F.cross_entropy(_a.transpose(1,2),zeros(_a.shape[0],16),label_smoothing=0.1)
(_a.log_softmax(-1)*_a.softmax(-1)).float().mean()
F.binary_cross_entropy_with_logits(_a,torch.rand_like(_a),reduction='sum')
F.smooth_l1_loss(_a,_a.detach()*2)
_a.float().norm()
_a.float().std()+_a.float().amax(-1).sum()
""",
    "BEFORE": """
pass
_s.unscale_(_o);nn.utils.clip_grad_norm_(_m.parameters(),1.)
_s.unscale_(_o);nn.utils.clip_grad_norm_(_m.parameters(),1.,norm_type=1.,foreach=False)
nn.utils.clip_grad_norm_(_m.parameters(),0.1,norm_type=float('inf'))
torch.cuda.empty_cache()
_c=[a.grad.clone() for a in _m.parameters()]
""",
    "AFTER": """
pass
_d=copy.deepcopy(_m.state_dict())
torch.cuda.empty_cache()
_c=_l.detach()
_o.load_state_dict(copy.deepcopy(_o.state_dict()))
_d={k:v.cpu() for k,v in _m.state_dict().items()}
with torch.no_grad():_d=_m.eval()(torch.ones(_b,device='cuda'));_m.train()
for _p in _m.parameters():_p.data=_p.data.clone()
""",
}

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

    def __init__(self, seed: int, mix: str = "") -> None:
        self._rng = random.Random(seed)
        self._mix = mix
        self._snippets = MIXES[mix].strip().splitlines() if mix in MIXES else SNIPPETS
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}
        self._count = 0
        self._indent = ""
        exec(HEADER, self._values)

    def write(self) -> str:
        """Return the whole program."""
        choices: list[Callable[[], None]] = [
            self._source, *[self._operator] * 8, self._change, *[self._module] * 2,
            self._backward, self._step, self._block, *[self._snippet] * 4,
            self._loop,
        ]  # fmt: skip
        if self._mix == "ranks":
            self._keeps(RANKS_HEADER)
            for _ in range(self._rng.randint(1, 3)):
                self._loop(self._rng.choice(RANKS), MIXED)
            return "\n".join(self._lines)
        if self._mix:
            choices += [self._snippet] * 25
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
        self._lines.append(indent(line, self._indent))
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

    def _snippet(self) -> None:
        for _ in range(30):
            text = self._filled(self._chosen(self._rng.choice(self._snippets), MIXED))
            text = text.replace(r"\n", "\n")
            for one in "MGS":
                known = self._named(one.lower())
                if not known and f"_{one}" in text:
                    break
                text = text.replace(f"_{one}", self._rng.choice([*known, ""]))
            else:
                if self._keeps(*self._with_names(text)):
                    return

    def _loop(self, loop: str = LOOP, parts: dict[str, str] = PARTS) -> None:
        self._keeps(self._with_names(self._chosen(loop, parts).strip())[0])

    def _chosen(self, text: str, parts: dict[str, str]) -> str:
        """Return ``text`` with one line of ``parts`` for each name that follows an ``@``."""

        def part(found: re.Match[str]) -> str:
            lines = parts[found[1]].removeprefix("\n").splitlines()
            return self._chosen(self._rng.choice(lines).replace(r"\n", "\n"), parts)

        return re.sub(r"@([A-Z]+)", part, text)

    def _with_names(self, text: str) -> tuple[str, str]:
        """Return ``text`` with new names, and that of its tensor."""
        names = {one: self._new(one[1]) for one in re.findall(r"\b_[a-z]\b", text)}
        return re.sub(r"\b_[a-z]\b", lambda one: names[one[0]], text), names.get("_t", "")

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


@contextmanager
def _surroundings(seed: int, mix: str) -> Iterator[str]:
    """Enter the rank and the settings of a program; yield the line that says them."""
    rng = random.Random(f"{mix} {seed}")
    if mix == "settings":
        conf = rng.choice(CONFS)
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
        yield f"#: {json.dumps({'conf': conf})}\n"
    elif mix == "ranks":
        from pytest_gpumem.dry.ranks import DryRankProcessGroups
        from pytest_gpumem.values.world import world_of

        size, rank = rng.choice(WORLDS)
        with DryRankProcessGroups(world_of(size, rank, per_machine=min(size, 4))).taken():
            yield f"#: {json.dumps({'world': [size, rank]})}\n"
    else:
        yield ""


def main() -> None:
    """Write programs into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", choices=(*MIXES, "ranks"), default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    torch.cuda._is_in_bad_fork = lambda: False  # the dry runtime survives a fork
    run("import torch._dynamo")  # imported once for all forks
    for seed in range(options.seed, options.seed + options.count):
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            with _surroundings(seed, options.mix) as head:
                text = head + Writer(seed, options.mix).write()
                run(text)
            (options.folder / f"{seed:06}.py").write_text(text, encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
