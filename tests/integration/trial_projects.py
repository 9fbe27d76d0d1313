"""Two typical repositories, of 40 and of 300 tests, for the terminal output of a run.

Their numbers are those of any release: no library's workspace is among them. With ``REGRESSION``
set, one line of ``net.py`` keeps more than it did.
"""

from __future__ import annotations

from tests.pytest_project import Project

NET = """
    import os

    from torch import nn

    REGRESSION = bool(os.environ.get("REGRESSION"))


    class Scale(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))
            self.register_buffer("table", torch.zeros(64, width))

        def forward(self, x):
            x = x * self.weight + self.table
            if REGRESSION:
                x = x * torch.sigmoid(x)
            return torch.relu(x)


    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.layers = nn.Sequential(*(Scale(width) for _ in range(depth)))

        def forward(self, x):
            return self.layers(x)
"""

STEP = """
    def step(width, depth):
        model = Net(width, depth).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = model(torch.randn(64, width, device="cuda")).mean()
        loss.backward()
        optimizer.step()
"""

SMALL = {
    "net": NET,
    "test_training": f"""
    from net import Net
    {STEP}
    @pytest.mark.gpumem(baseline=True, max_leak=0)
    @pytest.mark.parametrize("depth", [1, 2, 3, 4])
    @pytest.mark.parametrize("width", [512, 1024, 2048, 4096, 8192])
    def test_step(width, depth):
        step(width, depth)


    @pytest.mark.gpumem(max="300KB")
    def test_small_step():
        step(256, 1)
    """,
    "test_inference": """
    from net import Net

    KEPT = []


    @pytest.mark.gpumem(phases={"forward": "4MiB"})
    @pytest.mark.parametrize("width", [64, 128, 256, 512, 1024, 2048])
    def test_forward(width):
        model = Net(width, 2).cuda()
        with torch.inference_mode():
            model(torch.randn(64, width, device="cuda"))


    @pytest.mark.gpumem
    def test_cache():
        KEPT.append(torch.zeros(1 << 20, device="cuda"))


    @pytest.mark.gpumem
    @pytest.mark.xfail(reason="not tiled yet")
    def test_tiled():
        raise NotImplementedError


    def test_reads_numbers(gpumem):
        with gpumem.phase("load"):
            torch.zeros(1 << 18, device="cuda")
        assert gpumem.phases["load"].peak_allocated == 1 << 20
    """,
    "test_data": """
    @pytest.mark.parametrize("n", range(10))
    def test_batches(n):
        assert torch.ones(n).sum() == n
    """,
}
"""Thirty measured tests and ten others."""

LARGE = {
    "net": NET,
    "test_encoder": """
    from net import Scale


    @pytest.mark.gpumem
    @pytest.mark.parametrize("batch", [64, 128, 192, 256])
    @pytest.mark.parametrize("width", [256 * n for n in range(1, 20)])
    def test_forward(width, batch):
        model = Scale(width).cuda()
        model(torch.randn(batch // 64, 64, width, device="cuda"))
    """,
    "test_decoder": """
    @pytest.mark.gpumem
    @pytest.mark.parametrize("n", range(1, 101))
    def test_cache(n):
        torch.zeros(n, 4096, device="cuda")
    """,
    "test_limits": """
    @pytest.mark.gpumem("1MB", max_leak=0)
    @pytest.mark.parametrize("n", range(1, 65))
    def test_limited(n):
        torch.zeros(n, 2048, device="cuda")
    """,
    "test_data": """
    @pytest.mark.parametrize("n", range(60))
    def test_batches(n):
        assert torch.ones(n).sum() == n
    """,
}
"""A project of 300 tests, of which 76 use ``net.py``."""


def write(project: Project, files: dict[str, str]) -> None:
    """Write one of the repositories, its tests in a folder ``tests``."""
    project.write_ini("gpumem_device = sim:T4\npythonpath = .\ntestpaths = tests")
    for name, source in files.items():
        project.write_in("tests" if name.startswith("test_") else ".", name, source)
