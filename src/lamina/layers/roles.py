"""What each projection of a block is for, and where convolutions are: rows of paths, checked against the model on use.

Reading layers needs no table. Changing what happens after the query projection does: the row says where it is.
To support a family, `add` a row (or put one into `ROLES`); the contract tests run over every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, cast, final

from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable


@final
@dataclass(frozen=True)
class Attention:
    """Where an attention's projections are.

    A path is dotted and starts at the block; a number counts through a list (-1 is its last), `*` stands
    for any text, so that one path may name several modules.

    Attributes:
        query: Path of the query projection; the same as `key` and `value` where one projection gives several.
        key: Path of the key projection.
        value: Path of the value projection.
        output: Path of the projection after the heads.
        head_width: Path of the attribute that holds the width of one head. A projection gives one or more heads,
            each a run of that many features, so that grouped key and value heads need no field of their own.
        fused: Where one projection gives several roles, what comes first: "roles" (all query heads, then all key
            heads, ...) or "heads" (query, key and value of head 0, then those of head 1, ...). None otherwise.
        positions: Roles whose projections the attention also calls with position embeddings.
        positions_if: The settings of the config which all must be true for that.
    """

    query: str
    key: str
    value: str
    output: str
    head_width: str
    fused: Literal["roles", "heads"] | None = None
    positions: tuple[str, ...] = ()
    positions_if: tuple[str, ...] = ()

    def projections(self) -> dict[str, tuple[str, ...]]:
        """Path -> the roles of its projection, each path once."""
        paths = {"query": self.query, "key": self.key, "value": self.value}
        return {path: tuple(role for role in paths if paths[role] == path) for path in paths.values()}


@final
@dataclass(frozen=True)
class Roles:
    """What the parts of a family's blocks are for.

    Attributes:
        attention: The self-attention.
        ffn_in: Paths of the feed-forward network's first projections; two where one of them is a gate.
        ffn_out: Path of its last.
        cross: The attention over the encoder, where blocks have one.
    """

    attention: Attention
    ffn_in: tuple[str, ...]
    ffn_out: str
    cross: Attention | None = None


@final
@dataclass(frozen=True)
class Convolutions:
    """Where a family's convolutions are, and how they are counted.

    Attributes:
        blocks: Path, from the backbone, of what they are in; the first of those found is layer 1.
        convolution: Path of a block's convolutions, from the block; several where it has a `*`.
        stack: Name of the sequence: "main" where its layers are those of the model's `hidden_states`, and another
            where they come before layer 0.
    """

    blocks: str
    convolution: str
    stack: str = "main"


def roles_of(model: nn.Module, *, op: str) -> Roles:
    """Get the row of a model's family.

    Raises:
        UnsupportedModelError: If the table has no such row.
    """
    family = family_of(model)
    if family not in ROLES:
        raise UnsupportedModelError(
            op=op,
            model_type=family,
            reason=f"no row of projection roles says what its projections are for; rows: {', '.join(sorted(ROLES))}",
            hint="Add one with lamina.layers.roles.add. Readers, taps, freezing and truncating need no row.",
        )
    return ROLES[family]


def convolutions_of(model: nn.Module, *, op: str) -> Convolutions:
    """Get the row that says where the convolutions of a model's family are.

    Raises:
        UnsupportedModelError: If the table has no such row.
    """
    family = family_of(model)
    if family not in CONVOLUTIONS:
        raise UnsupportedModelError(
            op=op,
            model_type=family,
            reason=f"no row says where its convolutions are; rows: {', '.join(sorted(CONVOLUTIONS))}",
            hint="Add a Convolutions row with lamina.layers.roles.add.",
        )
    return CONVOLUTIONS[family]


def add(model_type: str, row: Roles | Convolutions) -> None:
    """Add a family's row.

    Args:
        model_type: The family, as in `config.model_type`.
        row: Its projections, or its convolutions; a family may have a row of each kind.

    Raises:
        ConfigError: If the family has such a row.
    """
    name, known = ("ROLES", ROLES) if isinstance(row, Roles) else ("CONVOLUTIONS", CONVOLUTIONS)
    if model_type in known:
        raise ConfigError(f"roles: '{model_type}' has a row; a row is never replaced. Remove it from {name} first.")
    if isinstance(row, Roles):
        ROLES[model_type] = row
    else:
        CONVOLUTIONS[model_type] = row


def family_of(model: nn.Module) -> str:
    """The family's name, as in `config.model_type`."""
    return str(getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__)


