"""Attention in the spellings that models use."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("attention")
_QKV = "self.{m}qkv = nn.Linear({D}, 3 * {D})\nself.{m}out = nn.Linear({D}, {D})"
_THREE = (
    "self.{m}q = nn.Linear({D}, {D})\nself.{m}k = nn.Linear({D}, {D})\nself.{m}v = nn.Linear({D}, {D})\n"
    "self.{m}out = nn.Linear({D}, {D})"
)
_HEADS = "q, k, v = (p.view({x}.shape[0], -1, {H}, {E}).transpose(1, 2) for p in self.{m}qkv({x}).split({D}, -1))"
_HEADS_OF_THREE = (
    "q = self.{m}q({x}).unflatten(-1, ({H}, {E})).transpose(1, 2)\n"
    "k = self.{m}k({x}).unflatten(-1, ({H}, {E})).transpose(1, 2)\n"
    "v = self.{m}v({x}).unflatten(-1, ({H}, {E})).transpose(1, 2)"
)
_JOIN = "{y} = {x} + self.{m}out(o.transpose(1, 2).reshape({x}.shape[0], -1, {D}))"


def _add(name: str, middle: str, heads: str = _HEADS, init: str = _QKV, end: str = _JOIN, **options: object) -> None:
    FAMILY.add(name, "\n".join(part for part in (heads, middle, end) if part), init=init, takes=("BLD",), **options)


_add("attention causal", "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)")
_add("attention", "o = F.scaled_dot_product_attention(q, k, v)", _HEADS_OF_THREE, _THREE)
_add("attention scale", "o = F.scaled_dot_product_attention(q, k, v, scale={c})")
_add(
    "attention boolean mask",
    "mask = torch.ones({L}, {L}, dtype=torch.bool).tril({k})\no = F.scaled_dot_product_attention(q, k, v, mask)",
)
_add(
    "attention window",
    "p = torch.arange({x}.shape[1])\nmask = (p[:, None] - p).abs() <= {k}\n"
    "o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
    _HEADS_OF_THREE,
    _THREE,
)
_add(
    "attention padding mask",
    "mask = (t != 3)[:, None, None, :] | torch.eye({L}, dtype=torch.bool)\n"
    "o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
    needs="tokens",
)
_add(
    "attention learned bias",
    "o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.{m}bias)",
    init=_QKV + "\nself.{m}bias = nn.Parameter(torch.randn({H}, {L}, {L}) / 2)",
)
_add(
    "attention grouped",
    "o = F.scaled_dot_product_attention(q, k[:, :{g}], v[:, :{g}], is_causal=True, enable_gqa=True)",
    choices={"g": (1, 2)},
)
_add(
    "attention repeated heads",
    "k = k[:, ::2].repeat_interleave(2, 1)\nv = v[:, ::2].repeat_interleave(2, 1)\n"
    "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
)
_add(
    "attention by softmax",
    "o = (q @ k.transpose(-2, -1) / {E} ** 0.5).softmax(-1) @ v",
)
_add(
    "attention by softmax causal",
    "s = q @ k.mT / {E} ** 0.5\ns = s.masked_fill(torch.ones({L}, {L}).triu(1).bool(), float('-inf'))\n"
    "o = F.softmax(s, dim=-1) @ v",
    _HEADS_OF_THREE,
    _THREE,
)
_add(
    "attention by softmax over queries",
    "o = (q @ k.mT / {E} ** 0.5).softmax(-2) @ v",
)
_add(
    "attention linear",
    "q, k = F.elu(q) + 1, F.elu(k) + 1\no = q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)",
)
_add(
    "attention linear causal",
    "q, k = F.elu(q) + 1, F.elu(k) + 1\n"
    "state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)\no = (q.unsqueeze(-2) @ state).squeeze(-2) / {L}",
)
_add(
    "attention alibi",
    "p = torch.arange({L}, dtype={x}.dtype)\nslope = 2.0 ** -torch.arange(1, {H} + 1, dtype={x}.dtype)\n"
    "bias = slope[:, None, None] * (p[None, :] - p[:, None])\n"
    "o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))",
)
_add(
    "attention relative bias",
    "p = torch.arange({L})\nbias = self.{m}table(p[:, None] - p[None, :] + {L} - 1).permute(2, 0, 1)\n"
    "o = (q @ k.mT / {E} ** 0.5 + bias).softmax(-1) @ v",
    init=_QKV + "\nself.{m}table = nn.Embedding(2 * {L} - 1, {H})",
)
_add(
    "attention rotary",
    "angle = torch.arange({x}.shape[1])[:, None] / 10.0 ** (torch.arange({E} // 2) / {E})\n"
    "cos, sin = angle.cos().to({x}.dtype), angle.sin().to({x}.dtype)\n"
    "q, k = (torch.cat([p[..., : {E} // 2] * cos - p[..., {E} // 2 :] * sin,"
    " p[..., : {E} // 2] * sin + p[..., {E} // 2 :] * cos], -1) for p in (q, k))\n"
    "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
)
_add(
    "attention rotary complex",
    "angle = torch.arange({x}.shape[1], dtype={x}.dtype)[:, None] * torch.arange(1, {E} // 2 + 1)\n"
    "turn = torch.polar(torch.ones_like(angle), angle)\n"
    "q, k = (torch.view_as_real(torch.view_as_complex(p.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)"
    " for p in (q, k))\no = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
)
_add(
    "attention einsum",
    "q, k, v = (p.view({x}.shape[0], -1, {H}, {E}) for p in self.{m}qkv({x}).chunk(3, -1))\n"
    "s = torch.einsum('blhe,bkhe->bhlk', q, k) / {E} ** 0.5",
    heads="",
    end="o = torch.einsum('bhlk,bkhe->blhe', s.softmax(-1), v)\n{y} = {x} + self.{m}out(o.flatten(2))",
)
_add(
    "attention einsum rearranged",
    "q, k, v = self.{m}qkv({x}).reshape(*{x}.shape[:2], 3, {H}, {E}).permute(2, 0, 3, 1, 4)\n"
    "s = torch.einsum('bhqe,bhke->bhqk', q, k) + torch.full(({L}, {L}), -1e9).triu(1)",
    heads="",
    end="o = torch.einsum('bhqk,bhke->bqhe', s.softmax(-1), v)\n{y} = {x} + self.{m}out(o.reshape({x}.shape))",
)
_add(
    "attention by baddbmm",
    "q, k, v = (p.flatten(0, 1) for p in (q, k, v))\n"
    "s = torch.baddbmm(torch.zeros({L}, {L}, dtype=q.dtype), q, k.mT, beta=0, alpha={E} ** -0.5)\n"
    "o = torch.bmm(s.softmax(-1), v).unflatten(0, (-1, {H}))",
)
_add(
    "attention windows of positions",
    "q, k, v = (p.unflatten(2, (2, -1)) for p in (q, k, v))\no = F.scaled_dot_product_attention(q, k, v).flatten(2, 3)",
)
_add(
    "attention to a pooled query",
    "o = F.scaled_dot_product_attention(q.mean(2, keepdim=True), k, v).expand(-1, -1, {L}, -1)",
)
_add(
    "attention with a written cache",
    "cache = torch.zeros_like(k)\ncache[:, :, : {x}.shape[1]] = k\n"
    "o = F.scaled_dot_product_attention(q, cache, v, is_causal=True)",
)
_add(
    "attention with normalized queries",
    "q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)\no = F.scaled_dot_product_attention(q, k, v, scale=4.0)",
)
_add(
    "attention of heads mixed",
    "s = (q @ k.mT / {E} ** 0.5).softmax(-1)\ns = torch.einsum('hg,bglk->bhlk', self.{m}mix, s)\no = s @ v",
    init=_QKV + "\nself.{m}mix = nn.Parameter(torch.eye({H}) + torch.randn({H}, {H}) / 8)",
)
_add(
    "attention over features",
    "o = (F.normalize(q, dim=2).mT @ F.normalize(k, dim=2)).softmax(-1)\no = (o @ v.mT).mT",
)
_MODULE = "self.{m} = nn.MultiheadAttention({D}, {H}, batch_first=True)"
_add("MultiheadAttention", "{y} = {x} + self.{m}({x}, {x}, {x}, need_weights=False)[0]", heads="", init=_MODULE, end="")
_add(
    "MultiheadAttention causal",
    "mask = nn.Transformer.generate_square_subsequent_mask({L}, dtype={x}.dtype)\n"
    "{y} = {x} + self.{m}({x}, {x}, {x}, attn_mask=mask, is_causal=True, need_weights=False)[0]",
    heads="",
    init=_MODULE,
    end="",
)
_add(
    "MultiheadAttention with weights",
    "o, w = self.{m}({x}, {x}, {x})\n{y} = {x} + o + w.mean(-1, keepdim=True)",
    heads="",
    init=_MODULE,
    end="",
)
_add(
    "TransformerEncoderLayer",
    "{y} = self.{m}({x})",
    heads="",
    init="self.{m} = nn.TransformerEncoderLayer({D}, {H}, 2 * {D}, dropout=0.0, batch_first=True, norm_first=True)",
    end="",
)
