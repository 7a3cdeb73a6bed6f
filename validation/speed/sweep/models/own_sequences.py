"""Own models of sequences, graphs and tables: recurrent layers, experts, scattered sums, embeddings and two towers."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.speed.sweep.case import ModelCase, Sizes


def scores_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class LstmModel(nn.Module):
    """A two-layer LSTM that predicts the next token."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


class GruClassifier(nn.Module):
    """A GRU in both directions over padded sequences. Its mean counts the tokens within the length of each."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[..., None]
        hidden = self.gru(self.embed(tokens))[0] * mask
        out: Tensor = self.head(hidden.sum(1) / mask.sum(1))
        return out


class Experts(nn.Module):
    """A layer whose tokens each go to two of several small networks, of which all run, and the others have weight 0."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weight = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], len(self.up)).scatter(-1, chosen, best.to(x.dtype))
        hidden = F.gelu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, weight)


class ExpertModel(nn.Module):
    """A language model whose layers have attention and experts."""

    def __init__(self, vocabulary: int, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for number, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            y = self.norms[2 * number](x)
            x = x + attention(y, y, y, attn_mask=mask.to(y.dtype), need_weights=False)[0]
            x = x + experts(self.norms[2 * number + 1](x))
        out: Tensor = self.head(x)
        return out


class GraphNet(nn.Module):
    """Messages along the edges of graphs, summed with `index_add`; the nodes of a graph are averaged by `scatter`.
    Graphs have equal numbers of nodes and edges: their edges count from the first node of their graph."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graphs, count, _ = nodes.shape
        first = torch.arange(graphs, device=nodes.device)[:, None] * count
        source, target = (edges[:, 0] + first).flatten(), (edges[:, 1] + first).flatten()
        x = self.embed(nodes.flatten(0, 1))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([x[source], x[target]], dim=1)))
            summed = torch.zeros_like(x, dtype=sent.dtype).index_add(0, target, sent)
            x = x + F.relu(update(torch.cat([x.to(sent.dtype), summed], dim=1)))
        owner = torch.arange(graphs, device=x.device).repeat_interleave(count)[:, None].expand_as(x)
        pooled = torch.zeros(graphs, x.shape[1], dtype=x.dtype, device=x.device).scatter_add(0, owner, x) / count
        out: Tensor = self.head(pooled)
        return out


class Recommender(nn.Module):
    """Embeddings of categories and a network over numbers, whose products in pairs go into the second network."""

    first: Tensor
    second: Tensor

    def __init__(self, tables: int, rows: int, width: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(numbers, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.head = nn.Linear(256, 1)
        rows_of_pairs, columns_of_pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("first", rows_of_pairs)
        self.register_buffer("second", columns_of_pairs)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        sparse = [table(categories[:, index]).to(dense.dtype) for index, table in enumerate(self.tables)]
        features = torch.stack([dense, *sparse], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.first, self.second]
        out: Tensor = self.head(self.top(torch.cat([dense, products], dim=1)))
        return out[:, 0]


class Towers(nn.Module):
    """Two towers whose codes of one pair have to be more alike than those of the other pairs of the batch. Returns its
    loss."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()

        def tower() -> nn.Sequential:
            sizes = (features, width, width, width)
            layers = [(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairwise(sizes)]
            return nn.Sequential(*[module for layer in layers for module in layer])

        self.query, self.document = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        scores = F.normalize(self.query(query), dim=1) @ F.normalize(self.document(document), dim=1).T
        return F.cross_entropy(scores.float() * self.scale.exp(), torch.arange(len(query), device=query.device))


class Translator(nn.Module):
    """torch's own encoder and decoder with padding masks."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.transformer = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device, dtype=torch.bool)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        out: Tensor = self.head(hidden)
        return out


def _tokens(sizes: Sizes) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, sizes["vocabulary"], (2, sizes["samples"], sizes["length"]))
    return tokens[0], tokens[1]


def _padded(sizes: Sizes) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, sizes["vocabulary"], (sizes["samples"], sizes["length"]))
    lengths = torch.randint(sizes["length"] // 2, sizes["length"] + 1, (sizes["samples"], 1))
    padded = tokens.masked_fill(torch.arange(sizes["length"])[None] >= lengths, 0)
    return padded, torch.randint(0, 10, (sizes["samples"],))


def _sentences(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    source = _padded(sizes)[0]
    target = torch.randint(1, sizes["vocabulary"], (sizes["samples"], sizes["length"] + 1))
    return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()


def _graphs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    samples, nodes = sizes["samples"], sizes["nodes"]
    edges = torch.randint(0, nodes, (samples, 2, 4 * nodes))
    return torch.randn(samples, nodes, 16), edges, torch.randint(0, 10, (samples,))


def _clicks(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    samples = sizes["samples"]
    categories = torch.randint(0, sizes["rows"], (samples, sizes["tables"]))
    return torch.randn(samples, 13), categories, torch.randint(0, 2, (samples,)).float()


def _pairs(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes["samples"], 256), torch.randn(sizes["samples"], 256)


def _case(name: str, build: Any, batch: Any, loss: Any, full: Sizes, tiny: Sizes) -> ModelCase:
    return ModelCase(name, "own", build, batch, full, tiny, loss)


OWN_SEQUENCES = (
    _case(
        "lstm",
        lambda sizes: LstmModel(sizes["vocabulary"], sizes["width"]),
        _tokens,
        scores_loss,
        {"samples": 64, "length": 256, "vocabulary": 10000, "width": 650},
        {"samples": 2, "length": 8, "vocabulary": 50, "width": 16},
    ),
    _case(
        "gru",
        lambda sizes: GruClassifier(sizes["vocabulary"], sizes["width"], 10),
        _padded,
        F.cross_entropy,
        {"samples": 128, "length": 256, "vocabulary": 20000, "width": 512},
        {"samples": 2, "length": 8, "vocabulary": 50, "width": 16},
    ),
    _case(
        "experts",
        lambda sizes: ExpertModel(sizes["vocabulary"], sizes["width"], sizes["layers"], 8),
        _tokens,
        scores_loss,
        {"samples": 8, "length": 512, "vocabulary": 16000, "width": 512, "layers": 6},
        {"samples": 2, "length": 8, "vocabulary": 50, "width": 16, "layers": 2},
    ),
    _case(
        "graph_net",
        lambda sizes: GraphNet(16, sizes["width"], 4, 10),
        _graphs,
        F.cross_entropy,
        {"samples": 256, "nodes": 128, "width": 256},
        {"samples": 2, "nodes": 6, "width": 16},
    ),
    _case(
        "recommender",
        lambda sizes: Recommender(sizes["tables"], sizes["rows"], sizes["width"], 13),
        _clicks,
        F.binary_cross_entropy_with_logits,
        {"samples": 8192, "tables": 26, "rows": 100_000, "width": 64},
        {"samples": 4, "tables": 3, "rows": 20, "width": 8},
    ),
    _case(
        "two_towers",
        lambda sizes: Towers(256, sizes["width"]),
        _pairs,
        None,
        {"samples": 4096, "width": 1024},
        {"samples": 4, "width": 16},
    ),
    _case(
        "translator",
        lambda sizes: Translator(sizes["vocabulary"], sizes["width"], sizes["layers"]),
        _sentences,
        scores_loss,
        {"samples": 64, "length": 128, "vocabulary": 16000, "width": 512, "layers": 6},
        {"samples": 2, "length": 8, "vocabulary": 50, "width": 16, "layers": 1},
    ),
)
