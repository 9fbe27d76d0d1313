"""Values on the dry device: what a test that decides by numbers sees, and what that changes."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.dry.conftest import Run
from tests.dry.test_plugin import pytest_in, reported

TESTS = """
import copy, operator, pickle, pytest, sys, threading, torch
from torch import nn

pytestmark = pytest.mark.gpumem

def test_prints_a_loss():
    loss = nn.Linear(4, 4, device="cuda")(torch.ones(2, 4, device="cuda")).sum()
    for _ in range(3):
        print(loss.item())  # line 10
        print(float(loss))

def test_counts_hits():
    hits = 0
    for _ in range(2):
        found = torch.rand(64, 10, device="cuda").argmax(1)
        hits += (found == torch.arange(64, device="cuda")).sum().item()  # line 17
    print(f"{100 * hits / 128:.1f} %", found)

def test_prints_tensors():
    numbers = torch.randn(10, device="cuda")
    print(numbers, numbers.view(2, 5), numbers > 0, numbers.long())
    assert str(numbers) == "tensor(..., device='cuda:0', size=(10,), dtype=torch.float32)"
    assert str(torch.tensor([1.5, 2.0]).cuda()) == "tensor([1.5000, 2.0000], device='cuda:0')"

def test_decides_by_a_mask():
    # 1,000 numbers of which 300 are chosen: their places are 2,400 bytes.
    mask = torch.arange(1000, device="cuda") < 300
    assert not mask.all() and mask.any()
    assert mask.nonzero().shape == (300, 1)
    assert torch.rand(1000, device="cuda")[mask].shape == (300,)

def test_swallows_what_it_is_told():
    try:
        found = torch.ones(3, device="cuda").nonzero()
    except BaseException:
        found = torch.empty(0)
    assert len(found) == 3

def test_sizes():
    numbers = torch.tensor([3, 1, 3, 7], device="cuda")
    numbers += 0  # by a kernel
    assert numbers.unique().tolist() == [1, 3, 7]
    assert torch.unique_consecutive(numbers).tolist() == [3, 1, 3, 7]
    assert numbers.bincount().tolist() == [0, 1, 0, 2, 0, 0, 0, 1]
    assert numbers.masked_select(numbers > 2).tolist() == [3, 3, 7]
    assert torch.arange(4, device="cuda").repeat_interleave(numbers).shape == (14,)
    assert [number.item() for number in numbers] == [3, 1, 3, 7]
    pairs = torch.stack([numbers, numbers])
    assert torch.unique(pairs, dim=1).shape == (2, 3)
    sparse = torch.sparse_coo_tensor(pairs, numbers.float(), (8, 8)).coalesce()
    assert sparse._nnz() == 3
    assert torch.eye(5, device="cuda").to_sparse()._nnz() == 5

def test_magnifies():
    # A decomposition, which is Python's: the dispatcher has no kernel for it.
    picture = torch.ones(1, 8, 8, 8, device="cuda")
    for mode in ("nearest", "bilinear"):
        assert nn.functional.interpolate(picture, scale_factor=2, mode=mode).sum() == 4 * 8 * 64

def test_trains_until_its_loss_is_small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(64, 2, device="cuda")
    loss = torch.tensor(1.0)
    steps = 0
    while loss > 0.05:
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    assert 3 < steps < 200

def test_looks_for_infinities():
    weight = nn.Parameter(torch.randn(300_000, device="cuda"))
    weight.grad = torch.randn_like(weight)
    assert torch.isfinite(weight).all()
    assert not weight.isnan().any()
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    scaler = torch.amp.GradScaler()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[weight]  # the step was not skipped
    assert scaler.get_scale() == 65536.0

def test_storages_that_lie_in_the_memory_of_others():
    # Pickling, and DLPack, make storages of the address of memory that another storage owns.
    data = torch.arange(10).to("cuda")
    found = pickle.loads(pickle.dumps(data))
    assert [torch.stack([found[i]]).item() for i in range(10)] == list(range(10))
    assert [torch.stack([data[i]]).item() for i in range(10)] == list(range(10))
    shared = torch.from_dlpack(data)
    assert torch.equal(shared, data)
    shared += data
    del shared
    others = [torch.full((10,), i, device="cuda") for i in range(10)]
    assert (data == 2 * torch.arange(10, device="cuda")).all()
    assert [other.sum().item() for other in others] == [10 * i for i in range(10)]

def test_gloo_brings_its_results_from_the_host():
    from torch import distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        numbers, found = torch.rand(2, device="cuda") + 1, [torch.empty(2, device="cuda")]
        distributed.all_gather(found, numbers)
        distributed.broadcast(numbers, 0)
        assert found[0].min() >= 1 and numbers.min() >= 1
    finally:
        distributed.destroy_process_group()

