"""The layouts of all code bases, and the one that a file has."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.layout import Layout, State, advice, check_stem
from dmjd.interop.names import (
    BEIT,
    BIAS_TABLE,
    CLASSIFIER,
    CONVIT,
    DECODER,
    HEAD,
    SWIN,
    TIMM_VIT,
    VISIBLE_BRANCH,
    VIT,
    VOCABULARY,
    Names,
    summary,
)
from dmjd.interop.tensors import channels_first, channels_last


def _renamed(vocabulary: Sequence[str], *rules: tuple[str, str]) -> Names:
    """Our names under (pattern, replacement) rules, applied one after the other."""
    pairs = {}
    for ours in vocabulary:
        theirs = ours
        for pattern, replacement in rules:
            theirs = re.sub(pattern, replacement, theirs)
        pairs[theirs] = ours
    return Names(pairs)


_TOP = (r"^encoder\.", "")
_FINE_TUNED = (r"^classifier\.", "head.")


def _official(vocabulary: Sequence[str]) -> Names:
    """The names of MAE, ConvMAE and DMJD, whose shapes are ours."""
    return _renamed(
        [*vocabulary, *CLASSIFIER],
        (r"^decoder\.mask_token$", "mask_token"),
        (r"^decoder\.", "decoder_"),
        (r"^head\.", "decoder_pred."),
        (r"^visible_branch\.projector\.", "proj_embed."),
        (r"^visible_branch\.predictor\.", "predictor.0."),
        _TOP,
        _FINE_TUNED,
    )


def _from_simmim(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's 1 x 1 convolution to a matrix in our order of pixels; Swin's patch merging to the layer after it.

    A fine-tuned Swin, as Swin's authors store theirs, has no prefix.
    """
    if "layers.0.downsample.reduction.weight" in state:
        state = {name if name.startswith("head.") else f"encoder.{name}": value for name, value in state.items()}
    state = {_moved(name, +1): value for name, value in state.items()}
    return _reordered(
        state, lambda value, channels: channels_last(value.flatten(1) if value.ndim > 1 else value, channels)
    )


def _to_simmim(state: dict[str, Tensor]) -> dict[str, Tensor]:
    def convolution(value: Tensor, channels: int) -> Tensor:
        rows = channels_first(value, channels)
        return rows[:, :, None, None] if rows.ndim > 1 else rows

    state = {_moved(name, -1): value for name, value in state.items()}
    if "head.weight" in state:
        return {name.removeprefix("encoder."): value for name, value in state.items()}
    return _reordered(state, convolution)


def _moved(name: str, by: int) -> str:
    return re.sub(
        r"^encoder\.layers\.(\d+)\.downsample\.",
        lambda found: f"encoder.layers.{int(found[1]) + by}.downsample.",
        name,
    )


