"""Names of weights in :class:`~dmjd.models.masked_image_model.MaskedImageModel`, from which all layouts are described.

``*`` is any number: ``encoder.blocks.*.norm1.weight``. Some weights exist in other code bases only: learned positions,
layer scales, relative position biases, a classifier.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def leaves(*modules: str) -> list[str]:
    """The weight and the bias of each module."""
    return [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]


def inside(parent: str, names: Iterable[str]) -> list[str]:
    """The names within ``parent``."""
    return [f"{parent}.{name}" for name in names]


BLOCK = leaves("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
CONV_BLOCK = leaves("norm1", "conv1", "attn", "conv2", "norm2", "mlp.fc1", "mlp.fc2")
LAYER_SCALE = ["gamma_1", "gamma_2"]
BIAS_TABLE = "attn.relative_position_bias_table"
SHARED_TABLE = "encoder.rel_pos_bias.relative_position_bias_table"
POSITIONS, DECODER_POSITIONS = "encoder.pos_embed", "decoder.pos_embed"

_NORMS = leaves("encoder.norm", "encoder.fc_norm")
HEAD = leaves("head")
CLASSIFIER = leaves("classifier")
VIT = [
    "encoder.cls_token",
    "encoder.mask_token",
    POSITIONS,
    *leaves("encoder.patch_embed.proj"),
    *inside("encoder.blocks.*", BLOCK),
    *_NORMS,
]
REGISTERS = "encoder.reg_token"
TIMM_VIT = [
    REGISTERS,
    *inside("encoder.blocks.*", ["ls1.gamma", "ls2.gamma", *leaves("attn.q_norm", "attn.k_norm")]),
    *leaves("encoder.norm_pre"),
]
"""Of timm's ViTs that no other layout has: registers, layer scales, norms of queries and keys and of the embedding."""
BEIT = [*inside("encoder.blocks.*", [*LAYER_SCALE, BIAS_TABLE]), SHARED_TABLE]
CONVIT = [
    POSITIONS,
    *leaves(*(f"encoder.patch_embed{stage}.{part}" for stage in (1, 2, 3) for part in ("proj", "norm"))),
    *leaves("encoder.patch_embed4", "encoder.stage1_output_decode", "encoder.stage2_output_decode"),
    *inside("encoder.blocks1.*", CONV_BLOCK),
    *inside("encoder.blocks2.*", CONV_BLOCK),
    *inside("encoder.blocks3.*", BLOCK),
    *_NORMS,
]
SWIN = [
    "encoder.mask_token",
    *leaves("encoder.patch_embed.proj", "encoder.patch_embed.norm", "encoder.norm"),
    *inside("encoder.layers.*.blocks.*", [*BLOCK, BIAS_TABLE]),
    *inside("encoder.layers.*.downsample", [*leaves("norm"), "reduction.weight"]),
]
"""As in timm, where ``downsample`` is the first module of a layer."""
DECODER = [
    "decoder.mask_token",
    DECODER_POSITIONS,
    *leaves("decoder.embed", "decoder.norm"),
    *inside("decoder.blocks.*", BLOCK),
]
VISIBLE_BRANCH = [
    *leaves(*(f"visible_branch.projector.{layer}" for layer in (0, 1, 3, 4, 6))),
    *leaves("visible_branch.predictor"),
]
VOCABULARY = list(dict.fromkeys([*VIT, *BEIT, *CONVIT, *SWIN, *DECODER, *HEAD, *VISIBLE_BRANCH, *CLASSIFIER]))
LEAVES = {name.rpartition(".")[2] for name in [*VOCABULARY, *TIMM_VIT]} | {
    *("q_bias", "v_bias", "decoder_pos_embed", "masked_embed")
}
"""Last parts of weights' names, in all layouts."""