def test_is_traced():
    # No error is looked for any more: Python 3.11 would not begin a function then.
    sys.settrace(lambda *_: None)
    try:
        assert len([(lambda: place)() for place in range(3)]) == 3
    finally:
        sys.settrace(None)
    assert not torch.zeros(1, device="cuda").any()

def test_the_only_rank_keeps_its_values():
    from torch import distributed
    from torch.distributed import _functional_collectives as functional
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        data, found = torch.arange(2.0, device="cuda") + 1, torch.empty(3, 2, device="cuda")
        distributed.all_reduce(data)
        distributed.reduce(data, 0)
        distributed.reduce_scatter_tensor(found[0], data)
        distributed.all_to_all_single(found[1], data)
        distributed.scatter(found[2], [data])
        distributed.gather(data, [torch.empty_like(data)])
        assert found.tolist() == [[1, 2]] * 3
        assert functional.all_reduce(data + 1, "sum", distributed.group.WORLD).tolist() == [2, 3]
    finally:
        distributed.destroy_process_group()

@pytest.mark.gpumem(ranks=4, rank=1)
def test_reductions_that_multiply():
    # NCCL makes an operation for the factor; its result is not known.
    from torch import distributed
    from torch._C import _distributed_c10d
    from pytest_gpumem import UnknownValueError
    numbers = torch.ones(2, device="cuda")
    distributed.all_reduce(numbers, _distributed_c10d._make_nccl_premul_sum(0.5))
    with pytest.raises(UnknownValueError):
        numbers.tolist()

@pytest.mark.gpumem(ranks=4, rank=1)
def test_sums_of_what_was_copied():
    from torch import distributed
    count, mean = torch.tensor([5, 6]).cuda(), torch.tensor([2.5]).cuda()
    distributed.all_reduce(count)
    distributed.all_reduce(mean, distributed.ReduceOp.AVG)
    assert count.tolist() == [20, 24]
    assert mean.tolist() == [2.5]

@pytest.mark.gpumem(ranks=4, rank=1)
def test_collectives_of_what_was_computed():
    from torch import distributed
    from torch.distributed._functional_collectives import all_reduce
    numbers = torch.arange(4, device="cuda") + 1
    assert all_reduce(numbers, "sum", distributed.group.WORLD).tolist() == [4, 8, 12, 16]
    exchanged = torch.empty_like(numbers)
    distributed.all_to_all_single(exchanged, numbers)
    assert exchanged.tolist() == [2] * 4
    whole = torch.zeros(8, device="cuda")
    whole[2:4] = 3
    distributed.all_gather_into_tensor(whole, whole[2:4])
    assert whole.tolist() == [3] * 8
    distributed.reduce(numbers, 0)
    assert numbers.tolist() == [1, 2, 3, 4]

def test_kernels_change_what_was_copied():
    numbers = torch.tensor([1, 2, 3], device="cuda")
    numbers.add_(1)
    assert numbers.tolist() == [2, 3, 4]
    assert numbers.cpu().tolist() == numbers.to("cpu").tolist() == [2, 3, 4]
    with torch.inference_mode():
        numbers = torch.tensor([1, 2, 3], device="cuda")
        numbers.mul_(2)
        assert numbers[2].item() == 6

def test_a_kernel_writes_where_its_operator_copied():
    zeros = torch.zeros(4, dtype=torch.long, device="cuda")
    assert zeros.scatter(0, torch.tensor([2], device="cuda"), 5).tolist() == [0, 0, 5, 0]

def test_multiplies_groups_of_unknown_length():
    experts = torch.rand(128, 4, device="cuda").argmax(1).sort()[0]
    ends = torch.histc(experts.int(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
    tokens = torch.randn(128, 64, device="cuda")
    weights = torch.randn(4, 64, 256, device="cuda")
    if hasattr(nn.functional, "grouped_mm"):
        assert nn.functional.grouped_mm(tokens, weights, offs=ends).shape == (128, 256)

def test_updates_by_sparse_gradients():
    diagonal = torch.eye(3).to_sparse().cuda()
    weight = torch.arange(9.0).reshape(3, 3).cuda()
    weight.add_(diagonal, alpha=-2)
    assert weight.tolist() == [[-2, 1, 2], [3, 2, 5], [6, 7, 6]]
    assert weight.sparse_mask(diagonal)._values().tolist() == [-2, 2, 6]
    assert (-diagonal).to_dense().tolist() == [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]
    assert weight.to_sparse()._nnz() == 9
    taken = torch.empty(3, 3, device="cuda")
    torch.add(weight, diagonal, out=taken)
    diagonal.to_sparse_csr()

def test_compressed_matrices():
    # What they hold is counted inside the operators that make them.
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0]])
    there = dense.cuda()
    for made in (there.to_sparse_csr(), there.to_sparse_csc(), there.to_sparse().to_sparse_csr()):
        assert made.values().numel() == 3
        assert torch.equal((made * 2).to_dense().cpu(), dense * 2)
        assert torch.equal(there.sparse_mask(made).to_dense().cpu(), dense)
    assert (there.to_sparse_csr() @ torch.ones(4, device="cuda")).tolist() == [3, 3]

