import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpumem


def test_side_stream():
    side = torch.cuda.Stream()
    x = torch.randn(1 << 18, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2
        y.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    del y
    torch.zeros(1 << 18, device="cuda")


def test_two_streams_train():
    model = nn.Linear(64, 64).cuda()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(torch.randn(32, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def test_graph():
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(32, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x).relu()
    for _ in range(3):
        graph.replay()
    assert y.shape == (32, 64)


def test_graph_with_dropout():
    x = torch.randn(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nn.functional.dropout(x, 0.5)
    graph.replay()
    assert y.shape == x.shape


def test_graphed_callable():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(8, 64, device="cuda"),))
    graphed(torch.randn(8, 64, device="cuda")).sum().backward()


def test_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(1 << 20, device="cuda")
    torch.zeros(1 << 20, device="cuda")
    del kept


def test_events():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    end.record()
    end.synchronize()
    start.elapsed_time(end)


@pytest.mark.gpumem(gpu="A100-40GB*2")
def test_two_gpus():
    first, second = nn.Linear(64, 64).cuda(0), nn.Linear(64, 64).cuda(1)
    x = torch.randn(16, 64, device="cuda:0")
    second(first(x).to("cuda:1")).sum().backward()


@pytest.mark.gpumem(gpu=["T4", "H100"])
def test_models_of_gpu():
    nn.Linear(1024, 1024).cuda().half()(torch.randn(8, 1024, device="cuda").half())


def test_snapshot_of_history():
    torch.cuda.memory._record_memory_history()
    try:
        x = torch.zeros(1000, device="cuda")
        assert torch.cuda.memory._snapshot()["segments"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    del x