class Names:
    """A one-to-one map between two sets of names, with ``*`` for numbers.

    Args:
        pairs: theirs -> ours.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._ours = dict(pairs)
        self._theirs = {ours: theirs for theirs, ours in pairs.items()}
        assert len(self._theirs) == len(self._ours), "two names of a layout mean one of ours"

    def ours(self, theirs: str) -> str | None:
        """Our name for one of theirs; None if they have no such name."""
        return _translate(theirs, self._ours)

    def theirs(self, ours: str) -> str | None:
        """Their name for one of ours; None if they do not have the weight."""
        return _translate(ours, self._theirs)


def _translate(name: str, patterns: Mapping[str, str]) -> str | None:
    found = patterns.get(name)  # names with numbers of their own: patch_embed1, convolution layers
    if found is not None:
        return found
    # Numbers between dots are either indices or positions in an nn.Sequential (ffn.layers.0.0): try the fewest indices.
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for count in (1, 2):
        chosen = numbers[:count]
        if len(chosen) < count:
            return None
        pattern = ".".join("*" if place in chosen else part for place, part in enumerate(parts))
        found = patterns.get(pattern)
        if found is not None:
            for place in chosen:
                found = found.replace("*", parts[place], 1)
            return found
    return None


_IN_BLOCK = re.compile(r"(.+\.blocks\d?)\.(\d+)\.(.+)")
_DIGITS = 9
"""Digits of a number in a name that are read."""
_LISTED = 8
"""Names or patterns in a message."""
_LONGEST = 160
"""Characters of one of them."""


def missing(names: Iterable[str]) -> list[str]:
    """Missing names, given some of ours: blocks, a module's weight or bias, parts of a branch.

    A whole branch may be absent: many files hold the encoder alone.
    """
    present = set(names)
    blocks: dict[str, dict[int, set[str]]] = {}
    for name in present:
        match = _IN_BLOCK.fullmatch(name)
        if match:
            blocks.setdefault(match[1], {}).setdefault(int(match[2][:_DIGITS]), set()).add(match[3])
    wanted: set[str] = set()
    for stem, numbered in blocks.items():
        every = set(CONV_BLOCK if stem in ("encoder.blocks1", "encoder.blocks2") else BLOCK).union(*numbered.values())
        # Bounded by the number of names: a block number beyond it implies missing blocks already.
        count = min(max(numbered), len(present)) + 1
        wanted |= {f"{stem}.{index}.{leaf}" for index in range(count) for leaf in every}
    for name in present:
        module, _, leaf = name.rpartition(".")
        partner = f"{module}.{'bias' if leaf == 'weight' else 'weight'}"
        if leaf in ("weight", "bias") and partner in VOCABULARY:
            wanted.add(partner)
    convit = any(name.startswith("encoder.patch_embed1.") or name.startswith("encoder.blocks1.") for name in present)
    if any(name.startswith("encoder.") for name in present):
        embeddings = ("patch_embed1.proj", "patch_embed2.proj", "patch_embed3.proj", "patch_embed4")
        wanted |= {f"encoder.{part}.weight" for part in (embeddings if convit else ("patch_embed.proj",))}
        depth = [stem for stem in blocks if stem.startswith("encoder.")]
        if not depth:
            wanted.add("encoder.blocks3.0.norm1.weight" if convit else "encoder.blocks.0.norm1.weight")
    for branch, parts in (
        ("decoder.", ["decoder.mask_token", "decoder.embed.weight", "decoder.norm.weight", "head.weight"]),
        ("visible_branch.", VISIBLE_BRANCH),
    ):
        if any(name.startswith(branch) for name in present):
            wanted |= set(parts)
    return sorted(wanted - present, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """blocks.2 before blocks.10."""
    return [(int(part[:_DIGITS]), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def summary(names: Iterable[str]) -> str:
    """``names`` for a message: numbers become ``*`` with a count, and a long list is cut; also a long name."""
    groups: dict[str, list[str]] = {}
    for name in sorted(map(_printable, names), key=_natural):
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    listed = [same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in groups.items()]
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


def _printable(name: str) -> str:
    text = name if name.isprintable() else name.encode("unicode_escape").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 40]}...{text[-37:]}"
