# ruff: noqa: E501 - a statement a line
"""Statements of random programs in other mixes: several GPUs, allocator settings, streams, ranks.

python -m pytest_gpumem.dry --gpu "A100-40GB*2" benchmarks/truth_random.py FOLDER --mix several
"""

SEVERAL = r"""
_t=x.to('cuda:1')
_t=x.to('cuda:1')
_t=x.to('cuda:0')
_t=x.cuda(1,non_blocking=True)
_t=x.to('cuda:1',torch.float16,non_blocking=True)
_t=x.to('cuda:0',torch.bfloat16)
_t=x.mT.to('cuda:1')
_t=x[...,::2].to('cuda:1',copy=True)
_t=x.expand(3,*x.shape).to('cuda:0')
_t=x.expand(3,*x.shape).to('cuda:1',torch.float64)
_t=x.to('cuda:1',memory_format=torch.channels_last)
_t=torch.empty_like(x,device='cuda:1');_t.copy_(x)
_t=torch.empty_like(x,device='cuda:1').mT;_t.copy_(x.mT,non_blocking=True)
_t=torch.empty_like(x,device='cuda:1');_t.copy_(x.mT.mT*2)
_t=torch.zeros(*x.shape,device='cuda:0',dtype=torch.bfloat16);_t.copy_(x)
_t=torch.zeros(2,*x.shape,device='cuda:1',dtype=torch.float16);_t.copy_(x)
_t=torch.zeros(2,*x.shape[::-1],device='cuda:1').mT;_t.copy_(x)
_t=torch.zeros(*x.shape,device='cuda:1');_t[...,::2].copy_(x[...,::2])
_t=x.to('cuda:1').sin().to('cuda:0')*y
_t=x+torch.tensor(3.)
_t=x*torch.ones((),device='cpu')
torch.cuda.set_device(1)
torch.cuda.set_device(0)
with torch.cuda.device(1):\n    _t=torch.randn(5,300,device='cuda',requires_grad=True)
with torch.cuda.device(1):\n    _t=torch.randn(40,64,device='cuda').matmul(torch.ones(64,33,device='cuda',requires_grad=True))
with torch.cuda.device(1):\n    _t=x*2
with torch.cuda.device(1):\n    _t=x.softmax(-1)@x.mT
with torch.cuda.device_of(x):\n    _t=torch.ones(300,device='cuda')
with torch.cuda.device(x.device):\n    _t=torch.sort(x)[0]
_t=torch.randn(4,33,device='cuda:1',requires_grad=True)
_t=torch.randn(*x.shape,device='cuda:1',requires_grad=True)
_t=torch.randn(*x.shape,device='cuda:1',generator=torch.Generator('cuda:1'))
_m=nn.Linear(x.shape[-1],40).to('cuda:1');_t=_m(x.to('cuda:1'))
_m=nn.Linear(x.shape[-1],40,device='cuda:1');_t=_m(x.to('cuda:1')).to(x.device)
_m=nn.Sequential(nn.Linear(x.shape[-1],64),nn.GELU()).to('cuda:0');_n=nn.Linear(64,8).to('cuda:1');_t=_n(_m(x.to('cuda:0')).to('cuda:1'))
_m=nn.TransformerEncoderLayer(x.shape[-1],1,64,batch_first=True).to('cuda:1');_t=_m(x.to('cuda:1'))
_m=nn.LSTM(x.shape[-1],16,batch_first=True).to('cuda:1');_t=_m(x.to('cuda:1'))[0]
_m=nn.Conv2d(x.shape[1],8,3).to('cuda:1');_t=_m(x.to('cuda:1'))
_t=checkpoint(lambda a:a.to('cuda:1').sin().to('cuda:0')*2,x,use_reentrant=False)
_t=checkpoint(lambda a:F.gelu(a.to('cuda:1')).to('cuda:0')*2,x,use_reentrant=True)
_t=checkpoint(lambda a,b:a.to('cuda:0').sin()+b.to('cuda:0').cos(),x,y,use_reentrant=False)
_s=torch.cuda.Stream(1)\nwith torch.cuda.stream(_s):\n    _t=x.to('cuda:1',non_blocking=True)
_s=torch.cuda.Stream(1)\nwith torch.cuda.stream(_s):\n    _t=x.to('cuda:0',non_blocking=True)
_s=torch.cuda.Stream(0)\nwith torch.cuda.stream(_s):\n    _t=x.to('cuda:1',non_blocking=True)\ntorch.cuda.current_stream(1).wait_stream(_s)
_s=torch.cuda.Stream(1)\nwith torch.cuda.stream(_s):\n    _t=(x.to('cuda:1')*2).sum(-1)\n_t.record_stream(torch.cuda.current_stream(1))
_s=torch.cuda.Stream(1);_a=x.to('cuda:1')*2;_a.record_stream(_s);del _a;_t=x.to('cuda:1')*3
_s=torch.cuda.Stream(0);_a=x.to('cuda:1')*2;_a.record_stream(_s);del _a;_t=x.to('cuda:1')*3
_s=torch.cuda.Stream(0);_a=x.to('cuda:0')*2;_a.record_stream(_s);del _a;torch.cuda.synchronize(0);_t=x.to('cuda:0')*3
_s=torch.cuda.Stream(1);_a=x.to('cuda:1')*2;_a.record_stream(_s);del _a;torch.cuda.synchronize(0);_t=x.to('cuda:1')*3
_s=torch.cuda.Stream(1);_a=x.to('cuda:1')*2;_a.record_stream(_s);del _a;_s.synchronize();_t=x.to('cuda:1')*3
_s,_b=torch.cuda.Stream(0),torch.cuda.Stream(1);_s.wait_stream(_b);_b.wait_stream(torch.cuda.current_stream(0))\nwith torch.cuda.stream(_s),torch.cuda.stream(_b):\n    _t=x.to('cuda:0').sin().to('cuda:1')
_e=torch.cuda.Event();_e.record(torch.cuda.current_stream(1));torch.cuda.current_stream(0).wait_event(_e);_t=x.to('cuda:0')*2
with torch.cuda.device(1):\n    _g=torch.cuda.CUDAGraph()\n    with torch.cuda.graph(_g):\n        _t=torch.ones(300,40,device='cuda').sin().sum()\n    _g.replay()
with torch.cuda.device(1):\n    _g=torch.cuda.CUDAGraph();_a=x.detach().to('cuda:1')\n    with torch.cuda.graph(_g):\n        _t=(_a@_a.mT).softmax(-1)\n    _g.replay()
_a=nn.utils.clip_grad_norm_([x,y],1.0)
_a=nn.utils.clip_grad_norm_([x,y],1.0,foreach=False)
_t=torch._foreach_add([x,y,x],1)[1]
_a=torch._foreach_norm([x,y]);_t=_a[0]
torch._foreach_mul_([x.data,y.data],2.)
torch._foreach_copy_([x.data],[y.data])
_t=torch._foreach_mul([x,y],[x,y])[1]
_s=torch.amp.GradScaler('cuda');_p=[torch.ones(30,50,device='cuda:0',requires_grad=True),torch.ones(3,500,device='cuda:1',requires_grad=True)];_o=torch.optim.SGD(_p,0.1,momentum=0.9);_s.scale((_p[0].sum()+_p[1].sin().sum().to('cuda:0'))).backward();_s.unscale_(_o);_s.step(_o);_s.update();_o.zero_grad()
_p=[torch.ones(30,50,device='cuda:0',requires_grad=True),torch.ones(3,500,device='cuda:1',requires_grad=True)];_o=torch.optim.AdamW(_p,@KIND);(_p[0].sum()+_p[1].sin().sum().to('cuda:0')).backward();_o.step();_o.zero_grad();(_p[0].sum()+_p[1].sin().sum().to('cuda:0')).backward();_o.step()
_t=x.detach().cpu().pin_memory().to('cuda:1',non_blocking=True)
_a=x.to('cpu',non_blocking=True);_t=_a.cuda(1,non_blocking=True)
_t=x.clone();_t.data=y.data
_t=torch.cat([x,y.to(x.device)])
_t=torch.stack([x,y.to(x.device)]).sum(0)
_t=x.to(y.device)+y
_t=x.to(y.device)@y.mT
_t=(x.sum()+y.sum().to(x.device))
(x.sum()+y.square().sum().to(x.device)).backward()
(x.sum().to('cuda:1')*y.sum().to('cuda:1')).backward()
_t=torch.autograd.grad(x.sum().to('cuda:0')+y.sin().sum().to('cuda:0'),[x,y],allow_unused=True)[1]
_t=torch.autograd.grad(x.square().sum().to('cuda:1'),x,create_graph=True)[0]
x.grad=None
_t=x.grad.to('cuda:1')
_M.to('cuda:1')
_M.to('cuda:0')
_M.cpu();_M.cuda(1)
_m=copy.deepcopy(_M).to('cuda:1')
_M.load_state_dict({k:v.to('cuda:1') for k,v in _M.state_dict().items()})
_M.load_state_dict({k:v.to('cuda:1') for k,v in _M.state_dict().items()},assign=True)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats(1)
torch.cuda.reset_accumulated_memory_stats(0)
torch.cuda.synchronize(1)
torch._C._cuda_clearCublasWorkspaces()
with torch.autocast('cuda',torch.bfloat16):\n    _t=x.to('cuda:1')@x.to('cuda:1').mT;_a=x.to('cuda:0')@x.to('cuda:0').mT
with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    _t=x.sin().to('cuda:1').exp()
with torch.random.fork_rng():\n    _t=F.dropout(x.to('cuda:1'),0.5)
with torch.device('cuda:1'):\n    _m=nn.Linear(24,24);_t=_m(torch.ones(3,24))
_t=torch.fft.rfft(x.to('cuda:1').float()).abs()
_t=torch.linalg.inv(torch.eye(9,device='cuda:1')*2)
_t=F.scaled_dot_product_attention(*[x.to('cuda:1').reshape(1,2,-1,8)]*3,is_causal=True)
_t=torch.tensor([1.,2.],device='cuda:1')
_t=torch.arange(1000,device='cuda:1').float()
_t=x[torch.zeros(3,dtype=torch.long)]
_t=x.index_select(0,torch.zeros(3,dtype=torch.long,device=x.device))
_t=torch.where(x>0,x,torch.tensor(0.))
_t=x.new_zeros(30,70,device='cuda:1')
_t=torch.as_tensor(x,device='cuda:1')
_t=torch.tensor(x.detach(),device='cuda:1')
_a=[torch.ones(3*10**6,device=f'cuda:{i%2}') for i in range(5)];_t=sum(a.sum().to('cuda:1') for a in _a)
"""

