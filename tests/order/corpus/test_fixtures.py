import pytest
import torch

pytestmark = pytest.mark.gpumem


def test_of_the_session(vocabulary):
    vocabulary(torch.arange(64, device="cuda"))


def test_of_the_package(table):
    table.sum()


def test_of_the_module(encoder):
    encoder(torch.randn(2, 16, 64, device="cuda")).sum().backward()


def test_of_the_module_in_inference(encoder):
    with torch.inference_mode():
        encoder.eval()(torch.randn(2, 16, 64, device="cuda"))
    encoder.train()


class TestOfTheClass:
    def test_step(self, trained):
        model, optimizer = trained
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()

    def test_inference(self, trained):
        trained[0](torch.randn(8, 64, device="cuda"))


def test_of_the_test(widened):
    widened @ widened.T


def test_all(vocabulary, table, encoder, batch):
    encoder(vocabulary(torch.arange(64, device="cuda")).view(1, 64, 64)) + batch.sum()


def test_asked_for_in_the_body(request):
    torch.zeros(1000, device="cuda")
    request.getfixturevalue("table").sum()


def test_named_phases(gpumem, batch):
    with gpumem.phase("first"):
        x = batch @ batch.T
    with gpumem.phase("second"):
        x.softmax(-1)


@pytest.mark.gpumem(warmup=1, repeat=2)
def test_repeated(batch):
    batch.clone()