def has_path(block: nn.Module, path: str) -> bool:
    """Whether a block has the module that owns the projection at `path`."""
    parent = path.rpartition(".")[0]
    return not isinstance(_follow([block], parent), str)


def modules_at(block: nn.Module, path: str, *, family: str, op: str) -> list[nn.Module]:
    """Get the modules at a path of a row; several where the path has a `*`.

    Raises:
        UnsupportedModelError: If the block does not have them; names the part that is missing, and what there is.
    """
    modules = _follow([block], path)
    if isinstance(modules, str):
        reason = f"its row of projection roles names '{path}', but {modules}"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=_ROW_HINT)
    return modules


def head_width_at(block: nn.Module, path: str, *, family: str, op: str) -> int:
    """Get the width of one head, from the attribute at a path of a row.

    Raises:
        UnsupportedModelError: If the block has no such attribute.
    """
    parent, _, name = path.rpartition(".")
    owner = modules_at(block, parent, family=family, op=op)[0]
    width: object = getattr(owner, name, None)
    if not isinstance(width, int):
        reason = f"its row of projection roles names '{path}', but {type(owner).__name__} has no number '{name}'"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=_ROW_HINT)
    return width


_ROW_HINT = "Correct the row, or use the version of transformers that it was written for."


def _follow(modules: list[nn.Module], path: str) -> list[nn.Module] | str:
    """The modules at a path, or what was missing on the way."""
    for part in path.split("."):
        following: list[nn.Module] = []
        for module in modules:
            children = dict(cast("Iterable[tuple[str, nn.Module]]", module.named_children()))
            chosen = [child for name, child in children.items() if fnmatchcase(name, _pattern(part, len(children)))]
            if not chosen:
                return f"{type(module).__name__} has no '{part}' (it has {', '.join(children) or 'no parts'})"
            following += chosen
        modules = following
    return modules


def _pattern(part: str, count: int) -> str:
    """What a part of a path matches, among a count of children."""
    return str(count + int(part)) if part.startswith("-") and part[1:].isdecimal() else part


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear map, `[out, in]` (a view where it is stored the other way); None for anything else."""
    weight: object = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear):
        return weight
    return weight.T if type(module).__name__ == "Conv1D" else None


def convolution_weight(module: nn.Module) -> Tensor | None:
    """The weight of a plain convolution, `[out, in / groups, kernel...]`; None for anything else.

    One that computes its weight, as weight norm does, is not plain.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if type(module) not in (nn.Conv1d, nn.Conv2d) or weight is None:
        return None
    return weight if weight.is_floating_point() else None


def _apart(  # a name per role, all in one module
    owner: str, query: str, key: str, value: str, output: str, head_width: str = "head_dim"
) -> Attention:
    out = output if "." in output else f"{owner}.{output}"
    return Attention(f"{owner}.{query}", f"{owner}.{key}", f"{owner}.{value}", out, f"{owner}.{head_width}")


def _fused(path: str, output: str, head_width: str, first: Literal["roles", "heads"]) -> Attention:
    return Attention(path, path, path, output, head_width, fused=first)


def _projected(owner: str, output: str) -> Attention:
    return _apart(owner, "q_proj", "k_proj", "v_proj", output)


def _bert(owner: str) -> Attention:
    return _apart(f"{owner}.self", "query", "key", "value", f"{owner}.output.dense", "attention_head_size")