SETTINGS = r"""
_t=torch.empty(@BIG,device='cuda')
_t=torch.empty(@BIG,device='cuda')
_t=torch.empty(@MIB<<18,device='cuda')
_t=torch.ones(@MIB,1<<18,device='cuda',requires_grad=True)
_t=torch.ones(@MIB,1<<18,device='cuda',requires_grad=True)*2
_a=[torch.empty(n<<18,device='cuda') for n in (@MIB,@MIB,@MIB,@MIB)];del _a[@FEW]
_a=[torch.empty(n,device='cuda') for n in (@BIG,@BIG,@BIG,@BIG,@BIG)];del _a[::2]
_a=[torch.empty(n,device='cuda') for n in (@BIG,@BIG,@BIG,@BIG,@BIG)];del _a[@FEW];torch.cuda.empty_cache();_t=torch.empty(@BIG,device='cuda')
_a=[torch.empty(n<<18,device='cuda') for n in (@MIB,@MIB,@MIB)];_a.clear()
_a=[torch.empty(n<<18,device='cuda') for n in (@MIB,@MIB,@MIB)];del _a;torch.cuda.empty_cache()
try:\n    _t=torch.empty(1<<40,device='cuda')\nexcept torch.OutOfMemoryError:\n    _t=torch.ones(30,40,device='cuda')
_a=[]\ntry:\n    while len(_a)<400:_a.append(torch.empty(@MIB<<18,device='cuda'))\nexcept torch.OutOfMemoryError:\n    del _a[::2]\n_t=torch.ones(@BIG,device='cuda')
_a=[]\ntry:\n    while len(_a)<600:_a.append(torch.empty(@BIG,device='cuda'))\nexcept torch.OutOfMemoryError:\n    _a.clear()\n_t=torch.ones(@BIG,device='cuda')
_a=[]\ntry:\n    while len(_a)<600:_a.append(torch.empty(@BIG,device='cuda'));_a.append(torch.empty(@MIB<<18,device='cuda'))\nexcept torch.OutOfMemoryError:\n    _a=_a[:2]\n    torch.cuda.empty_cache()
try:\n    _t=_M(torch.ones(1<<12,x.shape[-1],device='cuda')).sin().exp()\nexcept torch.OutOfMemoryError:\n    _t=torch.ones(@FEW,@FEW,device='cuda')
try:\n    _t=(x[None].expand(50,*x.shape)*2).sin()\nexcept torch.OutOfMemoryError:\n    _t=torch.ones(@FEW,@FEW,device='cuda')
try:\n    (x[None].expand(30,*x.shape).sin()*2).exp().sum().backward()\nexcept torch.OutOfMemoryError:\n    x.grad=None
torch.cuda.set_per_process_memory_fraction(@FRACTION)
torch.cuda.set_per_process_memory_fraction(@FRACTION)
torch.cuda.empty_cache()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
torch.cuda.reset_accumulated_memory_stats()
torch.cuda.memory._set_allocator_settings('@CONF')
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _t=torch.empty(@BIG,device='cuda')
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _t=x*2;_a=torch.empty(@MIB<<18,device='cuda')
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _a=torch.empty(@MIB<<18,device='cuda')\ndel _a,_p
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _a=[torch.empty(@BIG,device='cuda') for _ in range(@FEW)];del _a[::2]\ntorch.cuda.empty_cache()\nwith torch.cuda.use_mem_pool(_p):\n    _t=torch.empty(@BIG,device='cuda')
_p=torch.cuda.MemPool(use_on_oom=True)\nwith torch.cuda.use_mem_pool(_p):\n    _a=torch.empty(@MIB<<18,device='cuda')\ndel _a
_p=torch.cuda.MemPool(no_split=True)\nwith torch.cuda.use_mem_pool(_p):\n    _a=[torch.empty(@BIG,device='cuda') for _ in range(3)];del _a[@FEW%3];_t=torch.empty(@BIG,device='cuda')
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _t=_M(x)
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _t=(x@x.mT).softmax(-1)\n_t.sum().backward()
_p=torch.cuda.MemPool();_q=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _t=x*2\n    with torch.cuda.use_mem_pool(_q):\n        _t=_t+1\n    _t=_t.sin()
_p=torch.cuda.MemPool();_s=torch.cuda.Stream()\nwith torch.cuda.use_mem_pool(_p),torch.cuda.stream(_s):\n    _t=x*2
_p=torch.cuda.MemPool();_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,pool=_p.id):\n    _t=(x.detach()*2).sum()\n_g.replay()
_p=torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(_p):\n    _a=torch.empty(@BIG,device='cuda')\n_b=_p.snapshot();_c=_p.use_count();del _a;torch.cuda.empty_cache()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=torch.empty(@BIG,device='cuda')*2\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=(x.detach()*2).sum()\n_g.replay();_g.reset()
_s=torch.cuda.Stream();_a=torch.empty(@MIB<<18,device='cuda');_a.record_stream(_s);del _a;_t=torch.empty(@MIB<<18,device='cuda')
_s=torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    _t=torch.empty(@MIB<<18,device='cuda')
_s=torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    _a=torch.empty(@BIG,device='cuda')\ndel _a;torch.cuda.empty_cache()
_t=torch.randn(@MIB,1<<16,device='cuda',requires_grad=True);(_t*2).sin().sum().backward()
_t=x.sin();torch.cuda.empty_cache();_t=_t.exp()
_M.zero_grad()
_m=nn.Linear(@FEW<<8,@FEW<<9).cuda();_t=_m(torch.ones(@MIB<<4,_m.in_features,device='cuda'));_t.sum().backward()
_m=nn.Linear(@FEW<<8,@FEW<<9).cuda();_o=torch.optim.AdamW(_m.parameters());_m(torch.ones(@MIB<<4,_m.in_features,device='cuda')).sum().backward();_o.step();_o.zero_grad()
_t=torch.cuda.memory_reserved()*torch.ones(3,device='cuda')
_t=torch.ones(3,device='cuda')*torch.cuda.mem_get_info()[0]
_a=torch.cuda.caching_allocator_alloc(@BIG);torch.cuda.caching_allocator_delete(_a)
_a=torch.cuda.memory_snapshot();_t=torch.ones(len(_a),device='cuda')
_t=torch.empty(1000,device='cuda');_t.untyped_storage().resize_(@BIG)
_t=x.clone();_t.resize_(@MIB,1000)
torch._C._cuda_clearCublasWorkspaces()
"""