def test_gradients_of_tables():
    table = nn.Embedding(10, 4, sparse=True).cuda()
    table(torch.tensor([3, 1, 3]).cuda()).pow(2).sum().backward()
    assert table.weight.grad.coalesce()._nnz() == 2

def test_gradients_of_bags():
    bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    there = copy.deepcopy(bags).cuda()
    places, offsets = torch.tensor([3, 1, 3, 2]), torch.tensor([0, 2])
    for table, given in (bags, (places, offsets)), (there, (places.cuda(), offsets.cuda())):
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(2):
            table(*given).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(there.weight.cpu(), bags.weight)
    # What is no padding is counted inside the operator.
    padded = nn.EmbeddingBag(10, 4, mode="mean", sparse=True, padding_idx=3).cuda()
    padded(places.cuda(), offsets.cuda()).sum().backward()
    assert padded.weight.grad._indices().tolist() == [[1, 2]]

def test_encodes_sequences_of_several_lengths():
    # Encoders pack them into a nested tensor, once an operator has seen that the padding is right.
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    there = copy.deepcopy(encoder).cuda()
    sequences, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [2]])
    with torch.no_grad():
        encoded = encoder(sequences, src_key_padding_mask=padding)
        found = there(sequences.cuda(), src_key_padding_mask=padding.cuda())
    assert found[1, 2:].eq(0).all()
    assert torch.allclose(found.cpu(), encoded, atol=1e-5)

def test_nested_tensors():
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    linear = nn.Linear(4, 2)
    there = copy.deepcopy(linear).cuda()
    for nested in (
        torch.nested.nested_tensor(parts, device="cuda"),
        torch.nested.nested_tensor([part.cuda() for part in parts]),
        torch.nested.nested_tensor(parts).cuda(),
    ):
        assert torch.equal((nested * 2)[1].cpu(), parts[1] * 2)
        linear.zero_grad()
        there.zero_grad()
        linear(torch.cat(parts)).sum().backward()
        torch.nested.to_padded_tensor(there(nested), 0.0).sum().backward()
        assert torch.allclose(there.weight.grad.cpu(), linear.weight.grad)

def test_products_of_nested_tensors():
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    there = torch.nested.nested_tensor(parts).cuda()
    scores = torch.bmm(there, there.transpose(1, 2))
    assert torch.allclose(scores[1].cpu(), parts[1] @ parts[1].T, atol=1e-5)

def test_counts_into_given_tensors():
    numbers = torch.arange(8, device="cuda")
    for found in (
        torch.masked_select(numbers, numbers > 2, out=torch.empty(0, dtype=torch.int64).cuda()),
        torch.nonzero(numbers > 2, out=torch.empty(0, dtype=torch.int64).cuda()),
    ):
        assert found.flatten().tolist() == [3, 4, 5, 6, 7]
    numbers[numbers > 5] = 0
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]