_BERT = Roles(_bert("attention"), ("intermediate.dense",), "output.dense", cross=_bert("crossattention"))
_BART = Roles(
    _projected("self_attn", "out_proj"), ("fc1",), "fc2", cross=_projected("encoder_attn", "out_proj")
)  # also the encoder's blocks, which have no cross-attention
_T5 = Roles(
    _apart("layer.0.SelfAttention", "q", "k", "v", "layer.0.SelfAttention.o", "key_value_proj_dim"),
    ("layer.-1.DenseReluDense.wi*",),
    "layer.-1.DenseReluDense.wo",
    cross=_apart("layer.1.EncDecAttention", "q", "k", "v", "layer.1.EncDecAttention.o", "key_value_proj_dim"),
)
_VIT = Roles(_projected("attention", "o_proj"), ("mlp.fc1",), "mlp.fc2")
_SPEECH = Roles(_projected("attention", "out_proj"), ("feed_forward.intermediate_dense",), "feed_forward.output_dense")
_LLAMA = Roles(_projected("self_attn", "o_proj"), ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
_ALBERT = "albert_layers.*"

ROLES: dict[str, Roles] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "camembert", "ernie", "data2vec-text"), _BERT),
    "distilbert": Roles(
        _apart("attention", "q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size"), ("ffn.lin1",), "ffn.lin2"
    ),
    "albert": Roles(
        _apart(f"{_ALBERT}.attention", "query", "key", "value", "dense", "attention_head_size"),
        (f"{_ALBERT}.ffn",),
        f"{_ALBERT}.ffn_output",
    ),
    "mpnet": Roles(
        _apart("attention.attn", "q", "k", "v", "o", "attention_head_size"), ("intermediate.dense",), "output.dense"
    ),
    # Adds the biases of query and value after the projection: an inserted layer comes before them.
    "deberta": Roles(
        _fused("attention.self.in_proj", "attention.output.dense", "attention.self.attention_head_size", "heads"),
        ("intermediate.dense",),
        "output.dense",
    ),
    "deberta-v2": Roles(
        Attention(
            "attention.self.query_proj",
            "attention.self.key_proj",
            "attention.self.value_proj",
            "attention.output.dense",
            "attention.self.attention_head_size",
            positions=("query", "key"),
            positions_if=("relative_attention", "share_att_key"),
        ),
        ("intermediate.dense",),
        "output.dense",
    ),
    "modernbert": Roles(_fused("attn.Wqkv", "attn.Wo", "attn.head_dim", "roles"), ("mlp.Wi",), "mlp.Wo"),
    **dict.fromkeys(("bart", "mbart", "marian", "whisper", "pegasus", "opt"), _BART),
    "t5": _T5,
    "mt5": _T5,
    **dict.fromkeys(("vit", "deit", "beit", "dinov2"), _VIT),
    **dict.fromkeys(("wav2vec2", "hubert"), _SPEECH),
    "gpt2": Roles(
        _fused("attn.c_attn", "attn.c_proj", "attn.head_dim", "roles"),
        ("mlp.c_fc",),
        "mlp.c_proj",
        cross=Attention(
            "crossattention.q_attn",
            "crossattention.c_attn",
            "crossattention.c_attn",
            "crossattention.c_proj",
            "crossattention.head_dim",
            fused="roles",
        ),
    ),
    "gpt_neox": Roles(
        _fused("attention.query_key_value", "attention.dense", "attention.head_size", "heads"),
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
}

_FEATURES = Convolutions("feature_extractor.conv_layers.*", "conv", stack="feature_encoder")
_CONVNEXT = Convolutions("encoder.stages.*", "layers.*.dwconv")

CONVOLUTIONS: dict[str, Convolutions] = {
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "data2vec-audio", "sew"), _FEATURES),
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "resnet": Convolutions("encoder.stages.*", "layers.*.layer.*.convolution"),  # without the shortcuts
}