STREAMS = r"""
_s=torch.cuda.Stream();_s.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(_s):\n    _t=x*2\ntorch.cuda.current_stream().wait_stream(_s)
_s=torch.cuda.Stream();_s.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(_s):\n    _t=_M(x)\ntorch.cuda.current_stream().wait_stream(_s);_t.record_stream(torch.cuda.current_stream())
_s=torch.cuda.Stream(priority=-1)\nwith torch.cuda.stream(_s):\n    _t=x@x.mT
with torch.cuda.stream(_S):\n    _t=x.softmax(-1)
with torch.cuda.stream(_S):\n    _t=x@y.mT;_a=_t.sin()
with torch.cuda.stream(_S):\n    x.sum().backward()
with torch.cuda.stream(_S):\n    _t=torch.autograd.grad(x.sin().sum(),x)[0]
with torch.cuda.stream(_S):\n    _a=[torch.empty(n,device='cuda') for n in (70000,200000,300,400000)];del _a[::2];_t=torch.ones(150000,device='cuda')
x.record_stream(_S)
_a=x*2;_a.record_stream(_S);del _a
_a=x*2;_a.record_stream(_S);del _a;_t=x*2
_a=x*2;_a.record_stream(_S);_a.record_stream(_S);del _a;torch.cuda.current_stream().wait_stream(_S);_t=x*2
_a=x*2;_a.record_stream(_S);del _a;_S.synchronize();_t=x*2
_a=x*2;_a.record_stream(_S);del _a;torch.cuda.synchronize();_t=x*2
_a=x*2;_a.record_stream(_S);_e=_S.record_event();del _a;_e.synchronize();_t=x*2
_a=x*2;_e=_S.record_event();_a.record_stream(_S);del _a;_e.synchronize();_t=x*2
_a=x*2;_a.record_stream(_S);del _a;_b=_S.query();_t=x*2
_a=x*2;_a.record_stream(_S);del _a;_t=x.sum().item()*x
_a=x*2;_a.record_stream(_S);del _a;torch.cuda.current_stream().synchronize();_t=x*2
_a=x*2;_a.record_stream(_S);del _a;_b=x.cpu();_t=x*2
_a=x*2;_a.record_stream(_S);del _a;torch.cuda.empty_cache();_t=x*3
_a=x*2;_a.record_stream(torch.cuda.current_stream());del _a;_t=x*2
_a=x*2;_a.record_stream(torch.cuda.default_stream());del _a;_t=x*2
torch.cuda.set_stream(_S);_t=x*2;torch.cuda.set_stream(torch.cuda.default_stream())
torch.cuda.set_stream(_S)
torch.cuda.set_stream(torch.cuda.default_stream())
_s=torch.cuda.Stream()
_S.synchronize()
_S.wait_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(_S)
torch.cuda.synchronize()
_e=torch.cuda.Event();_e.record(_S);torch.cuda.current_stream().wait_event(_e)
_e=torch.cuda.Event(enable_timing=True);_e.record();_t=x.sin();_f=torch.cuda.Event(enable_timing=True);_f.record();_f.synchronize();_b=_e.elapsed_time(_f)
_e=torch.cuda.Event(blocking=True);_t=x.sin();_e.record();_e.wait(_S);_e.synchronize()
_s=torch.cuda.ExternalStream(_S.cuda_stream)\nwith torch.cuda.stream(_s):\n    _t=x*2
_s=torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream);_a=x*2;_a.record_stream(_s);del _a;_t=x*2
_a=torch.ones(*x.shape).pin_memory();_t=_a.to('cuda',non_blocking=True)*x
_a=torch.empty(*x.shape,pin_memory=True);_a.copy_(x,non_blocking=True);_S.synchronize();_t=_a.cuda(non_blocking=True)
with torch.cuda.stream(_S):\n    _a=torch.ones(*x.shape).pin_memory();_t=_a.cuda(non_blocking=True)\n_t.record_stream(torch.cuda.current_stream())
with torch.cuda.stream(_S):\n    _t=x.detach().cpu().cuda()
_a=torch.empty(*x.shape,dtype=torch.float16,pin_memory=True);_a.copy_(x,non_blocking=True);_t=_a.cuda()
_a=torch.empty(*x.shape[::-1],pin_memory=True).mT;_t=_a.to('cuda',non_blocking=True)
_t=torch.empty_like(x.mT);_t.copy_(torch.ones(*x.mT.shape,dtype=torch.float64).pin_memory(),non_blocking=True)
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=(x.detach().sin()+1).sum(-1)\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=(x.detach()@x.detach().mT).softmax(-1)\n_g.replay();_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,stream=_S):\n    _t=x.detach().sin()*2\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,pool=_G.pool()):\n    _t=x.detach().sin()*2\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,pool=_G.pool(),stream=_S):\n    _a=x.detach().sin();_t=_a*2;del _a\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,pool=torch.cuda.graph_pool_handle()):\n    _t=_M(x.detach())\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g,capture_error_mode='thread_local'):\n    _t=F.dropout(x.detach(),0.5)\n_g.replay()
_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=torch.randn(300,20,device='cuda')*2\n_g.replay()
_g=torch.cuda.CUDAGraph();_g.capture_begin() if torch.cuda.current_stream()!=torch.cuda.default_stream() else None
_g=torch.cuda.CUDAGraph();_s=torch.cuda.Stream();torch.cuda.synchronize()\nwith torch.cuda.stream(_s):\n    _g.capture_begin();_t=x.detach()*2;_a=_t.sum();_g.capture_end()\n_g.replay()
_g=torch.cuda.CUDAGraph();_s=torch.cuda.Stream()\nwith torch.cuda.graph(_g):\n    _s.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(_s):\n        _a=x.detach().sin()\n    torch.cuda.current_stream().wait_stream(_s);_t=_a*2\n_g.replay()
_g=torch.cuda.CUDAGraph();_s=torch.cuda.Stream()\nwith torch.cuda.graph(_g):\n    _a=x.detach().sin();_s.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(_s):\n        _b=_a.cos();_a.record_stream(_s)\n    del _a;torch.cuda.current_stream().wait_stream(_s);_t=_b*2\n_g.replay()
_a=x.detach().clone().requires_grad_();_g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(_g):\n    _t=(_a*_a).sum();_t.backward()\n_g.replay()
_m=nn.Sequential(nn.Linear(x.shape[-1],40),nn.ReLU(),nn.Linear(40,8)).cuda();_a=torch.zeros(3,x.shape[-1],device='cuda');_o=torch.optim.AdamW(_m.parameters(),capturable=True);_s=torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    for _i in range(3):\n        _o.zero_grad();_m(_a).sum().backward();_o.step()\ntorch.cuda.current_stream().wait_stream(_s);_g=torch.cuda.CUDAGraph();_o.zero_grad()\nwith torch.cuda.graph(_g):\n    _t=_m(_a).sum();_t.backward();_o.step()\n_g.replay()
_f=torch.cuda.make_graphed_callables(nn.Linear(x.shape[-1],8).cuda(),(torch.zeros_like(x).requires_grad_(),));_t=_f(x)
_f=torch.cuda.make_graphed_callables(nn.Sequential(nn.Linear(x.shape[-1],64),nn.Dropout(0.1),nn.GELU(),nn.Linear(64,8)).cuda(),(torch.zeros_like(x),));_t=_f(x);_t.sum().backward()
_f,_h=torch.cuda.make_graphed_callables((nn.Linear(x.shape[-1],8).cuda(),nn.Linear(8,9).cuda()),((torch.zeros_like(x),),(torch.zeros(*x.shape[:-1],8,device='cuda',requires_grad=True),)));_t=_h(_f(x));_t.sum().backward()
_f=torch.cuda.make_graphed_callables(nn.Linear(x.shape[-1],8).cuda(),(torch.zeros_like(x),),num_warmup_iters=1,allow_unused_input=True,pool=torch.cuda.graph_pool_handle());_t=_f(x)
_f=torch.cuda.make_graphed_callables(nn.Linear(x.shape[-1],8).cuda(),(torch.zeros_like(x),),pool=_G.pool());_t=_f(x)
_f=torch.cuda.make_graphed_callables(lambda a:a.sin()@a.mT,(torch.zeros_like(x).requires_grad_(),));_t=_f(x)
_G.reset()
_G.replay()
del _G
_g=_G;del _G;torch.cuda.empty_cache()
_s=torch.cuda.Stream()\nfor _i in range(3):\n    with torch.cuda.stream(_s):\n        _a=torch.randn(*x.shape).pin_memory().cuda(non_blocking=True)\n    torch.cuda.current_stream().wait_stream(_s);_a.record_stream(torch.cuda.current_stream());_t=_a*x
_s=torch.cuda.Stream()\nfor _i in range(3):\n    _s.wait_stream(torch.cuda.current_stream())\n    with torch.cuda.stream(_s):\n        _a=x.detach().sin();_b=_a.to('cpu',non_blocking=True)\n    _a.record_stream(_s);_t=x*3
with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    _t=(x*x).sin()*x
with torch.cuda.stream(_S),torch.autograd.graph.save_on_cpu(pin_memory=True):\n    _t=_M(x)
with torch.cuda.stream(_S):\n    _t=checkpoint(_M,x,use_reentrant=False)
_m=nn.Linear(x.shape[-1],40).cuda();_s=torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    _t=_m(x)\n_t.sum().backward()
_m=nn.Linear(x.shape[-1],40).cuda();_s=torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    _t=_m(x);_t.sum().backward()
_s,_b=torch.cuda.Stream(),torch.cuda.Stream()\nwith torch.cuda.stream(_s):\n    _c=x.sin()\nwith torch.cuda.stream(_b):\n    _d=x.cos()\n_t=_c*_d;_t.sum().backward()
_a=x.sin();_a.register_hook(lambda g:g.record_stream(_S));_t=_a*2
torch.cuda.empty_cache()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.reset_peak_memory_stats()
_a=torch.cuda.caching_allocator_alloc(100000,stream=_S);torch.cuda.caching_allocator_delete(_a)
torch.cuda._sleep(1000)
_t=torch.fft.rfft(x.float()).abs()
with torch.cuda.stream(_S):\n    _t=torch.fft.rfft(x.float()).abs()
with torch.cuda.stream(_S):\n    _t=torch.sort(x)[0]
with torch.cuda.stream(_S):\n    _t=F.conv1d(x,torch.ones(4,x.shape[1],3,device='cuda'))
with torch.cuda.stream(_S):\n    _t=torch.linalg.inv(x@x.mT+torch.eye(x.shape[-2],device='cuda'))
with torch.cuda.stream(_S):\n    _m=nn.LSTM(x.shape[-1],16,batch_first=True).cuda();_t=_m(x)[0]
with torch.cuda.stream(_S):\n    _t=x[x>0]
with torch.cuda.stream(_S):\n    _t=x.sum();_a=_t.item()
"""

