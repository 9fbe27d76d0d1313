"""Networks of many shapes: pictures, sequences, graphs, sets, fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from strangers import MIXED, Program, listed

Loss = Callable[[nn.Module], torch.Tensor]


def fitted(model: nn.Module, loss: Loss, kind: type[torch.optim.Optimizer] | None = None) -> None:
    """Train a model for two steps."""
    model.cuda()
    optimizer = (kind or torch.optim.Adam)(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def pictures(count: int = 4, size: int = 32, channels: int = 3) -> torch.Tensor:
    """Return noise."""
    return torch.randn(count, channels, size, size, device="cuda")


def labels(count: int = 4, classes: int = 10) -> torch.Tensor:
    """Return classes."""
    return torch.randint(0, classes, (count,)).cuda()


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(given, made, 3, stride, 1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU(inplace=True),
            nn.Conv2d(made, made, 3, 1, 1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.short = nn.Sequential()
        if stride != 1 or given != made:
            self.short = nn.Sequential(
                nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return F.relu(self.path(x) + self.short(x))


def _residual_net() -> nn.Sequential:
    blocks = Residual(16, 16), Residual(16, 32, 2), Residual(32, 64, 2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


def residual_net() -> None:
    fitted(_residual_net(), lambda net: F.cross_entropy(net(pictures()), labels()))


def residual_net_of_channels_last() -> None:
    net = _residual_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fitted(
        net,
        lambda net: F.cross_entropy(
            net(pictures().to(memory_format=torch.channels_last)), labels()
        ),
    )


def residual_net_in_inference() -> None:
    net = _residual_net().cuda().eval()
    with torch.no_grad():
        net(pictures(8))


def vision_transformer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(3, 96, 8, 8)
            self.first = nn.Parameter(torch.zeros(1, 1, 96))
            self.places = nn.Parameter(torch.zeros(1, 17, 96))
            layer = nn.TransformerEncoderLayer(
                96, 4, 192, activation="gelu", batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(96, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.cut(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
            made: torch.Tensor = self.head(self.body(x)[:, 0])
            return made

    fitted(Net(), lambda net: F.cross_entropy(net(pictures()), labels(), label_smoothing=0.1))


def mixer() -> None:
    class Mix(nn.Module):
        def __init__(self, places: int, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.across = nn.Sequential(
                nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places)
            )
            self.within = nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            made: torch.Tensor = x + self.within(self.norms[1](x))
            return made

    net = nn.Sequential(nn.Unflatten(1, (16, 48)), Mix(16, 48), Mix(16, 48))
    fitted(net, lambda net: net(torch.randn(8, 768, device="cuda")).square().mean())


def depthwise_net() -> None:
    def block(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.GroupNorm(1, width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    net = nn.Sequential(nn.Conv2d(3, 32, 4, 4), block(32), nn.Hardswish(), block(32))
    fitted(net, lambda net: net(pictures(size=64)).square().mean())


def squeezed_channels() -> None:
    class Squeeze(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 8, 1), nn.SiLU(), nn.Conv2d(8, width, 1)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.gate(x))

    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.SiLU(), Squeeze(32), nn.Flatten())
    net.append(nn.LazyLinear(10))
    net.cuda()(pictures())
    fitted(net, lambda net: F.cross_entropy(net(pictures()), labels()), torch.optim.RMSprop)


class UNet(nn.Module):
    """Down and up again, with shortcuts."""

    def __init__(self, made: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
            for a, b in ((3, 16), (16, 32), (32, 64))
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((64, 32), (32, 16)))
        self.after = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, a, 3, padding=1), nn.GroupNorm(4, a), nn.SiLU())
            for a in (32, 16)
        )
        self.last, self.time = nn.Conv2d(16, made, 1), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """Return a picture of the same size."""
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.avg_pool2d(second, 2))
        if time is not None:
            x = x + self.time(waves(time))[:, :, None, None].to(x.dtype)
        for up, after, kept in zip(self.up, self.after, (second, first), strict=True):
            x = after(torch.cat([up(x), kept], 1))
        made: torch.Tensor = self.last(x)
        return made


def waves(time: torch.Tensor) -> torch.Tensor:
    """Return sines and cosines of a time."""
    rates = torch.exp(torch.arange(16, device="cuda") * -0.5)
    angles = time[:, None].float() * rates[None]
    return torch.cat([angles.sin(), angles.cos()], -1).to(torch.get_default_dtype())


def segmentation() -> None:
    def loss(net: nn.Module) -> torch.Tensor:
        scores = net(pictures())
        wanted = torch.randint(0, 5, (4, 32, 32)).cuda()
        chances = scores.softmax(1)
        marks = F.one_hot(wanted, 5).permute(0, 3, 1, 2)
        overlap = (chances * marks).sum((0, 2, 3))
        dice = 2 * overlap / (chances + marks).sum((0, 2, 3))
        found: torch.Tensor = F.cross_entropy(scores, wanted) + 1 - dice.mean()
        return found

    fitted(UNet(5), loss)


def denoising_diffusion() -> None:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).cuda()

    def loss(net: nn.Module) -> torch.Tensor:
        clean, time = pictures(), torch.randint(0, 100, (4,)).cuda()
        noise = torch.randn_like(clean)
        part = kept[time][:, None, None, None]
        return F.mse_loss(net(part.sqrt() * clean + (1 - part).sqrt() * noise, time), noise)

    net = UNet()
    fitted(net, loss, torch.optim.AdamW)
    x = pictures()
    with torch.no_grad():
        for time in range(2, 0, -1):
            at = torch.full((4,), time, device="cuda")
            noise = net(x, at)
            x = (x - noise * (1 - kept[time]).sqrt()) / kept[time].sqrt() + 0.1 * torch.randn_like(
                x
            )
            x = x.clamp(-1, 1)


def three_dimensions() -> None:
    net = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01),
        nn.MaxPool3d(2), nn.Conv3d(8, 16, 3), nn.PReLU(), nn.Upsample(scale_factor=2),
        nn.ConvTranspose3d(16, 1, 3),
    )  # fmt: skip
    fitted(net, lambda net: net(torch.randn(2, 1, 16, 16, 16, device="cuda")).abs().mean())


def temporal_convolutions() -> None:
    layers: list[nn.Module] = []
    for power in range(3):
        reach = 2**power
        layers += [
            nn.ConstantPad1d((2 * reach, 0), 0.0),
            nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3, dilation=reach)),
            nn.ReLU(),
            nn.Dropout(0.1),
        ]
    fitted(
        nn.Sequential(*layers),
        lambda net: net(torch.randn(4, 32, 128, device="cuda")).square().mean(),
    )


def cells_by_hand() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = nn.Embedding(100, 32), nn.LSTMCell(32, 64)
            self.other, self.head = nn.GRUCell(64, 64), nn.Linear(64, 100)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            x = self.words(given)
            h, c, g = (torch.zeros(len(given), 64, device="cuda") for _ in range(3))
            made = []
            for place in range(given.shape[1]):
                h, c = self.cell(x[:, place], (h, c))
                g = self.other(h, g)
                made.append(self.head(g))
            return torch.stack(made, 1)

    def loss(net: nn.Module) -> torch.Tensor:
        given = torch.randint(0, 100, (8, 13)).cuda()
        return F.cross_entropy(net(given[:, :-1]).transpose(1, 2), given[:, 1:])

    fitted(Net(), loss)


def translation() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(200, 64, padding_idx=0)
            self.body = nn.Transformer(64, 4, 2, 2, 128, 0.1, batch_first=True)
            self.head = nn.Linear(64, 200)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(
                target.shape[1], device=torch.device("cuda")
            )
            made: torch.Tensor = self.head(
                self.body(
                    self.words(source),
                    self.words(target),
                    tgt_mask=mask,
                    src_key_padding_mask=torch.zeros_like(source, dtype=mask.dtype),
                    tgt_is_causal=True,
                )
            )
            return made

    def loss(net: nn.Module) -> torch.Tensor:
        source, target = (torch.randint(1, 200, (4, size)).cuda() for size in (24, 21))
        scores = net(source, target[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    fitted(Net(), loss)


def graph_net() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList((nn.Linear(32, 64), nn.Linear(64, 7)))

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            degree = torch.zeros(len(x), device="cuda").index_add_(
                0, target, torch.ones(len(target), device="cuda")
            )
            for layer in self.layers:
                x = layer(x)
                summed = torch.zeros_like(x).index_add_(0, target, x.index_select(0, source))
                x = F.elu(summed / degree.clamp(min=1)[:, None].to(x.dtype))
            return x

    def loss(net: nn.Module) -> torch.Tensor:
        x, edges = torch.randn(200, 32, device="cuda"), torch.randint(0, 200, (2, 900)).cuda()
        return F.nll_loss(F.log_softmax(net(x, edges), 1), labels(200, 7))

    fitted(Net(), loss)


def graph_attention() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.weight = nn.Linear(32, 64), nn.Linear(128, 1)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            x = self.value(x)
            pairs = torch.cat([x[source], x[target]], -1)
            scores = F.leaky_relu(self.weight(pairs)).squeeze(-1)
            top = torch.zeros(len(x), device="cuda", dtype=scores.dtype)
            top = top.scatter_reduce(0, target, scores.detach(), "amax", include_self=False)
            parts = (scores - top[target]).exp()
            total = torch.zeros_like(top, dtype=parts.dtype).scatter_add(0, target, parts)
            shares = parts / (total[target] + 1e-9)
            mixed = x[source] * shares[:, None].to(x.dtype)
            return torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(mixed), mixed)

    def loss(net: nn.Module) -> torch.Tensor:
        x, edges = torch.randn(150, 32, device="cuda"), torch.randint(0, 150, (2, 600)).cuda()
        found: torch.Tensor = net(x, edges).square().mean()
        return found

    fitted(Net(), loss)


def points() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Sequential(nn.Conv1d(6, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                far = torch.cdist(x.float(), x.float())
                near = far.topk(8, largest=False).indices
            rows = torch.arange(len(x), device="cuda")[:, None, None]
            around = x[rows, near]
            edges = torch.cat([around - x[:, :, None], x[:, :, None].expand_as(around)], -1)
            made = self.each(edges.flatten(1, 2).transpose(1, 2))
            found: torch.Tensor = self.head(made.max(-1).values)
            return found

    fitted(Net(), lambda net: F.cross_entropy(net(torch.randn(4, 64, 3).cuda()), labels()))


def radiance_field() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(39, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)
            )

        def forward(self, origin: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
            depth = torch.linspace(2, 6, 32, device="cuda")
            x = origin[:, None] + way[:, None] * depth[None, :, None]
            rates = 2.0 ** torch.arange(6, device="cuda").to(x.dtype)
            angles = (x[..., None] * rates).flatten(-2)
            made = self.body(torch.cat([x, angles.sin(), angles.cos()], -1))
            color, density = made[..., :3].sigmoid(), F.softplus(made[..., 3])
            clear = torch.exp(-density * 0.125)
            before = torch.cumprod(torch.cat([torch.ones_like(clear[:, :1]), clear + 1e-10], 1), 1)
            weights = before[:, :-1] * (1 - clear)
            found: torch.Tensor = (weights[..., None] * color).sum(1)
            return found

    def loss(net: nn.Module) -> torch.Tensor:
        rays = torch.randn(256, 3).cuda(), F.normalize(torch.randn(256, 3), dim=-1).cuda()
        return F.mse_loss(net(*rays), torch.rand(256, 3, device="cuda"))

    fitted(Net(), loss)


def spatial_transformer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6))
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = F.affine_grid(self.look(x).view(-1, 2, 3), list(x.shape), align_corners=False)
            made: torch.Tensor = self.net(F.grid_sample(x, grid, align_corners=False))
            return made

    fitted(Net(), lambda net: F.cross_entropy(net(pictures()), labels()))


def super_resolution() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.Tanh(), nn.ReflectionPad2d(1), nn.Conv2d(32, 12, 3),
        nn.PixelShuffle(2),
    )  # fmt: skip

    def loss(net: nn.Module) -> torch.Tensor:
        large = pictures(2, 64)
        small = F.interpolate(large, scale_factor=0.5, mode="bicubic", antialias=True)
        return F.l1_loss(net(small), large)

    fitted(net, loss)


def recommendations() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(4))
            self.bottom, self.top = nn.Linear(13, 16), nn.Linear(16 + 10, 1)

        def forward(self, dense: torch.Tensor, picks: list[torch.Tensor]) -> torch.Tensor:
            ends = torch.arange(0, 64 * 3, 3).cuda()
            parts = [F.relu(self.bottom(dense))]
            parts += [table(one, ends) for table, one in zip(self.tables, picks, strict=True)]
            every = torch.stack(parts, 1)
            products = torch.bmm(every, every.transpose(1, 2))
            rows, columns = torch.tril_indices(5, 5, offset=-1).cuda()
            made: torch.Tensor = self.top(torch.cat([parts[0], products[:, rows, columns]], 1))
            return made.squeeze(1)

    def loss(net: nn.Module) -> torch.Tensor:
        picks = [torch.randint(0, 1000, (192,)).cuda() for _ in range(4)]
        found = net(torch.randn(64, 13, device="cuda"), picks)
        return F.binary_cross_entropy_with_logits(found, torch.rand(64, device="cuda"))

    fitted(Net(), loss, torch.optim.Adagrad)


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    yield from listed(
        residual_net, residual_net_of_channels_last, residual_net_in_inference, vision_transformer,
        mixer, depthwise_net, segmentation, denoising_diffusion, cells_by_hand, translation,
        graph_net, graph_attention, points, radiance_field, spatial_transformer,
    )  # fmt: skip
    yield from listed(
        squeezed_channels, three_dimensions, temporal_convolutions, super_resolution,
        recommendations, ways=MIXED,
    )  # fmt: skip