def test_results_are_written_to_tensors_that_grow():
    numbers = torch.arange(3.0, device="cuda")
    found, places = torch.zeros(0, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    torch.max(numbers.view(1, 3), 1, out=(found, places))
    assert (found.item(), places.item()) == (2, 2)
    assert torch.div(numbers, 4, out=torch.zeros(0, device="cuda")).tolist() == [0, 0.25, 0.5]
    # Its columns are contiguous, and CUDA fills it with zeros first.
    inverse = torch.linalg.inv(2 * torch.eye(2, device="cuda"), out=torch.empty(0, device="cuda"))
    assert inverse.tolist() == [[0.5, 0], [0, 0.5]]

def test_computes_with_sparse_tensors_that_were_copied():
    place, numbers = torch.tensor([[1, 0, 0]]).cuda(), torch.tensor([1.0, 2.0, 4.0]).cuda()
    sparse = torch.sparse_coo_tensor(place, numbers, (2,))
    assert (sparse / 2).to_dense().tolist() == [3, 0.5]
    assert (sparse * 2 + sparse).sum() == 21

def test_fails_after_an_assumption():
    weight = torch.rand(4, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler(init_scale=2.0**16)
    scaler.scale((weight * (torch.rand(4, device="cuda") + 1) * 1e38).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15

def test_quantized_tensors_are_not_followed():
    numbers = torch.tensor([0.5, 1.0])
    for quantized in (
        torch.quantize_per_tensor(numbers.cuda(), 0.5, 0, torch.qint8),
        torch.quantize_per_tensor(numbers, 0.5, 0, torch.qint8).cuda(),
    ):
        assert quantized.clone().dequantize().shape == (2,)
    assert numbers.cuda().sum() == 1.5

def test_asks_whether_memory_is_pinned():
    numbers = torch.ones(3, device="cuda")
    assert not numbers.is_pinned()
    assert numbers.cpu().pin_memory().is_pinned()
    assert numbers.sum() == 3

def test_seeds_the_dropout_of_layers():
    output, _ = nn.LSTM(4, 4, 2, dropout=0.5).cuda()(torch.ones(3, 2, 4, device="cuda"))
    output.sum().backward()

def test_custom_operators():
    # Defined again by the second run.
    @torch.library.custom_op("of_values::twice", mutates_args=())
    def twice(numbers: torch.Tensor) -> torch.Tensor:
        return numbers * 2
    twice.register_autograd(lambda context, grad: grad * 2)
    numbers = torch.arange(4.0, device="cuda").requires_grad_()
    product = twice(numbers)
    product.sum().backward()
    assert product.tolist() == [0, 2, 4, 6]
    assert numbers.grad.tolist() == [2, 2, 2, 2]

def test_prints_an_empty_tensor():
    for _ in range(20):
        empty = torch.empty(0, device="cuda")
        print(empty)
        del empty  # another storage gets its address
        numbers = torch.arange(3, device="cuda")
        assert (numbers + 1).tolist() == [1, 2, 3]

def test_samples_by_cudnn():
    image, grid = torch.randn(1, 2, 4, 5), torch.rand(1, 3, 3, 2) * 2 - 1
    there = image.cuda().requires_grad_()
    image.requires_grad_()
    expected = nn.functional.grid_sample(image, grid, align_corners=True)
    found = nn.functional.grid_sample(there, grid.cuda(), align_corners=True)
    expected.sum().backward()
    found.sum().backward()
    assert torch.allclose(found.cpu(), expected)
    assert torch.allclose(there.grad.cpu(), image.grad)

def of_a_library(name, kernel):
    # An operator with kernels in C++, as far as torch's record of those in Python says.
    library = torch.library.Library(name, "DEF")
    library.define("above_half(Tensor numbers) -> Tensor")
    library.impl("above_half", kernel, "CUDA")
    library.impl("above_half", lambda numbers: numbers[numbers > 0.5], "CPU")
    torch.library._impls.discard(f"{name}/above_half/CUDA")
    return library

def fills_a_mask(numbers):
    mask = torch.zeros_like(numbers, dtype=torch.bool)  # nothing that torch sees writes to it
    return numbers.masked_select(mask)

def makes_another_error(numbers):
    try:
        return numbers.masked_select(numbers > 0.5)
    except BaseException:
        raise RuntimeError("masked_select failed")

libraries = of_a_library("of_masks", fills_a_mask), of_a_library("of_errors", makes_another_error)

def test_a_librarys_kernel_writes_to_a_mask():
    found = torch.ops.of_masks.above_half(torch.tensor([0.25, 0.75, 1.0]).cuda())
    assert found.tolist() == [0.75, 1.0]

def test_a_librarys_kernel_makes_another_error_of_a_refusal():
    numbers = torch.rand(5000, device="cuda")
    assert len(torch.ops.of_errors.above_half(numbers)) == (numbers > 0.5).sum()

def test_higher_order_operators():
    numbers = torch.ones(4, device="cuda")
    assert numbers.sum() == 4
    found = torch.cond(numbers.sum() > 3, lambda x: x + 1, lambda x: x - 1, (numbers,))
    assert found.tolist() == [2] * 4
    run_and_save_rng_state = torch._prims.rng_prims.run_and_save_rng_state
    state, drawn = run_and_save_rng_state(torch.ops.aten.rand_like.default, numbers)
    assert 0 <= drawn.min() < 1

def test_decides_inside_an_operator():
    # Whether a matrix is finite, by norms how often to square it, and what a sparse one adds up.
    diagonal = torch.diag(torch.tensor([1.0, 2, 3])).cuda()
    assert torch.linalg.eig(diagonal)[0].real.sort()[0].tolist() == [1, 2, 3]
    assert torch.linalg.eigvals(diagonal).real.sum() == 6
    numbers = torch.randn(3, 4, 4)
    found = torch.linalg.matrix_exp(numbers.cuda())
    assert torch.allclose(found.cpu(), torch.linalg.matrix_exp(numbers))
    # Of one matrix, a kernel that is no operator adds up.
    found = torch.linalg.matrix_exp(torch.eye(3).cuda())
    assert torch.allclose(found.cpu(), torch.linalg.matrix_exp(torch.eye(3)))
    places = torch.tensor([[0, 0, 1], [1, 1, 0]]).cuda()
    twice = torch.sparse_coo_tensor(places, torch.ones(3).cuda(), (2, 2))
    rows = torch.ones(2, 3, device="cuda", requires_grad=True)
    torch.sparse.mm(twice, rows).sum().backward()
    assert rows.grad.tolist() == [[1] * 3, [2] * 3]

def test_decides_by_what_algorithms_return():
    # Thrust's of long rows, cusolver's errors, and how many elements of two tensors differ.
    for kind in (torch.float16, torch.float32, torch.int64, torch.bool):
        rows = (torch.arange(15000) % 5000 % 7 < 3).to(kind).reshape(3, 5000)
        for found, expected in zip(rows.cuda().mode(), rows.mode()):
            assert torch.equal(found.cpu(), expected)
    numbers = torch.arange(500).cuda()
    assert torch.isin(numbers, numbers[:90] * 2).sum() == 90
    # Numbers that a copy has brought, and one that torch itself makes a tensor of the device.
    assert torch.isin(torch.tensor([7], device="cuda"), torch.tensor(7, device="cuda")).any()
    assert torch.isin(7, numbers) and not torch.isin(7.5, numbers[:2])
    sums = torch.segment_reduce(torch.ones(6).cuda(), "sum", lengths=torch.tensor([2, 4]).cuda())
    assert sums.tolist() == [2, 4]
    mask = torch.tensor([True, False, True]).cuda()
    source = torch.ones(2).cuda().requires_grad_()
    torch.zeros(3).cuda().masked_scatter(mask, source).sum().backward()
    assert source.grad.tolist() == [1, 1]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradient = torch.ones(1000).cuda()
    torch.ops.aten.masked_scatter_backward(gradient, gradient > 0, [1000])
    # The gradient, 4,096 bytes, the mask, 1,024, and the places of all its elements, 8,192.
    assert torch.cuda.max_memory_allocated() - before > 4_096 + 1_024 + 8_192
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows = torch.ones(20, 20).cuda().to_sparse(1)
    assert rows._indices().tolist() == [list(range(20))]
    # The dense one, 2,048 bytes, and the places of 400 numbers in two dimensions.
    assert torch.cuda.max_memory_allocated() - before > 2_048 + 6_400
    mean, deviation = torch.zeros(3).cuda(), torch.ones(3).cuda()
    assert torch.normal(mean, deviation).shape == torch.normal(mean, 1.0).shape
    diagonal = torch.diag(torch.tensor([1.0, 2, 3], dtype=torch.complex64)).cuda()
    assert torch.linalg.eigvals(diagonal).real.sum() == 6
    assert torch.linalg.eig(diagonal)[0].real.sum() == 6
    for kind in (torch.complex64, torch.float32):
        nothing = torch.ones(0, 0, dtype=kind).cuda()
        assert not len(torch.linalg.eigvals(nothing)) and not len(torch.linalg.eig(nothing)[0])

def test_draws():
    torch.manual_seed(3)
    expected = torch.randn(5)
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    drawn = torch.randn(5, device="cuda")
    assert torch.equal(drawn.cpu(), expected)
    again = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), drawn)
    assert torch.equal(torch.rand(3, device="cuda"), again)
    assert torch.multinomial(again, 2).max() < 3

def test_numbers_on_the_host():
    lengths = torch.arange(3, device="cuda") + 1
    assert lengths.cpu().tolist() == [1, 2, 3]
    noise = torch.randn(4, device="cuda").cpu()
    assert float(noise.abs().sum()) > 0.0
    assert (noise.numpy() == noise.clone().numpy()).all()

def test_replays_a_graph():
    given = torch.full((3,), 1.0, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = given * 2  # its memory is used again, by the last sum
        kept = result + 1
        del result
        given += kept
        drawn = torch.rand(3, device="cuda")
        leaky = nn.functional.rrelu(drawn, training=True)
    assert given.tolist() == [1.0] * 3
    graph.replay()
    assert (kept.tolist(), given.tolist()) == ([3.0] * 3, [4.0] * 3)
    given.fill_(10)
    torch.cuda.manual_seed(3)
    graph.replay()
    assert (kept.tolist(), given.tolist()) == ([21.0] * 3, [31.0] * 3)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert torch.equal(leaky, drawn)  # positive numbers stay

def test_history_has_the_lines_of_the_program():
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        kept = torch.randn(1000, 1000, device="cuda").add(1)
        (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert kept.sum() != 0.5  # so values are followed
    frames = [event["frames"] for event in trace if event["action"] == "alloc"]
    assert all(stack[0]["filename"].endswith("test_values.py") for stack in frames[:2])

def test_adds_in_threads():
    found = {}

    def add(number):
        found[number] = torch.ones(3, device="cuda") * number

    threads = [threading.Thread(target=add, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found[2] + found[3]).tolist() == [5.0] * 3

def test_layers_in_half_precision():
    x = torch.randn(3, 4, 5, device="cuda")
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        layer = kind(5, 6, num_layers=2).cuda()
        with torch.autocast("cuda"):  # it gives cuDNN weights that are columns of one buffer
            result, _ = layer(x)
        assert torch.equal(result, layer.half()(x.half())[0])
    probabilities = x.half().softmax(2, dtype=torch.float32)
    assert torch.equal(probabilities, x.half().float().softmax(2))

def test_gradients_of_recurrent_layers():
    # Those of all weights are views of one buffer.
    layer = nn.GRU(5, 3)
    there = copy.deepcopy(layer).cuda()
    numbers = torch.randn(4, 2, 5)
    layer(numbers)[0].sum().backward()
    there(numbers.cuda())[0].sum().backward()
    for one, other in zip(there.parameters(), layer.parameters()):
        assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-5)

def test_cells():
    cell = nn.GRUCell(5, 6).cuda()
    reference = copy.deepcopy(cell).cpu()
    x = torch.randn(4, 5, device="cuda")
    for each, given in [(cell, x), (reference, x.cpu())]:
        each(given).square().sum().backward()
    for one, other in zip(cell.parameters(), reference.parameters()):
        torch.testing.assert_close(one.grad.cpu(), other.grad)

def test_a_graph_draws_from_the_states_that_it_was_captured_with():
    generator = torch.cuda.default_generators[0]
    generator.manual_seed(0)
    first, second = generator.graphsafe_get_state(), generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    for state in (first, second):
        graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        generator.graphsafe_set_state(second)
        drawn = [torch.rand(3, device="cuda")]
        generator.graphsafe_set_state(first)
        drawn += [torch.rand(3, device="cuda") for _ in range(2)]
    graph.replay()
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])

def test_compiles_what_draws_and_reads():
    torch._dynamo.config.capture_scalar_outputs = True

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        return torch.rand(4, device="cuda") + x.item()

    result = compiled(torch.tensor(3, device="cuda"))
    assert (result >= 3).all() and (result <= 4).all()

def test_folds_constants():
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.fx.experimental.proxy_tensor import make_fx

    def scaled(x):
        return x * -torch.full((4,), 0.5, device="cuda")

    graph = make_fx(scaled, tracing_mode="fake")(torch.empty(4, device="cuda"))
    folder = UniformValueConstantFolder(graph)
    folder.run()
    assert -0.5 in folder.node_replacements.values()

def test_reads_between_compiled_parts():
    @torch.compile(backend="aot_eager")
    def compiled(x):
        x = x * 20
        torch._dynamo.graph_break()
        start = torch.tensor(4, device="cuda")
        return x[start:]

    assert (compiled(torch.ones(20, 20, device="cuda")) == 20).all()

@pytest.mark.parametrize("decides", [False, True], ids=["at_once", "followed"])
@pytest.mark.parametrize("name", ["exp", "to"])
def test_without_memory(name, decides):
    size = torch.cuda.mem_get_info()[0] // 10 >> 20 << 20
    before = torch.cuda.memory_allocated()
    given = [torch.float64] if name == "to" else []

    def run():
        whole = torch.empty(8 * size, dtype=torch.uint8, device="cuda")
        operator.methodcaller(name, *given)(whole[:size] + 1)

    if decides:
        assert (torch.ones(3, device="cuda") * 2).sum() > 2
    try:
        run()
    except torch.OutOfMemoryError:  # whose frames keep what Python has named, and nothing else
        assert torch.cuda.memory_allocated() == before + 8 * size
    else:
        pytest.fail("there was room")

TO = torch.Tensor.to

def test_says_where_libraries_work():
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    output = layer(torch.randn(4, 64, 64, 64, device="cuda", requires_grad=True))
    if (torch.ones(3, device="cuda") * 2).sum() > 2:
        output = output * 2
    output.sum().backward()  # where libraries work

def test_subclasses_are_asked():
    asked = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    class Plain(torch.Tensor):
        pass

    numbers = torch.ones(3).cuda()
    numbers.as_subclass(Own).to(torch.bfloat16).cpu()
    assert asked == [TO]
    assert type(numbers.as_subclass(Plain).to(torch.bfloat16)) is Plain
    assert numbers.as_subclass(Plain).tolist() == [1.0, 1.0, 1.0]
"""

UNMARKED = """
import pytest, torch

def test_first():
    assert len(torch.ones(3, device="cuda").nonzero())

def test_second():
    assert len(torch.ones(3, device="cuda").nonzero())

@pytest.mark.gpumem
def test_measured():
    weight = torch.ones(3).cuda()
    weight += 1  # unknown to the GPU of the whole run, and known where the test runs again
    assert weight.cpu().tolist() == [2, 2, 2]
"""


@pytest.fixture(scope="module")
def project(dry_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests above."""
    folder = tmp_path_factory.mktemp("values")
    (folder / "test_values.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def tests(project: Path) -> Any:
    """What became of them, by name."""
    output, _, tests = reported(project)
    assert "FAILED" not in output, output
    return tests


AGAIN = "run again with real values on the CPU"


def notes(test: Any) -> str:
    return " ".join(test["measurement"]["notes"])


@pytest.mark.parametrize(
    ("name", "computes_all"),
    [
        ("test_prints_a_loss", False),
        ("test_prints_an_empty_tensor", False),
        ("test_subclasses_are_asked", False),
        ("test_without_memory[exp-at_once]", False),
        ("test_without_memory[to-at_once]", False),
        ("test_without_memory[exp-followed]", False),
        ("test_without_memory[to-followed]", False),
        ("test_decides_by_a_mask", False),
        ("test_swallows_what_it_is_told", False),
        ("test_sizes", False),
        ("test_trains_until_its_loss_is_small", True),
        ("test_looks_for_infinities", False),
        ("test_storages_that_lie_in_the_memory_of_others", False),
        ("test_gloo_brings_its_results_from_the_host", True),
        ("test_the_only_rank_keeps_its_values", False),
        ("test_sums_of_what_was_copied", False),
        ("test_collectives_of_what_was_computed", False),
        ("test_kernels_change_what_was_copied", False),
        ("test_a_kernel_writes_where_its_operator_copied", False),
        ("test_multiplies_groups_of_unknown_length", False),
        ("test_updates_by_sparse_gradients", False),
        ("test_compressed_matrices", False),
        ("test_gradients_of_tables", False),
        ("test_gradients_of_bags", False),
        ("test_encodes_sequences_of_several_lengths", False),
        ("test_nested_tensors", False),
        ("test_products_of_nested_tensors", False),
        ("test_counts_into_given_tensors", False),
        ("test_quantized_tensors_are_not_followed", False),
        ("test_asks_whether_memory_is_pinned", False),
        ("test_seeds_the_dropout_of_layers", False),
        ("test_custom_operators", False),
        ("test_a_librarys_kernel_writes_to_a_mask", False),
        ("test_a_librarys_kernel_makes_another_error_of_a_refusal", True),
        ("test_samples_by_cudnn", False),
        ("test_higher_order_operators", True),
        ("test_decides_inside_an_operator", False),
        ("test_decides_by_what_algorithms_return", False),
        ("test_draws", True),
        ("test_numbers_on_the_host", True),
        ("test_replays_a_graph", True),
        ("test_history_has_the_lines_of_the_program", True),
        ("test_adds_in_threads", False),
        ("test_layers_in_half_precision", True),
        ("test_gradients_of_recurrent_layers", True),
        ("test_cells", True),
        ("test_a_graph_draws_from_the_states_that_it_was_captured_with", True),
        ("test_compiles_what_draws_and_reads", True),
        ("test_reads_between_compiled_parts", False),
    ],
)
def test_all_values_are_computed_where_small_ones_do_not_do(
    tests: Any, name: str, computes_all: bool
) -> None:
    assert tests[name]["outcome"] == "passed"
    assert (AGAIN in notes(tests[name])) is computes_all


def test_a_number_that_is_printed_reads_as_zero_with_one_note(tests: Any) -> None:
    (note,) = tests["test_prints_a_loss"]["measurement"]["notes"]

    assert note.startswith("item() at test_values.py:10 read a number that no copy has brought")


def test_a_constant_that_a_compiler_folds_is_known(tests: Any) -> None:
    assert tests["test_folds_constants"]["outcome"] == "passed"
    assert not notes(tests["test_folds_constants"])


def test_notes_of_a_thread_of_autograd_name_the_line_that_waits_for_it(tests: Any) -> None:
    line = 1 + TESTS.splitlines().index("    output.sum().backward()  # where libraries work")

    assert f"(backward for the weight) at test_values.py:{line}" in notes(
        tests["test_says_where_libraries_work"]
    )


def test_integers_are_counted_and_printed_in_one_run(tests: Any) -> None:
    (note,) = tests["test_counts_hits"]["measurement"]["notes"]

    assert note.startswith("item() at test_values.py:17 read a number that no copy has brought")


def test_a_printed_tensor_is_formatted_on_its_device(tests: Any) -> None:
    """Nine blocks: the three tensors, and six that _Formatter of torch/_tensor_str.py makes.

    These are the numbers that are not zero, their amounts, the least and the largest of these, the
    ratio, and whether that is above 1,000.
    """
    test = tests["test_prints_tensors"]

    assert (test["outcome"], test["measurement"]["notes"]) == ("passed", [])
    assert test["measurement"]["peak_allocated"] == 9 * 512


def test_groups_of_unknown_length_are_not_empty(tests: Any) -> None:
    # tokens, weights and products, 32,768 + 262,144 + 131,072 bytes, and cuBLAS's workspace.
    measured = tests["test_multiplies_groups_of_unknown_length"]["measurement"]

    if [int(part) for part in version("torch").split(".")[:2]] < [2, 10]:
        pytest.skip("grouped_mm came with torch 2.10")
    assert measured["peak_allocated"] > 425_984 + 8_519_680


def test_peaks_are_those_of_the_values(tests: Any) -> None:
    # The mask, 1,024 bytes; for nonzero() how many there are, 512, cub's temporaries, and places.
    measured = tests["test_decides_by_a_mask"]["measurement"]

    assert measured["peak_allocated"] > 2_560 + 1_024


def test_values_that_must_not_be_computed_are_named(project: Path) -> None:
    never = pytest_in(project, "--gpumem-sim-values=never", "-rs", "-k", "trains or sizes")
    short = pytest_in(project, "--gpumem-sim-values-limit=0.001", "-rs", "-k", "trains")

    assert "1 passed, 1 skipped" in never.stdout
    assert "bool() at test_values.py:68 depends on a value of a CUDA tensor" in never.stdout
    assert "0.001 s that --gpumem-sim-values-limit" in " ".join(short.stdout.split())


def test_every_unmarked_test_that_decides_is_skipped(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_unmarked.py").write_text(UNMARKED)

    done = pytest_in(tmp_path, "--gpumem-sim-scope=session", "-rs")

    assert "1 passed, 2 skipped" in done.stdout
    assert done.stdout.count("depends on a value of a CUDA tensor") >= 2


EVENTS = """
import gc
from torch import nn
from torch.utils.checkpoint import checkpoint
from pytest_gpumem.dry.values.follower import Follower

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.taken = nn.LayerNorm(64), nn.Linear(64, 192)
        middle = nn.GELU(), nn.SiLU(), nn.Mish(), nn.Dropout()
        self.given = nn.Sequential(nn.Linear(64, 256), *middle, nn.Linear(256, 64))
    def forward(self, x):
        parts = self.taken(self.norm(x)).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.1)
        return x + self.given(seen.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self, saved):
        super().__init__()
        self.embedding, self.saved = nn.Embedding(100, 64), saved
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saved else block(x)
        return x @ self.embedding.weight.T  # its gradient is accumulated in place

def steps(saved, autocast):
    model = Model(saved).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.randint(100, (2, 16), device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                logits = model(tokens).flatten(0, 1)
            nn.functional.cross_entropy(logits.float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

def events(follower, *given):
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None)
    gc.disable()
    if follower is None:
        steps(*given)
    else:
        follower.begin()
        with follower.active():
            steps(*given)
    gc.enable()
    (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    found = [(event["action"], event["size"]) for event in trace]
    # Autocast clears its cache in an order that addresses of the host's decide.
    return sorted(found) if given[1] else found

for given in [(False, False), (True, False), (False, True), (True, True)]:
    events(None, *given)
    plain = events(None, *given)
    for everything in (False, True):
        follower = Follower(follows=True, everything=everything)
        events(follower, *given)
        found[f"{given} {everything}"] = len(plain), plain == events(follower, *given)
"""


def test_following_values_changes_no_event(dry_run: Run) -> None:
    found = dry_run(EVENTS)

    assert len(found) == 8
    assert all(count > 500 and same for count, same in found.values()), found


KERNELS = """
import pytest, torch

@torch.compile
def scaled(x, factor):
    return x * factor + 1

@torch.compile
def raised(x):
    x.add_(1)
    return x.sin()

@pytest.mark.gpumem
def test_reads():
    count = torch.tensor([3], device="cuda")
    scaled(torch.ones(8, device="cuda"), count)
    assert torch.empty(int(count), device="cuda").numel() == 3

@pytest.mark.gpumem
def test_writes():
    count = torch.tensor([3], device="cuda")
    raised(count)
    torch.empty(int(count), device="cuda")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="torch.compile needs Triton for a GPU")
def test_a_compiled_kernel_changes_what_it_writes_to_alone(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(KERNELS)
    done = pytest_in(tmp_path, "-rs")

    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "int() at test_kernels.py:" in done.stdout
    assert "the Triton kernel triton_" in done.stdout