_TRAINED = """for _i in range(@COUNT):
    for _j in range(@FEW):
        with @SYNC:
            with torch.autocast('cuda',@AMP):
                _a=_m(torch.rand(@BATCH,16,48,device='cuda'))
                _l=_a.float().square().mean()
            _l.backward()
"""
"""Steps with gradients of several passes, for models that have ``no_sync``."""

RANKS = (
    r"""
_m=@NET
_m=DDP(_m,device_ids=[dist.get_rank()]@DDP)
@HOOK
_o=@OPTIM
"""
    + _TRAINED
    + r"""    @CLIP
    _o.step()
    _o.zero_grad(@FLAG)
    @AFTER
""",
    r"""
_m=@NET
_q=MixedPrecisionPolicy(@POLICY)
for _b in @PARTED:
    fully_shard(_b,mesh=@MESH,mp_policy=_q@SHARD)
fully_shard(_m,mp_policy=_q@SHARD)
_o=@SHARDED
for _i in range(@COUNT):
    for _j in range(@FEW):
        @GRADSYNC
        with torch.autocast('cuda',@AMP):
            _a=@CALL
            _l=_a.float().square().mean()
        _l.backward()
    @CLIP
    _o.step()
    _o.zero_grad(@FLAG)
    @AFTERSHARD
""",
    r"""
_n=init_device_mesh('cuda',(dist.get_world_size(),))
_m=nn.Sequential(nn.Linear(48,96@BIAS),nn.GELU(),nn.Linear(96,48),nn.LayerNorm(48)).cuda()
_m=parallelize_module(_m,_n,@PLAN)
_o=@SHARDED
for _i in range(@COUNT):
    with torch.autocast('cuda',@AMP):
        _a=@CALL
        _l=_a.float().square().mean()
    _l.backward()
    @CLIP
    _o.step()
    _o.zero_grad(@FLAG)
""",
    r"""
_n=init_device_mesh('cuda',(2,dist.get_world_size()//2),mesh_dim_names=('dp','tp'))
_m=nn.Sequential(nn.Linear(48,96),nn.GELU(),nn.Linear(96,48),nn.LayerNorm(48)).cuda()
_m=parallelize_module(_m,_n['tp'],{'0':ColwiseParallel(),'2':RowwiseParallel()})
fully_shard(_m,mesh=_n['dp'],mp_policy=MixedPrecisionPolicy(@POLICY)@SHARD)
_o=@SHARDED
for _i in range(@COUNT):
    _a=@CALL
    _a.float().square().mean().backward()
    @CLIP
    _o.step()
    _o.zero_grad(@FLAG)
""",
    r"""
_n=init_device_mesh('cuda',@DIMS)
_d=distribute_tensor(torch.randn(@SIZE,@SIZE,device='cuda',requires_grad=True),_n,@PLACE)
_e=distribute_tensor(torch.randn(@SIZE,@SIZE,device='cuda'),_n,@PLACE)
_c=@DTENSOR
_c=_c.redistribute(_n,@PLACE)
_t=_c.full_tensor()
@DEND
""",
    r"""
_m=nn.Sequential(*[nn.Linear(48,48) for _ in range(3)],@EXTRA).cuda()
_k=dist.get_rank();_z=dist.get_world_size()
_g=PipelineStage(_m,_k,_z,torch.device('cuda',_k)@STAGEARGS)
_q=@SCHEDULE
_o=@OPTIM
for _i in range(@COUNT):
    with torch.autocast('cuda',@AMP):
        _a=torch.rand(8,16,48,device='cuda')
        _b=torch.rand(8,16,48,device='cuda')
        _r=_q.step(*([_a] if _k==0 else []),**({'target':_b} if _k==_z-1 else {}))
    @CLIP
    _o.step()
    _o.zero_grad()
""",
    r"""
_m=nn.ModuleList([nn.Sequential(*[nn.Linear(48,48) for _ in range(2)],nn.GELU()).cuda() for _ in range(2)])
_k=dist.get_rank();_z=dist.get_world_size()
_g=[PipelineStage(b,_k+i*_z,2*_z,torch.device('cuda',_k)) for i,b in enumerate(_m)]
_q=@INTERLEAVED
_o=@OPTIM
for _i in range(@COUNT):
    _a=torch.rand(8,16,48,device='cuda')
    _b=torch.rand(8,16,48,device='cuda')
    _r=_q.step(*([_a] if _k==0 else []),**({'target':_b} if _k==_z-1 else {}))
    _o.step()
    _o.zero_grad()
""",
    r"""
_m=@NET
_m=FSDP(_m,device_id=dist.get_rank()@FSDP)
_o=@OPTIM
"""
    + _TRAINED
    + r"""    @CLIPFSDP
    _o.step()
    _o.zero_grad(@FLAG)
""",
    r"""
_a=torch.rand(@SIZE,@SIZE,device='cuda',requires_grad=True)
_b=_a.detach().clone()
@COLLECTIVE
@COLLECTIVE
@COLLECTIVE
""",
)