def _reordered(state: dict[str, Tensor], order: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    if not _predicts_pixels(state, "decoder.0.weight"):  # an incomplete file, which read() rejects, or another model
        return state
    channels = state[_EMBEDDING].shape[1]
    return {name: order(value, channels) if name.startswith("decoder.0.") else value for name, value in state.items()}


_EMBEDDING = "encoder.patch_embed.proj.weight"


def _predicts_pixels(state: State, head: str = "head.weight") -> bool:
    """Whether a head has a row for every value of a token's pixels; each patch merging doubles the token's side."""
    embedding, weight = state.get(_EMBEDDING), state.get(head)
    if embedding is None or embedding.ndim != 4 or weight is None or weight.ndim < 2:
        return False
    merged = sum(name.endswith(".downsample.reduction.weight") for name in state)
    return weight.shape[0] == embedding[0].numel() * 4**merged


_PREDICTOR_NORM = "pred_head.transforms.0.0."


def _from_maskfeat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In pre-training the last norm of the encoder is stored as the first of the head."""
    return {re.sub(r"^norm\.", _PREDICTOR_NORM, name): value for name, value in state.items()}


def _to_maskfeat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if "pred_head.projections.0.weight" in state:
        return state
    return {name.replace(_PREDICTOR_NORM, "norm."): value for name, value in state.items()}


_MMPRETRAIN_BLOCKS = (
    (r"\.mlp\.fc1\.", ".ffn.layers.0.0."),
    (r"\.mlp\.fc2\.", ".ffn.layers.1."),
    (r"\*\.norm([12])\.", r"*.ln\1."),
)


def _mmpretrain() -> Names:
    """MAE's decoder is the neck. :func:`_from_mmpretrain` renames BEiT's classifier and MaskFeat's linear layer."""
    return _renamed(
        [*VIT, *BEIT, *DECODER, *HEAD, *CLASSIFIER],
        *_MMPRETRAIN_BLOCKS,
        (r"^encoder\.blocks\.", "backbone.layers."),
        (r"^encoder\.norm\.", "backbone.ln1."),
        (r"^encoder\.fc_norm\.", "backbone.ln2."),
        (r"^encoder\.patch_embed\.proj\.", "backbone.patch_embed.projection."),
        (r"^encoder\.", "backbone."),
        (r"^decoder\.norm\.", "neck.ln1."),
        (r"^decoder\.mask_token$", "neck.mask_token"),
        (r"^decoder\.", "neck.decoder_"),
        (r"^head\.", "neck.decoder_pred."),
        (r"^classifier\.", "head.fc."),
    )


_CODES, _LINEAR, _PRED = "head.cls_head.", "neck.fc.", "neck.decoder_pred."


def _from_mmpretrain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(name.startswith("neck.decoder_") for name in state):  # CAE's regressor has a mask token, too
        state = {name: value for name, value in state.items() if name != "neck.mask_token"}
    return {
        re.sub(rf"^({re.escape(_CODES)}|{re.escape(_LINEAR)})", _PRED, name): value for name, value in state.items()
    }


def _to_mmpretrain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if "neck.decoder_embed.weight" in state:
        return state
    beit = any(name.endswith((BIAS_TABLE, "rel_pos_bias.relative_position_bias_table")) for name in state)
    return {name.replace(_PRED, _CODES if beit else _LINEAR): value for name, value in state.items()}


def _from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's Swin has its classifier inside of a head with pooling.

    DINOv2's own files are timm's ViTs with layer scales. They have a mask token ``[1, D]``, on which features of whole
    images do not depend, and in training chunks of blocks: ``blocks.1.6`` is block 6, in chunk 1.
    """
    found = {re.sub(r"^head\.fc\.", "head.", name): value for name, value in state.items()}
    if any(name.endswith(".ls1.gamma") for name in found):
        found = {name: value for name, value in found.items() if name != "mask_token" or value.ndim != 2}
        whole = {re.sub(r"^blocks\.\d+\.(?=\d+\.)", "blocks.", name): value for name, value in found.items()}
        found = whole if len(whole) == len(found) else found
    return found


def _to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(name.startswith("layers.") for name in state):
        return state
    return {re.sub(r"^head\.", "head.fc.", name): value for name, value in state.items()}


_OF_DINO = re.compile(r"head\.(mlp|last_layer)\.")
_OF_IBOT = re.compile(r"head\.(mlp|last_layer|last_norm)2?\.")
"""Projection heads."""
_OF_MOCOV3 = re.compile(r"(base_encoder\.)?head\.(?=\d+\.)|predictor\.")
"""Projection and prediction networks."""


def _from_mocov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("base_encoder."): value for name, value in state.items()}


def _to_mocov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prefix that its main_lincls.py and convert_to_deit.py expect."""
    return {f"module.base_encoder.{name}": value for name, value in state.items()}


def _from_ibot(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A student's mask token ``[1, D]`` as ``[1, 1, D]``."""
    return {name: value[None] if name == _IBOT_MASK and value.ndim == 2 else value for name, value in state.items()}


def _to_ibot(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] if name == _IBOT_MASK else value for name, value in state.items()}


_IBOT_MASK = "masked_embed"
_PLAIN_VIT = [name for name in VIT if "mask_token" not in name and "fc_norm" not in name]


_OF_CAE = re.compile(
    r"mask_token$|(pretext_neck|encoder_to_decoder(_norm)?|teacher)\.|"  # lxtGH/CAE
    r"rd_pos_embed$|(regresser|encoder_to_regresser(_norm)?|alignment_encoder)\.|"  # Atten4Vis/CAE
    r"decoder\.(?=(decoder_blocks|norm|head)\.)"
)
"""Networks of CAE's pre-training: regressor, decoder, and the encoder that sees the masked patches."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ours", Names({name: name for name in VOCABULARY}), container=None, qv_bias="beit"),
        Layout("mae", _official([*(name for name in VIT if "mask_token" not in name), *DECODER, *HEAD])),
        Layout("convmae", _official([*CONVIT, *DECODER, *HEAD])),
        Layout("dmjd", _official([*dict.fromkeys([*CONVIT, *VIT[:1], *VIT[2:]]), *DECODER, *HEAD, *VISIBLE_BRANCH])),
        Layout(
            "simmim",
            _renamed(
                [*dict.fromkeys([*VIT, *BEIT, *SWIN]), *HEAD, *CLASSIFIER], (r"^head\.", "decoder.0."), _FINE_TUNED
            ),
            qv_bias="always",
            after_reading=_from_simmim,
            before_writing=_to_simmim,
            head=_predicts_pixels,
        ),
        Layout(
            "beit",
            _renamed([*VIT, *BEIT, *HEAD, *CLASSIFIER], _TOP, (r"^head\.", "lm_head."), _FINE_TUNED),
            qv_bias="always",
        ),
        Layout("dino", _renamed(_PLAIN_VIT, _TOP), container=None, other_networks=_OF_DINO),
        Layout(
            "ibot",
            _renamed([*_PLAIN_VIT, "encoder.mask_token"], _TOP, (r"^mask_token$", _IBOT_MASK)),
            container="state_dict",
            after_reading=_from_ibot,
            before_writing=_to_ibot,
            other_networks=_OF_IBOT,
        ),
        Layout(
            "mocov3",
            _renamed(_PLAIN_VIT, _TOP),
            container="state_dict",
            after_reading=_from_mocov3,
            before_writing=_to_mocov3,
            other_networks=_OF_MOCOV3,
        ),
        Layout(
            "cae",
            Names({name: name for name in [*VIT, *BEIT] if "mask_token" not in name and "fc_norm" not in name}),
            qv_bias="always",
            other_networks=_OF_CAE,
        ),
        Layout(
            "maskfeat",
            _renamed(
                [*(name for name in VIT if "fc_norm" not in name), *HEAD, *CLASSIFIER],
                (r"^encoder\.norm\.", _PREDICTOR_NORM),
                _TOP,
                (r"^head\.", "pred_head.projections.0."),
                (r"^classifier\.", "head.projection."),
            ),
            container="model_state",
            after_reading=_from_maskfeat,
            before_writing=_to_maskfeat,
        ),
        Layout(
            "mmpretrain",
            _mmpretrain(),
            container="state_dict",
            qv_bias="beit",
            after_reading=_from_mmpretrain,
            before_writing=_to_mmpretrain,
            other_networks=re.compile(
                r"(neck\.(regressors|decoders|norm_regressor|norm_decoder|head)|teacher)\."
            ),  # CAE
        ),
        Layout(
            "timm",
            _renamed(
                [
                    name
                    for name in dict.fromkeys([*VIT, *TIMM_VIT, *BEIT, *CONVIT, *SWIN, *CLASSIFIER])
                    if "mask_token" not in name and "_output_decode" not in name
                ],
                _TOP,
                _FINE_TUNED,
            ),
            container=None,
            qv_bias="beit",
            after_reading=_from_timm,
            before_writing=_to_timm,
        ),
    )
}


def detect(state: State, beside: Sequence[str] = ()) -> tuple[Layout, list[str]]:
    """The first layout that has every name in ``state``, and the names of all layouts that do.

    They agree then: MAE's encoder and timm's ViT, for example, have the same names and shapes. Layouts whose
    ``other_networks`` are those ``beside`` the state are preferred: DINO's by its projection head; then those that miss
    no name: a lone mask token is BEiT's, and in MAE's layout the decoder's.

    Raises:
        CheckpointError: if there is none, with the names that the nearest layout does not have.
    """
    unknown = {name: layout.unknown(state) for name, layout in LAYOUTS.items()}
    fitting = [name for name, rest in unknown.items() if not rest]
    if fitting:
        networks = {name: LAYOUTS[name].other_networks for name in fitting if beside}
        theirs = [name for name, found in networks.items() if found is not None and all(map(found.match, beside))]
        fitting = theirs or fitting
        fitting = [name for name in fitting if LAYOUTS[name].is_complete(state)] or fitting
        return LAYOUTS[fitting[0]], fitting
    nearest = min(unknown, key=lambda name: len(unknown[name]))
    check_stem(unknown[nearest])
    if len(unknown[nearest]) == len(LAYOUTS[nearest]._prepared(state)):
        raise CheckpointError(
            f"no layout has all of these names, nor any: {summary(state)}; encoders here are ViT, ConvViT and Swin, "
            f"the layouts {', '.join(LAYOUTS)}; use the model's own code"
        )
    raise CheckpointError(
        f"no layout has all of these names; the nearest is {nearest}, which lacks {len(unknown[nearest])} of "
        f"{len(state)}: {summary(unknown[nearest])}; {advice(unknown[nearest], f'source={nearest} unknown=drop')}; "
        f"the layouts are {', '.join(LAYOUTS)}"
    )


_PREFIXES = ("encoder.", "backbone.", "base_encoder.", "visual.", "vit.", "model.", "net.")


_IN_FRONT = re.compile(r"([^.]+\.)(?:.*\.)?patch_embed")
"""A prefix of an encoder."""
_MOST_PREFIXES = 4


def peel(state: State, most: int = _MOST_PREFIXES) -> tuple[dict[str, Tensor], list[str]]:
    """``state`` without a prefix such as ``backbone.`` in front of a layout's names, and the names beside it.

    Up to ``most`` prefixes may be stacked. A state that a layout has as it is, or that has no prefix, is unchanged, as
    is one with several encoders under prefixes that are not known.
    """
    others = dict.fromkeys(found[1] for name in state if (found := _IN_FRONT.match(name)) and found[1] not in _PREFIXES)
    for prefixes in (_PREFIXES, others) if most else ():
        fitting = [peeled for prefix in prefixes if (peeled := _without(state, prefix, most)) is not None]
        if fitting and (prefixes is _PREFIXES or len(fitting) == 1):
            return fitting[0]
    return dict(state), []


def _without(state: State, prefix: str, most: int) -> tuple[dict[str, Tensor], list[str]] | None:
    """``state`` as :func:`peel` gives it, if it is to be peeled of ``prefix``."""
    inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not inner or not all(layout.unknown(_prefixed(inner, prefix)) for layout in LAYOUTS.values()):
        return None
    inner, left_out = peel(inner, most - 1)
    if all(layout.unknown(inner) for layout in LAYOUTS.values()):
        return None
    return inner, left_out + [name for name in state if not name.startswith(prefix)]


def _prefixed(state: State, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}