PARTS = {
    "BIG": "100\n3000\n70000\n200000\n262144\n262145\n300000\n500000\n1300000\n2621440\n2621441\n3000000\n5242880\n5300000\n20000000",
    "MIB": "1\n2\n3\n5\n9\n10\n11\n19\n20\n21\n33\n60\n64",
    "FRACTION": "0.0005\n0.001\n0.002\n0.002\n0.003\n0.005\n0.01\n1.0",
    "CONF": """
expandable_segments:True
expandable_segments:False
max_split_size_mb:21
max_split_size_mb:64
roundup_power2_divisions:4
roundup_power2_divisions:[16:1,64:4,256:2,>:8]
garbage_collection_threshold:0.6
garbage_collection_threshold:0.1
large_segment_size_mb:40
max_non_split_rounding_mb:30
per_process_memory_fraction:0.002
""",
    "KIND": "foreach=True\nforeach=False\nfused=True\nfused=False\namsgrad=True\ncapturable=True\nlr=0.1",
    "NET": """
nn.Sequential(nn.Linear(48,96),nn.GELU(),nn.Dropout(0.1),nn.LayerNorm(96),nn.Linear(96,48)).cuda()
nn.Sequential(*[nn.TransformerEncoderLayer(48,4,96,batch_first=True,dropout=0.) for _ in range(2)]).cuda()
nn.Sequential(*[nn.Linear(48,48) for _ in range(5)]).cuda()
nn.Sequential(nn.Linear(48,700),nn.ReLU(),nn.Linear(700,900),nn.SiLU(),nn.Linear(900,48)).cuda()
nn.Sequential(nn.Conv1d(16,32,3,padding=1),nn.BatchNorm1d(32),nn.SiLU(),nn.Conv1d(32,16,1)).cuda()
nn.Sequential(nn.Linear(48,96,bias=False),Again(nn.Linear(96,96)),nn.Linear(96,48)).cuda()
nn.Sequential(nn.Linear(48,50),nn.RMSNorm(50),nn.Linear(50,33),nn.PReLU(),nn.Linear(33,48)).cuda().to(torch.bfloat16).float()
""",
    "DDP": """

,gradient_as_bucket_view=True
,static_graph=True
,bucket_cap_mb=1
,find_unused_parameters=True
,broadcast_buffers=False
,bucket_cap_mb=0.01,gradient_as_bucket_view=True
,mixed_precision=_MixedPrecision(param_dtype=torch.float16,reduce_dtype=torch.float16)
,init_sync=False
,gradient_as_bucket_view=True,static_graph=True
""",
    "HOOK": """
pass
pass
_m.register_comm_hook(None,comm_hooks.fp16_compress_hook)
_m.register_comm_hook(None,comm_hooks.bf16_compress_hook)
_m.register_comm_hook(None,comm_hooks.allreduce_hook)
_m.register_comm_hook(powerSGD_hook.PowerSGDState(None,2,start_powerSGD_iter=2),powerSGD_hook.powerSGD_hook)
""",
    "OPTIM": """
torch.optim.AdamW(_m.parameters())
torch.optim.AdamW(_m.parameters(),fused=True)
torch.optim.SGD(_m.parameters(),0.1,momentum=0.9)
torch.optim.SGD(_m.parameters(),0.1)
torch.optim.Adafactor(_m.parameters())
ZeroRedundancyOptimizer(_m.parameters(),torch.optim.AdamW,lr=0.1)
ZeroRedundancyOptimizer(_m.parameters(),torch.optim.SGD,lr=0.1,momentum=0.9)
ZeroRedundancyOptimizer(_m.parameters(),torch.optim.Adam,parameters_as_bucket_view=True,lr=0.1)
""",
    "SHARDED": """
torch.optim.AdamW(_m.parameters())
torch.optim.AdamW(_m.parameters(),fused=True)
torch.optim.SGD(_m.parameters(),0.1,momentum=0.9)
torch.optim.SGD(_m.parameters(),0.1,foreach=False)
torch.optim.Adam(_m.parameters(),foreach=False,amsgrad=True)
torch.optim.RMSprop(_m.parameters(),centered=True)
torch.optim.Adagrad(_m.parameters())
torch.optim.NAdam(_m.parameters())
torch.optim.AdamW(_m.parameters(),lr=torch.tensor(0.1),capturable=True)
""",
    "COUNT": "1\n2\n3\n4",
    "FEW": "1\n1\n2\n3",
    "SYNC": "contextlib.nullcontext()\n_m.no_sync() if _j else contextlib.nullcontext()\n_m.no_sync()",
    "GRADSYNC": """
pass
pass
_m.set_requires_gradient_sync(_j==0)
_m.set_is_last_backward(_j==0)
_m.set_reshard_after_backward(False)
_m.set_requires_all_reduce(False)
""",
    "AMP": "torch.bfloat16,enabled=False\ntorch.bfloat16\ntorch.float16",
    "BATCH": "2\n7\n16",
    "CLIP": """
pass
pass
_c=nn.utils.clip_grad_norm_(_m.parameters(),1.)
_c=nn.utils.clip_grad_norm_(_m.parameters(),1.,foreach=True)
_c=nn.utils.clip_grad_norm_(_m.parameters(),1.,norm_type=float('inf'))
_c=[a.grad for a in _m.parameters()]
""",
    "CLIPFSDP": "pass\n_c=_m.clip_grad_norm_(1.)\n_c=_m.clip_grad_norm_(1.,norm_type=1.)",
    "FLAG": "True\nFalse",
    "AFTER": """
pass
_d=copy.deepcopy(_m.state_dict())
torch.cuda.empty_cache()
_s=torch.ones(3,device='cuda');dist.all_reduce(_s)
_d=[_o.consolidate_state_dict(0)] if hasattr(_o,'consolidate_state_dict') else _o.state_dict()
with torch.no_grad():_d=_m.eval()(torch.ones(3,16,48,device='cuda'));_m.train()
_l=_l.detach();dist.all_reduce(_l,dist.ReduceOp.AVG)
dist.barrier()
""",
    "AFTERSHARD": """
pass
_d=get_model_state_dict(_m,options=StateDictOptions(full_state_dict=True,cpu_offload=@FLAG))
_d={k:v.full_tensor() for k,v in _m.state_dict().items()}
torch.cuda.empty_cache()
_d=get_optimizer_state_dict(_m,_o,options=StateDictOptions(full_state_dict=True))
with torch.no_grad():_d=_m(torch.ones(3,16,48,device='cuda'))
_m.unshard();_m.reshard()
_d=_m.unshard(async_op=True);_d.wait()
_l=_l.detach();dist.all_reduce(_l,dist.ReduceOp.AVG)
""",
    "POLICY": """

param_dtype=torch.bfloat16
param_dtype=torch.bfloat16,reduce_dtype=torch.float32
param_dtype=torch.float16,output_dtype=torch.float32
reduce_dtype=torch.bfloat16
param_dtype=torch.bfloat16,cast_forward_inputs=False,output_dtype=torch.float32
""",
    "PARTED": "_m\n_m\n[]\nlist(_m)[:2]\n[_m[0]]",
    "MESH": "init_device_mesh('cuda',(dist.get_world_size(),))\ninit_device_mesh('cuda',(2,dist.get_world_size()//2),mesh_dim_names=('r','s'))\nNone",
    "SHARD": """


,reshard_after_forward=False
,reshard_after_forward=2
,reshard_after_forward=True
,shard_placement_fn=lambda p:Shard(p.dim()-1)
,offload_policy=CPUOffloadPolicy()
,offload_policy=CPUOffloadPolicy(pin_memory=False)
""",
    "CALL": """
_m(torch.rand(@BATCH,16,48,device='cuda'))
_m(torch.rand(@BATCH,16,48,device='cuda',requires_grad=True))
checkpoint(_m,torch.rand(@BATCH,16,48,device='cuda'),use_reentrant=False)
checkpoint_sequential(_m,2,torch.rand(@BATCH,16,48,device='cuda'),use_reentrant=False)
""",
    "BIAS": "\n\n,bias=False",
    "PLAN": """
{'0':ColwiseParallel(),'2':RowwiseParallel()}
{'0':ColwiseParallel(input_layouts=Shard(1)),'2':RowwiseParallel(output_layouts=Shard(1)),'3':SequenceParallel()}
{'0':ColwiseParallel(output_layouts=Replicate()),'2':RowwiseParallel(input_layouts=Replicate())}
{'0':ColwiseParallel(input_layouts=Shard(0)),'2':RowwiseParallel(output_layouts=Shard(0))}
{'2':ColwiseParallel(output_layouts=Replicate(),use_local_output=True)}
{'0':RowwiseParallel(input_layouts=Replicate())}
{'0':ColwiseParallel(),'2':RowwiseParallel(output_layouts=Shard(1),use_local_output=False),'3':SequenceParallel(use_local_output=True)}
""",
    "DIMS": "(dist.get_world_size(),)\n(2,dist.get_world_size()//2)",
    "SIZE": "8\n33\n64\n130",
    "PLACE": "[Shard(0)]*_n.ndim\n[Replicate()]*_n.ndim\n[Shard(1)]*_n.ndim\n[Shard(0)]+[Replicate()]*(_n.ndim-1)\n[Replicate()]*(_n.ndim-1)+[Shard(1)]",
    "DTENSOR": """
_d@_e
_d+_e
_d*2
_d.sum(0)
_d.sum()
_d.softmax(-1)
_d.mean(-1)
(_d@_e).sin()
_d.t()
F.layer_norm(_d,_d.shape[-1:])
torch.cat([_d,_e])
torch.where(_d>0,_d,_e)
_d.norm()
_d.view(-1)
_d.sort(-1)[0]
_d.topk(2)[0]
F.gelu(_d)
_d.cumsum(0)
_d.amax(-1)
_d.to(torch.bfloat16)
_d.log_softmax(-1)
_d.index_select(0,distribute_tensor(torch.zeros(3,dtype=torch.long,device='cuda'),_n,[Replicate()]*_n.ndim))
torch.stack([_d,_e])
_d[:4]
_d.var(0)
F.dropout(_d,0.5)
F.embedding(distribute_tensor(torch.zeros(3,4,dtype=torch.long,device='cuda'),_n,[Replicate()]*_n.ndim),_d)
""",
    "DEND": "pass\n_t.sum().backward()\n_c.sum().backward()\n_c.to_local().sum().backward()",
    "EXTRA": "nn.GELU()\nnn.Dropout(0.1)\nnn.LayerNorm(48)\nnn.Linear(48,48)",
    "STAGEARGS": "\n\n,input_args=(torch.rand(2,16,48,device='meta'),),output_args=(torch.rand(2,16,48,device='meta'),)",
    "SCHEDULE": """
ScheduleGPipe(_g,4,loss_fn=F.mse_loss)
Schedule1F1B(_g,4,loss_fn=F.mse_loss)
Schedule1F1B(_g,8,loss_fn=F.mse_loss)
ScheduleGPipe(_g,2,loss_fn=F.mse_loss)
Schedule1F1B(_g,4,loss_fn=F.mse_loss,scale_grads=False)
""",
    "INTERLEAVED": """
ScheduleInterleaved1F1B(_g,4,loss_fn=F.mse_loss)
ScheduleLoopedBFS(_g,4,loss_fn=F.mse_loss)
ScheduleInterleavedZeroBubble(_g,8,loss_fn=F.mse_loss)
ScheduleInterleaved1F1B(_g,8,loss_fn=F.mse_loss)
""",
    "FSDP": """

,use_orig_params=True
,sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
,sharding_strategy=ShardingStrategy.NO_SHARD
,mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
,mixed_precision=MixedPrecision(param_dtype=torch.float16,reduce_dtype=torch.float32,buffer_dtype=torch.float16),use_orig_params=True
,auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
,auto_wrap_policy=ModuleWrapPolicy({nn.Linear,nn.TransformerEncoderLayer}),limit_all_gathers=False
,auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),backward_prefetch=BackwardPrefetch.BACKWARD_POST,forward_prefetch=True
,cpu_offload=CPUOffload(True)
,auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),use_orig_params=True,sync_module_states=True
""",
    "COLLECTIVE": """
dist.all_reduce(_b)
dist.all_reduce(_b,async_op=True).wait()
_c=[torch.empty_like(_b) for _ in range(dist.get_world_size())];dist.all_gather(_c,_b)
_c=torch.empty(dist.get_world_size(),*_b.shape,device='cuda');dist.all_gather_into_tensor(_c,_b)
_c=torch.empty_like(_b);dist.reduce_scatter(_c,[_b.clone() for _ in range(dist.get_world_size())])
_c=torch.empty_like(_b);dist.reduce_scatter_tensor(_c,torch.cat([_b]*dist.get_world_size()))
dist.broadcast(_b,0)
dist.broadcast(_b,1,async_op=True).wait()
_c=torch.empty_like(_b);dist.all_to_all_single(_c,_b) if len(_b)%dist.get_world_size()==0 else None
_c=[torch.empty_like(_b) for _ in range(dist.get_world_size())];dist.all_to_all(_c,[_b*1 for _ in range(dist.get_world_size())])
dist.reduce(_b,0)
_c=[torch.empty_like(_b) for _ in range(dist.get_world_size())] if dist.get_rank()==0 else None;dist.gather(_b,_c,0)
_c=torch.empty_like(_b);dist.scatter(_c,[_b.clone() for _ in range(dist.get_world_size())] if dist.get_rank()==0 else None,0)
dist.barrier()
_c=[None]*dist.get_world_size();dist.all_gather_object(_c,{'a':3})
_c=[{'a':3}];dist.broadcast_object_list(_c,0)
_c=fc.all_reduce(_a,'sum',dist.group.WORLD);_c=_c+1
_c=fc.all_gather_tensor(_a,0,dist.group.WORLD);_c=_c*2
_c=fc.all_gather_tensor(_b,1,dist.group.WORLD);_c=_c*2
_c=fc.reduce_scatter_tensor(torch.cat([_b]*dist.get_world_size()),'avg',0,dist.group.WORLD)*2
_c=dist.nn.all_reduce(_a);_c.sum().backward()
_c=torch.cat(dist.nn.all_gather(_a));_c.sum().backward()
_c=dist.batch_isend_irecv([dist.P2POp(dist.isend,_b,(dist.get_rank()+1)%dist.get_world_size()),dist.P2POp(dist.irecv,torch.empty_like(_b),(dist.get_rank()-1)%dist.get_world_size())]);[w.wait() for w in _c]
dist.send(_b,(dist.get_rank()+1)%dist.get_world_size())
_c=torch.empty_like(_b);dist.recv(_c,(dist.get_rank()-1)%dist.get_world_size())
_g=dist.new_group(list(range(2)));dist.all_reduce(_b,group=_g) if dist.get_rank()<2 else None
with dist._coalescing_manager(device=torch.device('cuda',dist.get_rank())):\\n    dist.all_reduce(_b);dist.all_reduce(_b)
_s=torch.cuda.Stream()\\nwith torch.cuda.stream(_s):\\n    dist.all_reduce(_b)\\ntorch.cuda.current_stream().wait_stream(_s)
_c=_b.sin();_w=dist.all_reduce(_c,async_op=True);del _c;_d=_b.cos();_w.wait();del _w
_c=dist.all_reduce(_b,async_op=True).get_future().then(lambda f:f.value()[0]*2).wait()
""",
}

RANKS_HEADER = """
import contextlib
import torch.distributed as dist
import torch.distributed.nn
import torch.distributed._functional_collectives as fc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel as FSDP,
    MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble, ScheduleLoopedBFS,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint_sequential

class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)
"""
WORLDS = ((2, 0), (2, 1), (4, 1), (4, 3), (8, 5))
"""Ranks that programs are written for: how many, and which of them, on machines of four GPUs."""

CONFS = (
    "expandable_segments:True",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,64:4,256:2,>:1]",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.3,max_split_size_mb:32",
    "expandable_segments:True,garbage_collection_threshold:0.5",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_non_split_rounding_mb:30,max_split_size_mb:30",
    "",
)
"""Settings that programs of the mix ``settings`` begin with."""

MIXES = {"several": SEVERAL, "settings": SETTINGS, "streams": STREAMS}
